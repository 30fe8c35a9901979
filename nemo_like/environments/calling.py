"""Calls reward functions, which are user code, sync or async; their errors become `BadReward`."""

from __future__ import annotations

import asyncio
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Literal, NoReturn, cast

from nemo_like.config.import_path import user_error_text
from nemo_like.distributed import activity
from nemo_like.environments.reward import RewardFunction, RewardSample

_MAX_CONCURRENT = 32
"""Maximum number of concurrent calls of an async function."""
_MAX_VALUE_SHOWN = 200
_MAX_REWARD = 3.4028234e38
"""Rewards are stored in float32, where larger ones are infinite."""

BadRewardKind = Literal["raised", "timeout", "value", "ended"]
"""`raised` an exception; exceeded the `timeout`; the `value` is not one finite number; called
sys.exit or os._exit, or its process `ended`."""

Report = Callable[[int, "float | BadReward"], None]
"""Callback with the index of a sample and its score."""


class BadReward(Exception):
    """A reward function failed on `sample`; `str()` is the problem, e.g. "returned None, ..."."""

    def __init__(self, problem: str, sample: RewardSample, kind: BadRewardKind = "raised") -> None:
        super().__init__(problem)
        self.sample = sample
        self.kind: BadRewardKind = kind


Score = float | BadReward
"""The reward of a sample, or why there is none."""


def score_samples(
    function: RewardFunction, samples: Sequence[RewardSample], label: str
) -> list[float]:
    """Return the reward of each sample; `label` names the function in the worker's activity.

    Raises BadReward for the first problem; see `score_each`.
    """
    rewards = []
    for score in score_each(function, samples, label, stops=True):
        if isinstance(score, BadReward):
            raise score
        rewards.append(score)
    return rewards


def score_each(
    function: RewardFunction,
    samples: Sequence[RewardSample],
    label: str,
    *,
    stops: bool = False,
    timeout_s: float | None = None,
    max_concurrent: int | None = None,
    report: Report | None = None,
) -> list[Score]:
    """Return the reward of each sample, or the BadReward of a sample on which the function failed.

    Failures are its exceptions, calls of sys.exit and os._exit, and a value that is not one finite
    number; True and False are 1 and 0. An async function is called for several samples
    concurrently, and a call is cancelled after `timeout_s`; other functions cannot be interrupted
    here. A function with the attribute `batched` is called once with all samples. `stops` raises
    the first BadReward. `report` is called for each sample when its score is known.
    """
    if is_batched(function):
        scores = _score_batch(function, samples, label, timeout_s)
        for index, score in enumerate(scores):
            _finish(index, score, stops=stops, report=report)
        return scores
    if iscoroutinefunction(function):
        return asyncio.run(
            _score_concurrently(
                function,
                samples,
                label,
                stops=stops,
                timeout_s=timeout_s,
                max_concurrent=max_concurrent or _MAX_CONCURRENT,
                report=report,
            )
        )
    scores = []
    for index, sample in enumerate(samples):
        # A slow reward function is progress, sample by sample, and not a hung worker.
        activity.note(f"{label}, sample {index + 1} of {len(samples)}")
        score = _score_one(function, sample, timeout_s)
        _finish(index, score, stops=stops, report=report)
        scores.append(score)
    return scores


def is_batched(function: RewardFunction) -> bool:
    """Return True if the function takes a list of samples, which its attribute declares."""
    declared = getattr(function, "batched", None)
    if declared is None:
        # A function with options is a partial of the user's.
        declared = getattr(getattr(function, "func", None), "batched", False)
    return bool(declared)


def _finish(index: int, score: Score, *, stops: bool, report: Report | None) -> None:
    if report is not None:
        report(index, score)
    if stops and isinstance(score, BadReward):
        raise score


def _score_one(function: RewardFunction, sample: RewardSample, timeout_s: float | None) -> Score:
    try:
        with _reported(sample), _exit_refused():
            value = function(sample)
            if isawaitable(value):  # a plain function that returns a coroutine
                value = asyncio.run(_result_of(value, sample, timeout_s))
        return _number(value, sample)
    except BadReward as problem:
        return problem


def _score_batch(
    function: Callable[[Any], Any],
    samples: Sequence[RewardSample],
    label: str,
    timeout_s: float | None,
) -> list[Score]:
    """Call a batched function once; an exception is the problem of every sample."""
    if not samples:
        return []
    activity.note(f"{label}, a batch of {len(samples)} samples")
    try:
        with _reported(samples[0]), _exit_refused():
            values = function(list(samples))
            if isawaitable(values):
                values = asyncio.run(_result_of(values, samples[0], timeout_s))
            values = _as_list(values, samples[0])
        if len(values) != len(samples):
            problem = f"returned {len(values)} values for a batch of {len(samples)} samples,"
            raise BadReward(problem, samples[0], "value")
    except BadReward as problem:
        return [BadReward(str(problem), sample, problem.kind) for sample in samples]
    scores: list[Score] = []
    for value, sample in zip(values, samples, strict=True):
        try:
            scores.append(_number(value, sample))
        except BadReward as problem:
            scores.append(problem)
    return scores


