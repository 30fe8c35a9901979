"""Unmodified programs with the frameworks of agents: their rows have the ids of the generator."""

from __future__ import annotations

import pytest

from nemo_like.agents.launcher import Program
from nemo_like.agents.statuses import Status
from tests.agents.scripted import END, assert_exact
from tests.agents.sdks.running import PROGRAMS, call_text, interpreter, run_scripted

pytestmark = pytest.mark.exhaustive

ADD = call_text("add", "I add.", a=2, b=2)
TWICE = [ADD, call_text("add", a=4, b=3), f"It is 4.{END}"]
BASH = call_text("bash", "I look.", command="echo 4")
SUBMIT = call_text("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 4")
CODE = f"Thought: I add.\n<code>\nprint(2 + 2)\n</code>{END}"
FINAL = f"Thought: done.\n<code>\nfinal_answer(4)\n</code>{END}"

CASES = {
    "openai": ("openai_chat.py", [], TWICE, 1),
    "openai streamed": ("openai_chat.py", ["--stream"], TWICE, 1),
    "langgraph": ("langgraph_agent.py", [], TWICE, 1),
    "openai-agents": ("openai_agents.py", [], TWICE, 1),
    "openai-agents streamed": ("openai_agents.py", ["--stream"], TWICE, 1),
    # It writes its calls into the history as text.
    "smolagents": ("smolagents_tools.py", [], [ADD, call_text("final_answer", answer="4")], 2),
    "smolagents code": ("smolagents_code.py", [], [CODE, FINAL], 2),
    # It does not send back a reply without a call.
    "mini-swe-agent": ("mini_swe_agent.py", [], [f"I do not know.{END}", BASH, SUBMIT], 2),
}


@pytest.mark.parametrize("name", CASES)
def test_an_unmodified_program_makes_exact_rows(name: str) -> None:
    file, arguments, script, num_rows = CASES[name]
    command = (interpreter("sdks"), str(PROGRAMS / file), *arguments)
    session, model, status, end = run_scripted(
        Program(command=command), script, {"prompt": "2 + 2?"}
    )
    assert status is Status.DONE, end.output[-3000:]
    assert "RESULT" in end.output and "4" in end.output.rpartition("RESULT")[2]
    assert len(model.log) == len(script)
    assert_exact(session.episode, model.log)
    assert len(session.episode.rows()) == num_rows
