"""Environments of other ecosystems in the environments of `make agent-env`."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_like.agents.launcher import Program
from nemo_like.agents.statuses import Status
from tests.agents.scripted import END, assert_exact
from tests.agents.sdks.running import ROOT, call_text, interpreter, run_scripted

pytestmark = pytest.mark.exhaustive

EXAMPLES = ROOT / "examples" / "agents"


@pytest.fixture(autouse=True)
def example_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES))


@contextlib.contextmanager
def serving(python: str, script: str) -> Iterator[int]:
    """A server of an example at a free port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([python, str(EXAMPLES / script), str(port)])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def program(ecosystem: str, environment: str, **options: Any) -> Program:
    return Program(
        path=f"nemo_like.agents.runners.{ecosystem}.solve",
        python=interpreter(environment),
        options=options,
    )


def mcp_program(**options: Any) -> Program:
    server = [interpreter("sdks"), str(EXAMPLES / "mcp_calculator" / "server.py")]
    return program("mcp", "sdks", **{"servers": {"calculator": server}, **options})


def test_tools_of_an_mcp_server_over_stdio() -> None:
    script = [
        call_text("calculate", "First.", expression="12*7"),
        call_text("calculate", expression="12*"),
        call_text("compute", expression="1"),
        f"It is 84.{END}",
    ]
    session, model, status, end = run_scripted(mcp_program(), script, {"prompt": "12*7?"})
    assert status is Status.DONE, end.output[-3000:]
    # The reward functions score the last reply.
    assert end.rewards is None
    messages = session.episode.messages
    results = [each["content"] for each in messages if each["role"] == "tool"]
    assert results[0] == "84" and results[1] == "error: not an expression of two integers"
    assert results[2] == "error: there is no tool 'compute'"
    assert messages[-1]["content"] == "It is 84."
    assert len(session.episode.rows()) == 1
    assert_exact(session.episode, model.log)


def test_tools_of_an_mcp_server_over_http() -> None:
    with serving(interpreter("sdks"), "mcp_calculator/server.py") as port:
        options = {"servers": {"remote": f"http://127.0.0.1:{port}/mcp"}, "max_turns": 1}
        script = [call_text("calculate", expression="2+3")]
        session, _, status, end = run_scripted(mcp_program(**options), script, {"prompt": "2+3?"})
    assert status is Status.DONE, end.output[-3000:]
    assert len(session.episode.calls) == 1


def test_an_environment_of_openenv() -> None:
    with serving(interpreter("openenv"), "openenv_calculator/server.py") as port:
        options = {"action": "text", "observation": "text", "reset": {"answer": "answer"}}
        played = program("openenv", "openenv", url=f"http://127.0.0.1:{port}", **options)
        script = [f"{text}{END}" for text in ("<tool>12*7</tool>", "<tool>12*</tool>", "#### 84")]
        row = {"prompt": "12*7", "answer": "84"}
        session, model, status, end = run_scripted(played, script, row)
    assert status is Status.DONE, end.output[-3000:]
    assert end.rewards == {"reward": 1.0}
    contents = [each["content"] for each in session.episode.messages]
    assert contents[:4] == ["12*7", "<tool>12*7</tool>", "84", "<tool>12*</tool>"]
    assert contents[4:] == ["error", "#### 84"]
    assert_exact(session.episode, model.log)


ENV = {"taskset": {"id": "verifiers_sums"}}


def test_an_environment_of_verifiers() -> None:
    python = interpreter("verifiers")
    command = [python, "-m", "verifiers_sums", "3", "0"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == 3
    left, right = rows[1]["prompt"].split("+")
    answer = str(int(left) + int(right))
    for text, reward in ((f"#### {answer}", 1.0), ("#### x", 0.0)):
        session, model, status, end = run_scripted(
            program("verifiers", "verifiers", **ENV), [text + END], rows[1]
        )
        assert status is Status.DONE, end.output[-3000:]
        assert end.rewards == {"right": reward}
        assert session.episode.messages[0]["content"] == rows[1]["prompt"]
        assert_exact(session.episode, model.log)