def _as_list(values: Any, sample: RewardSample) -> list[Any]:
    """Return the values of a batch; a NumPy array or a torch tensor has [B] of them.

    Raises BadReward on `sample` for a mapping, whose items would be its keys, and a set.
    """
    if getattr(values, "ndim", None) == 0:
        return [values]
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, Mapping | Set):
        problem = f"returned a {type(values).__name__}, which is not a list of numbers,"
        raise BadReward(problem, sample, "value")
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        return [values]
    return list(values)


async def _score_concurrently(
    function: Callable[[RewardSample], Any],
    samples: Sequence[RewardSample],
    label: str,
    *,
    stops: bool,
    timeout_s: float | None,
    max_concurrent: int,
    report: Report | None,
) -> list[Score]:
    slots = asyncio.Semaphore(max_concurrent)
    done = 0

    async def score(index: int, sample: RewardSample) -> Score:
        nonlocal done
        async with slots:
            try:
                with _reported(sample):
                    value = await _result_of(function(sample), sample, timeout_s)
                result: Score = _number(value, sample)
            except BadReward as problem:
                result = problem
        done += 1
        activity.note(f"{label}, {done} of {len(samples)} samples done")
        _finish(index, result, stops=stops, report=report)
        return result

    activity.note(f"{label}, 0 of {len(samples)} samples done")
    with _exit_refused():
        tasks = [asyncio.ensure_future(score(index, each)) for index, each in enumerate(samples)]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # After the first failure the others must not run on outside of this block.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _result_of(value: Awaitable[Any], sample: RewardSample, timeout_s: float | None) -> Any:
    """Await a result. Raises BadReward after `timeout_s`, but not for a TimeoutError of its own."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await value
    except TimeoutError as error:
        if limit.expired():
            raise timed_out(timeout_s, sample) from error
        raise


def timed_out(timeout_s: float | None, sample: RewardSample) -> BadReward:
    """Return the failure of a call that exceeded the timeout."""
    return BadReward(f"exceeded reward.timeout_s {timeout_s:g}", sample, "timeout")


@contextmanager
def _reported(sample: RewardSample) -> Iterator[None]:
    """Convert exceptions of user code to BadReward, but not Ctrl-C."""
    try:
        yield
    except SystemExit as error:
        problem = f"called sys.exit({error.code!r}), which would end the run,"
        raise BadReward(problem, sample, "ended") from error
    except _OsExit as error:
        problem = f"called os._exit({error}), which would end the run,"
        raise BadReward(problem, sample, "ended") from error
    except (BadReward, KeyboardInterrupt):
        raise
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            # Another sample failed, and its BadReward is the one to report.
            raise
        raise BadReward(f"raised {user_error_text(error)}", sample) from error


def _is_cancelled() -> bool:
    """Return True if the task that calls this was cancelled, and not one that it waited for."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        # No event loop runs here.
        return False
    return task is not None and task.cancelling() > 0


class _OsExit(BaseException):
    """User code called os._exit."""


@contextmanager
def _exit_refused() -> Iterator[None]:
    """Have os._exit raise inside the block, in this thread of this process only."""
    exit_process = os._exit
    pid = os.getpid()
    thread = threading.get_ident()

    def refuse(status: int) -> NoReturn:
        # Other threads and forked processes end themselves by os._exit on purpose.
        if os.getpid() == pid and threading.get_ident() == thread:
            raise _OsExit(status)
        exit_process(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_process


def _number(value: Any, sample: RewardSample) -> float:
    """Convert a reward to float. NumPy and torch scalars are numbers, a text is not."""
    with _reported(sample):
        # The libraries are not imported for the check; both have `ndim` and `item`.
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        number = math.nan
        if isinstance(value, numbers.Real):
            # An int may be too large.
            with suppress(OverflowError):
                number = float(cast(float, value))
        if abs(number) <= _MAX_REWARD:
            return number
        shown = _shown(value)
        count = f" ({len(value)} values)" if isinstance(value, list | tuple) else ""
    raise BadReward(f"returned {shown}{count}, which is not a finite number,", sample, "value")


def _shown(value: Any) -> str:
    try:
        shown = repr(value)
    except ValueError:
        # An int of too many digits.
        return f"a {type(value).__name__} without a text"
    return shown if len(shown) <= _MAX_VALUE_SHOWN else f"{shown[:_MAX_VALUE_SHOWN]}..."
