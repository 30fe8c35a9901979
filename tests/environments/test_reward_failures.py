"""Reward functions that hang, raise, end their process or return no number, under each policy."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.rollout import OnError, RewardConfig, RewardFunctionConfig
from nemo_like.distributed.errors import WorkerError
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.environments.reward import BadRewardKind, RewardError, RewardProblem, RewardSample
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker, ScoredSamples
from nemo_like.environments.sandbox import linux
from nemo_like.generation.requests import SamplingParams
from nemo_like.rollout.collector import RolloutJob, check_error_share
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.rows import problem_metrics

_CONTEXT = local_context(num_threads=1)
_SOURCE = """
import asyncio, os, signal, time
import numpy as np

def is_bad(sample): return sample.completion == "bad"
def scaled(sample, *, scale=1): return scale * len(sample.completion)
def good(sample): return float(len(sample.completion))
def hangs(sample):
    while is_bad(sample): time.sleep(0.01)
    return 1.0
def hangs_in_c(sample):
    if is_bad(sample): signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(1000)
    return 1.0
async def waits(sample):
    if is_bad(sample): await asyncio.sleep(1000)
    return 1.0
async def blocks(sample):
    await asyncio.sleep(0)
    if is_bad(sample): time.sleep(1000)
    return 1.0
def raises(sample):
    if is_bad(sample): raise KeyError("tests")
    return 1.0
def raises_timeout(sample):
    if is_bad(sample): raise TimeoutError("of its own")
    return 1.0
def crashes(sample):
    if is_bad(sample): os.kill(os.getpid(), signal.SIGSEGV)
    return 1.0
def leaves(sample):
    if is_bad(sample): raise SystemExit(3)
    return 1.0
def ends(sample):
    if is_bad(sample): os._exit(3)
    return 1.0
def nan(sample): return float("nan") if is_bad(sample) else 1.0
def nearly_infinite(sample): return 3e38 if is_bad(sample) else 1.0
def tensor(sample):
    import torch
    return torch.tensor([1.0, 2.0]) if is_bad(sample) else torch.tensor(1.0)
def array(sample): return np.ones(1) if is_bad(sample) else np.float32(1.0)
def boolean(sample): return sample.completion != "bad"
def too_large(sample): return 10**400 if is_bad(sample) else 1.0
def infinite_float32(sample): return 1e39 if is_bad(sample) else 1.0
def raises_base(sample):
    if is_bad(sample): raise BaseException("no Exception")
    return 1.0
class Unreadable(Exception):
    def __str__(self): return self.args[1]
def raises_unreadable(sample):
    if is_bad(sample): raise Unreadable("one argument")
    return 1.0
def raises_exit(sample):
    if is_bad(sample): raise GeneratorExit
    return 1.0
async def raises_exit_async(sample):
    await asyncio.sleep(0)
    return raises_exit(sample)
async def is_cancelled(sample):
    if is_bad(sample): raise asyncio.CancelledError
    return 1.0
def batch_mapping(samples): return {1: 1.0, 2: 1.0, 3: 1.0}
def batch_array(samples): return np.array([np.nan if is_bad(s) else 1 for s in samples])
def batch_tensor(samples):
    import torch
    return torch.tensor([2.0 for _ in samples])
def batch_hangs(samples):
    while any(map(is_bad, samples)): time.sleep(0.01)
    return [1.0] * len(samples)
def batch_too_short(samples): return [1.0] if any(map(is_bad, samples)) else [1.0] * len(samples)
def batch_raises(samples): return [1 / (not is_bad(sample)) for sample in samples]
async def batch_async(samples):
    await asyncio.sleep(0)
    return [len(sample.completion) for sample in samples]
for function in (batch_mapping, batch_array, batch_tensor, batch_hangs, batch_too_short,
                 batch_raises, batch_async):
    function.batched = True
