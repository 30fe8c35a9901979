"""Steps of environments: concurrent, limited in time, checked, and named when they fail."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.distributed.errors import WorkerError
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.environments.environment import (
    Conversation,
    EnvironmentFailure,
    StepOutcome,
    StepTask,
)
from nemo_like.environments.environment_workers import (
    EnvironmentWorker,
    EnvironmentWorkers,
    load_environment,
)

_MODULE = "tests.environments.user_environments"


def _config(name: str, **options: Any) -> EnvironmentConfig:
    return EnvironmentConfig(path=f"{_MODULE}.{name}", options=options)


def _task(
    key: int, completion: str = "4", *, turn: int = 1, timeout_s: float | None = 60.0, **row: Any
) -> StepTask:
    messages = ({"role": "user", "content": "2+2=?"}, {"role": "assistant", "content": completion})
    conversation = Conversation(messages=messages, row={"prompt": "2+2=?", **row}, turn=turn)
    return StepTask(key=key, conversation=conversation, timeout_s=timeout_s)


def _local(
    config: EnvironmentConfig, report: Callable[[str], None] = print, **limits: float
) -> EnvironmentWorkers:
    def start(index: int) -> LocalGroup:
        context = local_context(num_threads=1)
        kwargs = {"config": config, **limits}
        return LocalGroup(EnvironmentWorker, kwargs, context, name="environment")

    return EnvironmentWorkers(start, 1, report=report)


def _outcomes(workers: EnvironmentWorkers, tasks: list[StepTask]) -> dict[int, StepOutcome]:
    """Run all tasks; their outcomes by key."""
    workers.submit(tasks)
    outcomes: dict[int, StepOutcome] = {}
    while workers.num_unfinished:
        for outcome in workers.collect(1.0):
            outcomes[outcome.key] = outcome
    assert workers.collect(0.0) == []
    workers.shutdown()
    return outcomes


def test_state_observation_reward_and_metrics_of_a_step() -> None:
    outcome = _outcomes(_local(_config("Scripted")), [_task(7, "12345", num_turns=2)])[7]
    assert outcome.state == {"lengths": [5]}
    assert outcome.observation == ({"role": "user", "content": "1+5"},)
    assert outcome.rewards == {"environment_turns": 1.0, "environment_characters": 5.0}
    assert outcome.metrics == {"tool_calls": 1.0}
    assert not outcome.done and not outcome.is_timeout and outcome.seconds >= 0


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_slow_step_does_not_delay_another_conversation(kind: str) -> None:
    # The first step can only end after the second: one after the other would reach the time limit.
    tasks = [_task(0, do="wait"), _task(1, do="go")]
    outcomes = _outcomes(_local(_config("Meeting", kind=kind)), tasks)
    assert [outcomes[key].is_timeout for key in (0, 1)] == [False, False]


@pytest.mark.parametrize("kind", ["async", "plain"])
def test_a_step_that_does_not_end_ends_its_own_conversation(kind: str) -> None:
    tasks = [_task(0, do="hang", timeout_s=0.05), _task(1, do="answer")]
    outcomes = _outcomes(_local(_config("Hanging", kind=kind)), tasks)
    assert sorted(outcomes) == [0, 1] and not outcomes[1].is_timeout
    assert outcomes[0].is_timeout and outcomes[0].done and outcomes[0].rewards == {}
    assert outcomes[0].seconds >= 0.05
    assert outcomes[1].rewards == {"environment": 1.0} and outcomes[1].state == {"kept": 1}


@pytest.mark.parametrize(
    ("do", "message"),
    [
        ("raise", "step raised KeyError: 'no such tool'"),
        ("exit", "step raised SystemExit: 3"),
        ("nothing", "step returned None; return a nemo_like.environments.environment.StepResult"),
        ("silent", "step returned neither an observation nor done=True"),
        ("nan", "step returned nan as the reward, which is not a finite number"),
        ("text", "step returned '1' as the reward, which is not a finite number"),
        ("assistant", "only the model has turns of role assistant"),
        ("no content", "its content is not text"),
        ("metric", r"step returned the name 'a/b' in metrics"),
        ("state", "reset returned a state that is not JSON"),
        ("interrupt", "step raised KeyboardInterrupt"),
        ("unreadable", r"step raised Unreadable: \(its text raises IndexError\)"),
        ("close", "step raised GeneratorExit"),
        ("large", "step returned 10+ as the reward, which is not a finite number"),
        ("array", "step returned a value whose check raised ValueError"),
    ],
)
def test_a_failure_names_key_problem_and_conversation(do: str, message: str) -> None:
    workers = _local(replace(_config("Misbehaving"), on_error="stop"))
    with pytest.raises(WorkerError, match=message) as caught:
        _outcomes(workers, [_task(0, "my answer", do=do)])
    failure = caught.value.cause
    assert isinstance(failure, EnvironmentFailure)
    text = str(failure)
    assert text.startswith(f"environment.path {_MODULE}.Misbehaving ")
    assert f"'do': '{do}'" in text and "turn 1 of the model: 'my answer'" in text
    assert str(pickle.loads(pickle.dumps(failure))) == text
    workers.shutdown()
    # The others go on without it; one warning for both.
    reported: list[str] = []
    workers = _local(replace(_config("Misbehaving"), on_error="drop"), reported.append)
    outcomes = _outcomes(workers, [_task(0, "my answer", do=do), _task(1, "my answer", do=do)])
    for outcome in outcomes.values():
        assert outcome.done and outcome.rewards == {} and str(outcome.failure) == text
        problem = pickle.loads(pickle.dumps(outcome)).failure.problem
        assert re.search(message, problem.text) and str(problem) == text.partition(". A mis")[0]
        assert problem.kind == ("raised" if problem.text.startswith("step raised") else "value")
    (line,) = reported
    assert line.startswith(f"warning: {text}")


def test_an_async_step_that_blocks_its_process_stops_the_run() -> None:
    config = replace(_config("Blocking"), timeout_s=0.1)
    tasks = [_task(0, seconds=1.5, timeout_s=0.1)]
    with pytest.raises(WorkerError, match=r"blocked its process(.|\n)*time\.sleep"):
        _outcomes(_local(config, margin_s=0.1), tasks)


def test_the_wait_for_a_thread_is_no_time_of_the_step() -> None:
    tasks = [_task(key, seconds=0.2, timeout_s=0.5) for key in range(8)]
    outcomes = _outcomes(_local(_config("Sleeping"), max_threads=2), tasks)
    assert not any(outcome.is_timeout for outcome in outcomes.values())


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
