"""Steps of environments: concurrent, limited in time, checked, and named when they fail."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from nemo_like.agents.environment_worker import EnvironmentWorker
from nemo_like.agents.events import CallAnswer, CallRequest, EpisodeEnd, EpisodeStart
from nemo_like.agents.statuses import Status
from nemo_like.agents.workers import AgentWorkers
from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed.errors import WorkerError
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.environments.environment import Conversation, EnvironmentFailure, StepOutcome
from nemo_like.environments.environment_calls import load_environment
from tests.data.chat_templates import QWEN
from tests.data.tiny_tokenizer import tiny_tokenizer

_MODULE = "tests.environments.user_environments"


def _config(name: str, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(path=f"{_MODULE}.{name}", options=options)


def _turn(completion: str = "4", **row: Any) -> Conversation:
    messages = ({"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": completion})
    return Conversation(messages=messages, row={"prompt": "2+2=?", **row})


def _outcomes(
    config: EnvironmentConfig,
    turns: Sequence[Conversation],
    timeouts_s: Sequence[float] | None = None,
    **limits: Any,
) -> list[StepOutcome]:
    """Answer all turns at the same time."""
    worker = EnvironmentWorker(None, config=config, **limits)
    try:
        with ThreadPoolExecutor(len(turns)) as pool:
            return list(pool.map(worker.step, turns, timeouts_s or [60.0] * len(turns)))
    finally:
        worker.close()


def _ends(
    config: EnvironmentConfig,
    texts: Sequence[str],
    rows: Sequence[dict[str, Any]],
    report: Callable[[str], None] = print,
    **limits: Any,
) -> list[EpisodeEnd]:
    """Run a conversation on each row; the model writes `texts`, and "4" after them."""
    context = local_context(num_threads=1)
    kwargs = {"config": config, **limits}
    workers = AgentWorkers(
        lambda _: LocalGroup(EnvironmentWorker, kwargs, context, name="environment"),
        1,
        report=report,
    )
    encoder = ChatEncoder(tiny_tokenizer(QWEN))
    workers.set_encoder(encoder)
    messages = [{"role": "user", "content": "2+2=?"}]
    prompt = encoder.encode_prompt(messages)
    starts = [
        EpisodeStart(
            episode=index,
            row={"prompt": "2+2=?", **row},
            seed=index,
            max_total_tokens=1000,
            prompt_ids=prompt,
            messages=messages,
        )
        for index, row in enumerate(rows)
    ]
    workers.start(starts)
    ends: dict[int, EpisodeEnd] = {}
    try:
        while len(ends) < len(starts):
            workers.start_calls(is_idle=True)
            answers = []
            for event in workers.collect():
                if isinstance(event, EpisodeEnd):
                    ends[event.episode] = event
                assert not isinstance(event, CallRequest) or event.is_blocking
                if isinstance(event, CallRequest):
                    text = texts[event.number] if event.number < len(texts) else "4"
                    ids = encoder.encode_continuation(f"{text}<|im_end|>")
                    answers.append(
                        CallAnswer(
                            episode=event.episode,
                            number=event.number,
                            token_ids=ids,
                            finish_reason="stop",
                        )
                    )
            workers.answer(answers)
        return [ends[index] for index in range(len(starts))]
    finally:
        workers.shutdown()


def test_state_observation_reward_and_metrics_of_a_step() -> None:
    (outcome,) = _outcomes(_config("Scripted"), [_turn("12345", num_turns=2)])
    assert outcome.state == {"lengths": [5]}
    assert outcome.observation == ({"role": "user", "content": "1+5"},)
    assert outcome.rewards == {"environment_turns": 1.0, "environment_characters": 5.0}
    assert outcome.metrics == {"tool_calls": 1.0}
    assert not outcome.done and not outcome.is_timeout and outcome.seconds >= 0


def test_a_conversation_is_an_episode_of_one_row() -> None:
    (end,) = _ends(_config("Scripted"), ["12345", "123"], [{"num_turns": 3}])
    assert end.status is Status.DONE and end.failure is None
    assert end.rewards == {"environment_turns": 3.0, "environment_characters": 9.0}
    assert end.call_rewards == [6.0, 4.0, 2.0]
    assert end.metrics == {"tool_calls": 3.0}
    assert [list(numbers) for numbers, _ in end.rows] == [[0, 1, 2]] == [list(end.answered)]
    assert [is_trained for _, is_trained in end.rows] == [[True, True, True]]
    texts = ["2+2=?", "12345", "1+5", "123", "2+3", "4"]
    assert [message["content"] for message in end.messages] == texts
    assert [message["role"] for message in end.messages] == ["user", "assistant"] * 3


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_slow_step_does_not_delay_another_conversation(kind: str) -> None:
    # The first step can only end after the second: one after the other would reach the time limit.
    outcomes = _outcomes(_config("Meeting", kind=kind), [_turn(do="wait"), _turn(do="go")])
    assert [outcome.is_timeout for outcome in outcomes] == [False, False]


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_step_that_does_not_end_ends_its_own_conversation(kind: str) -> None:
    turns = [_turn(do="hang"), _turn(do="answer")]
    outcomes = _outcomes(_config("Hanging", kind=kind), turns, [0.05, 60.0])
    assert [outcome.is_timeout for outcome in outcomes] == [True, False]
    assert outcomes[0].done and outcomes[0].rewards == {}
    assert outcomes[0].seconds >= 0.05
    assert outcomes[1].rewards == {"environment": 1.0} and outcomes[1].state == {"kept": 1}


def test_the_time_limit_is_for_all_steps_of_a_conversation() -> None:
    config = replace(_config("Sleeping", num_turns=9), timeout_s=1.0)
    (end,) = _ends(config, [], [{"seconds": 0.4}])
    # The third step ends after 1.2 s at the earliest.
    assert end.status is Status.LIMIT_TIME and len(end.answered) <= 3
    assert end.call_rewards == [1.0] * (len(end.answered) - 1) + [0]
    assert end.rewards == {"environment": len(end.answered) - 1.0}
    assert end.seconds >= 1.0


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", "step raised KeyError: 'no such tool'"),
        ("handle", "step raised KeyError: 'no such tool'"),
        ("exit", "step raised SystemExit: 3"),
        ("nothing", "step returned None; return a nemo_like.environments.environment.StepResult"),
        ("silent", "step returned neither an observation nor done=True"),
        ("nan", "step returned nan as the reward, which is not a finite number"),
        ("text", "step returned '1' as the reward, which is not a finite number"),
        ("assistant", "only the model has turns of role assistant"),
        ("no content", "its content is not text"),
        ("metric", r"step returned the name 'a/b' in metrics"),
        ("state", "reset returned 7, which is not a mapping; return {} for no state"),
        ("interrupt", "step raised KeyboardInterrupt"),
        ("unreadable", r"step raised Unreadable: \(its text raises IndexError\)"),
        ("close", "step raised GeneratorExit"),
        ("large", "step returned 10+ as the reward, which is not a finite number"),
        ("array", "step returned a value whose check raised ValueError"),
    ],
)
def test_a_failure_names_key_problem_and_conversation(do: str, message: str) -> None:
    config = _config("Misbehaving")
    rows = [{"do": do}, {"do": do}]
    with pytest.raises(WorkerError, match=message) as caught:
        _ends(replace(config, on_error="stop"), ["my answer"], rows)
    failure = caught.value.cause
    assert isinstance(failure, EnvironmentFailure)
    text = str(failure)
    assert text.startswith(f"environment.path {_MODULE}.Misbehaving ")
    assert f"'do': '{do}'" in text and "turn 1 of the model: 'my answer'" in text
    assert str(pickle.loads(pickle.dumps(failure))) == text
    # The others go on without it; one warning for both.
    reported: list[str] = []
    for end in _ends(replace(config, on_error="drop"), ["my answer"], rows, reported.append):
        assert end.status is Status.FAILED_PROGRAM and str(end.failure) == text
        assert end.rewards == {} and end.call_rewards == []
        problem = pickle.loads(pickle.dumps(end)).failure.problem
        assert re.search(message, problem.text) and str(problem) == text.partition(". A mis")[0]
        assert problem.kind == ("raised" if problem.text.startswith("step raised") else "value")
    (line,) = reported
    assert line.startswith(f"warning: {text}")


def test_an_async_step_that_blocks_its_process_stops_the_run() -> None:
    config = replace(_config("Blocking"), timeout_s=0.1)
    with pytest.raises(WorkerError, match=r"blocked its process(.|\n)*time\.sleep"):
        _ends(config, [], [{"seconds": 1.5}], margin_s=0.1)


def test_the_wait_for_a_thread_is_no_time_of_the_step() -> None:
    # All together take 1.8 s, each of them 0.3 s.
    turns = [_turn(seconds=0.3) for _ in range(12)]
    outcomes = _outcomes(_config("Sleeping"), turns, [1.5] * 12, max_threads=2)
    assert not any(outcome.is_timeout for outcome in outcomes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (_config("Absent"), r"environment\.path is '.*Absent', but .* has no 'Absent'; it has"),
        (_config("WithoutStep"), r"environment\.path is .*, which has no step; name a class"),
        (_config("annotations"), "environment.path"),
        (_config("Meeting"), r"environment\.options: .*Meeting\(.*failed with TypeError"),
    ],
)
def test_an_environment_that_cannot_be_had_is_named_with_its_key(
    config: EnvironmentConfig, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(config)