"""


@pytest.fixture(autouse=True)
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "failing_rewards.py").write_text(_SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("failing_rewards", None)


def _samples(*completions: str) -> list[RewardSample]:
    return [RewardSample(prompt="p", completion=completion) for completion in completions]


def _score(
    function: str, on_error: OnError, *completions: str, timeout_s: float | None = None
) -> ScoredSamples:
    """Score with the function `mine` of weight 2 and a second function."""
    functions = {
        "mine": RewardFunctionConfig(path=f"failing_rewards.{function}", weight=2.0),
        "good": RewardFunctionConfig(path="failing_rewards.good"),
    }
    config = RewardConfig(functions=functions, timeout_s=timeout_s, on_error=on_error)
    kwargs = {"functions": functions, "timeout_s": timeout_s, "on_error": on_error}
    environment = RewardEnvironment(LocalGroup(RewardWorker, kwargs, _CONTEXT), config)
    try:
        environment.submit(range(len(completions)), _samples(*completions))
        (scored,) = environment.collect(0.0)
        return scored
    finally:
        environment.shutdown()


_FAILURES = [
    ("raises", "raised", "raised KeyError: 'tests'"),
    ("raises_timeout", "raised", "raised TimeoutError: of its own"),
    ("nan", "value", "returned nan, which is not a finite number"),
    ("tensor", "value", "returned tensor([1., 2.]), which is not a finite number"),
    ("array", "value", "returned array([1.]), which is not a finite number"),
    ("leaves", "ended", "called sys.exit(3), which would end the run"),
    ("too_large", "value", f"returned {'1' + 199 * '0'}... (401 characters), which is not"),
    ("infinite_float32", "value", "returned 1e+39, which is not a finite number"),
    ("nearly_infinite", "value", "makes the reward 6e+38, which is not finite in float32"),
    ("raises_base", "raised", "raised BaseException: no Exception"),
    ("is_cancelled", "raised", "raised CancelledError"),
    ("raises_unreadable", "raised", "raised Unreadable: (its text raises IndexError)"),
    ("raises_exit", "raised", "raised GeneratorExit"),
    ("raises_exit_async", "raised", "raised GeneratorExit"),
]


@pytest.mark.parametrize(("function", "kind", "text"), _FAILURES)
def test_a_failure_under_each_policy(function: str, kind: BadRewardKind, text: str) -> None:
    with pytest.raises(WorkerError) as caught:
        _score(function, "stop", "a", "bad", "abc")
    assert isinstance(caught.value.cause, RewardError)
    message = str(caught.value.cause)
    assert f"reward.functions.mine (failing_rewards.{function}) {text}" in message
    assert "completion: 'bad'" in message
    for on_error in ("zero", "drop"):
        scored = _score(function, on_error, "a", "bad", "abc")
        assert scored.rewards.tolist() == [3.0, 3.0, 5.0]
        assert scored.components["mine"].tolist() == [1.0, 0.0, 1.0]
        assert scored.problems[0] is None and scored.problems[2] is None
        problem = scored.problems[1]
        assert problem is not None and problem.text.startswith(text)
        # The text of an exception ends with the line of the function.
        assert ("failing_rewards.py:" in problem.text) == (kind == "raised")
        path = f"failing_rewards.{function}"
        assert problem == RewardProblem("mine", path, kind, problem.text)


def test_a_bool_is_0_or_1_and_a_scalar_of_a_library_a_number() -> None:
    assert _score("boolean", "stop", "a", "bad").components["mine"].tolist() == [1.0, 0.0]
    assert _score("tensor", "stop", "a").components["mine"].tolist() == [1.0]
    assert _score("array", "stop", "a").components["mine"].tolist() == [1.0]


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        ("hangs_in_c", "timeout", "exceeded reward.timeout_s 1"),
        ("waits", "timeout", "exceeded reward.timeout_s 1"),
        ("blocks", "timeout", "exceeded reward.timeout_s 1"),
        ("crashes", "ended", "ended its process (signal SIGSEGV)"),
        ("ends", "ended", "ended its process (exit status 3)"),
    ],
)
def test_calls_with_a_timeout_fail_alone(function: str, kind: BadRewardKind, text: str) -> None:
    before = set(linux.descendants(os.getpid()))
    start = time.monotonic()
    scored = _score(function, "drop", "a", "bad", "abc", "bad", timeout_s=1.0)
    assert time.monotonic() - start < 100
    assert scored.components["mine"].tolist() == [1.0, 0.0, 1.0, 0.0]
    assert scored.components["good"].tolist() == [1.0, 3.0, 3.0, 3.0]
    problem = RewardProblem("mine", f"failing_rewards.{function}", kind, text)
    assert scored.problems == [None, problem, None, problem]
    # The process that hung is gone, and so is the one that replaced it.
    assert set(linux.descendants(os.getpid())) == before


def test_a_timeout_stops_the_run_with_the_sample() -> None:
    with pytest.raises(WorkerError, match=r"exceeded reward.timeout_s 1, on this sample"):
        _score("hangs", "stop", "a", "bad", timeout_s=1.0)


def test_a_caller_with_a_limit_of_its_own_names_it() -> None:
    config = RewardFunctionConfig(path="failing_rewards.hangs")
    worker = RewardWorker(
        _CONTEXT, functions={"mine": config}, timeout_s=0.5, timeout_name="half a second"
    )
    with pytest.raises(RewardError, match=r"hangs\) exceeded half a second, on this sample"):
        worker.score(_samples("bad"))


@pytest.mark.parametrize(
    ("function", "values", "text"),
    [
        ("batch_array", [1.0, 0.0, 1.0], "returned nan"),
        ("batch_tensor", [2.0, 2.0, 2.0], ""),
        ("batch_too_short", [0.0, 0.0, 0.0], "returned 1 values for a batch of 3 samples"),
        ("batch_mapping", [0.0, 0.0, 0.0], "returned a dict, which is not a list of numbers"),
        ("batch_raises", [0.0, 0.0, 0.0], "raised ZeroDivisionError"),
    ],
)
def test_a_batched_function_gets_all_samples(function: str, values: list[float], text: str) -> None:
    scored = _score(function, "zero", "a", "bad", "abc")
    assert scored.components["mine"].tolist() == values
    for value, problem in zip(values, scored.problems, strict=True):
        assert (problem is None) == (value != 0)
        assert problem is None or text in str(problem)


def test_a_batched_function_that_hangs_fails_for_its_samples() -> None:
    scored = _score("batch_hangs", "zero", "a", "bad", timeout_s=1.0)
    assert [problem and problem.kind for problem in scored.problems] == ["timeout", "timeout"]
    assert scored.components["good"].tolist() == [1.0, 3.0]


def test_an_attribute_declares_a_batched_function() -> None:
    assert _score("batch_async", "stop", "a", "abc").components["mine"].tolist() == [1.0, 3.0]


def test_options_are_keyword_arguments() -> None:
    path = "failing_rewards.scaled"
    config = RewardFunctionConfig(path=path, options={"scale": 3})
    worker = RewardWorker(_CONTEXT, functions={"mine": config}, timeout_s=5.0)
    assert worker.score(_samples("ab")).components["mine"].tolist() == [6.0]
    worker.close()
    wrong = RewardFunctionConfig(path=path, options={"factor": 3})
    with pytest.raises(ConfigError, match=r"reward.functions.mine.options is \{'factor': 3\}"):
        RewardWorker(_CONTEXT, functions={"mine": wrong})


def _problem(kind: BadRewardKind, text: str) -> RewardProblem:
    return RewardProblem("mine", "m.f", kind, text)


def test_too_many_errors_stop_the_run_with_one_message() -> None:
    config = RewardConfig(on_error="zero", max_error_share=0.25)
    two = [_problem("value", "returned None")] * 2
    check_error_share(two, 8, config)
    problems = [*two, _problem("timeout", "exceeded reward.timeout_s 5")]
    with pytest.raises(RewardError) as caught:
        check_error_share(problems, 8, config)
    assert str(caught.value) == (
        "the rewards of 3 of 8 completions failed, above reward.max_error_share 0.25: correct the"
        " functions, or raise the limit. Problems:\n"
        "  2 x reward.functions.mine (m.f) returned None\n"
        "  1 x reward.functions.mine (m.f) exceeded reward.timeout_s 5"
    )
    check_error_share([], 8, RewardConfig(max_error_share=0.0))
    # 0.29 * 100 is less than 29.
    check_error_share(two[:1] * 29, 100, RewardConfig(max_error_share=0.29))


def test_a_refill_shares_the_limit_of_its_step() -> None:
    """One failure among the four completions of a refill is not a quarter of the step."""
    config = RewardConfig(on_error="drop", max_error_share=0.1)
    prompt = Prompt(token_ids=np.array([1]), text="p", answer=None)
    sampling = SamplingParams(max_new_tokens=4)
    first = RolloutJob([prompt] * 32, 4, sampling)
    problem = _problem("value", "returned None")
    first.add_problem(0, problem, config)
    refill = RolloutJob([prompt] * 4, 4, sampling, earlier=(first,))
    refill.add_problem(0, problem, config)
    refill.add_problem(1, problem, config)
    with pytest.raises(RewardError, match="the rewards of 4 of 36 completions failed"):
        refill.add_problem(2, problem, config)


def test_errors_are_counted_by_kind() -> None:
    problems = [_problem("value", "x"), None, _problem("timeout", "y"), _problem("value", "z")]
    mask = np.array([False, True, False, False])
    values = {name: metric.value for name, metric in problem_metrics(problems, mask).items()}
    assert values["reward/num_errors"] == 3 and values["reward/num_dropped"] == 3
    assert values["reward/num_errors_value"] == 2 and values["reward/num_errors_timeout"] == 1
    assert values["reward/num_errors_raised"] == values["reward/num_errors_ended"] == 0
    assert problem_metrics([], np.ones(4, dtype=bool))["reward/num_errors"].value == 0
