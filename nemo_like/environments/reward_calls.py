"""Calls reward functions, code of the user that may be async; failures become `BadReward`."""

from __future__ import annotations

import asyncio
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import isawaitable, iscoroutinefunction
from typing import Any, Literal, NoReturn, cast

from nemo_like.config.import_path import user_error_text
from nemo_like.config.text import shown_value
from nemo_like.distributed import activity
from nemo_like.environments.reward import BadRewardKind, RewardFunction, RewardSample

_MAX_CONCURRENT = 32
"""Maximum number of concurrent calls of an async function."""
_MAX_NUMBER = 3.4028234e38
"""Rewards are stored in float32, where larger ones are infinite."""


@dataclass(frozen=True, slots=True)
class BadReward:
    """Why a reward function has no reward for a sample."""

    kind: BadRewardKind
    text: str
    """Example: `returned None, which is not a finite number`."""


Score = float | BadReward


def score_each(
    function: RewardFunction,
    samples: Sequence[RewardSample],
    label: str,
    *,
    stops: bool = False,
    timeout_s: float | None = None,
    max_concurrent: int | None = None,
    report: Callable[[int, Score], None] | None = None,
) -> dict[int, Score]:
    """Return the score of each sample by its index; `label` names the function in the activity.

    Failures are exceptions of the function, calls of sys.exit and os._exit, and a value that is not
    one finite number; True and False are 1 and 0. An async function is called for several samples
    concurrently, and a call is cancelled after `timeout_s`; other functions cannot be interrupted
    here. A batched function is called once with all samples. With `stops` no sample is scored after
    the first failure. `report` is called for each sample when its score is known.
    """
    scores: dict[int, Score] = {}

    def add(index: int, score: Score) -> bool:
        """Add a score, and return whether to go on."""
        scores[index] = score
        # A slow reward function is progress, sample by sample, and not a hung worker.
        activity.note(f"{label}, {len(scores)} of {len(samples)} samples done")
        if report is not None:
            report(index, score)
        return not (stops and isinstance(score, BadReward))

    kind = function_kind(function)
    activity.note(f"{label}, 0 of {len(samples)} samples done")
    with _exit_refused():
        if kind == "async":
            slots = asyncio.Semaphore(max_concurrent or _MAX_CONCURRENT)
            asyncio.run(_score_concurrently(function, samples, timeout_s, slots, add))
        elif kind == "sync":
            for index, sample in enumerate(samples):
                if not add(index, _guarded(_reward, function, sample, timeout_s)):
                    break
        elif samples:
            values = _guarded(_batch_rewards, function, samples, timeout_s)
            if isinstance(values, BadReward):
                values = [values] * len(samples)
            for index, score in enumerate(values):
                add(index, score)
    return scores


def function_kind(function: RewardFunction) -> Literal["sync", "async", "batched"]:
    """Return how a function is called: per sample, concurrently, or once with many samples."""
    declared = getattr(function, "batched", None)
    if declared is None:
        # A function with options is a partial of the user's.
        declared = getattr(getattr(function, "func", None), "batched", False)
    if declared:
        return "batched"
    return "async" if iscoroutinefunction(function) else "sync"


def finite_number(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch as float, None for anything else.

    None as well for numbers that are not finite in float32. A text is not a number.
    """
    # The libraries are not imported for the check; scalars of both have `ndim` and `item`.
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, numbers.Real):
        # An int may be too large.
        with suppress(OverflowError):
            number = float(cast(float, value))
            if abs(number) <= _MAX_NUMBER:
                return number
    return None


def timed_out(timeout_s: float | None) -> BadReward:
    """Return the failure of a call that exceeded the timeout."""
    return BadReward("timeout", f"exceeded reward.timeout_s {timeout_s:g}")


async def _score_concurrently(
    function: Callable[[RewardSample], Any],
    samples: Sequence[RewardSample],
    timeout_s: float | None,
    slots: asyncio.Semaphore,
    add: Callable[[int, Score], bool],
) -> None:
    async def score(index: int, sample: RewardSample) -> None:
        async with slots:
            try:
                result = _checked(await _awaited(function(sample), timeout_s))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and task and task.cancelling():
                    # Another sample failed.
                    raise
                result = _failure(error)
        if not add(index, result):
            raise _Stopped

    with suppress(_Stopped):
        # After the first failure the others must not run on.
        tasks = [asyncio.ensure_future(score(index, each)) for index, each in enumerate(samples)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _reward(function: RewardFunction, sample: RewardSample, timeout_s: float | None) -> Score:
    return _checked(_called(function, sample, timeout_s))


def _batch_rewards(
    function: RewardFunction, samples: Sequence[RewardSample], timeout_s: float | None
) -> list[Score] | BadReward:
    """Call a batched function; return the score of each sample, or the failure of all."""
    values = _called(function, list(samples), timeout_s)
    if getattr(values, "ndim", None) == 0:
        values = [values]
    elif hasattr(values, "tolist"):
        # A NumPy array or a torch tensor.
        values = values.tolist()
    if isinstance(values, Mapping | Set):
        text = f"returned a {type(values).__name__}, which is not a list of numbers"
        return BadReward("value", text)
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__"):
        values = [values]
    values = list(values)
    if len(values) != len(samples):
        text = f"returned {len(values)} values for a batch of {len(samples)} samples"
        return BadReward("value", text)
    return [_guarded(_checked, value) for value in values]


def _called(function: RewardFunction, argument: Any, timeout_s: float | None) -> Any:
    value = function(argument)
    # Also a plain function may return a coroutine.
    return asyncio.run(_awaited(value, timeout_s)) if isawaitable(value) else value


async def _awaited(value: Awaitable[Any], timeout_s: float | None) -> Any:
    """Await a result. Raises _TimedOut after `timeout_s`, but not for its own TimeoutError."""
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await value
    except TimeoutError as error:
        if limit.expired():
            raise _TimedOut(timeout_s) from error
        raise


def _guarded(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns, or a BadReward for its exception, but not for Ctrl-C."""
    try:
        return call(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (code of the user raises anything)
        return _failure(error)


def _failure(error: BaseException) -> BadReward:
    """Return the failure of a call that raised `error`."""
    if isinstance(error, _TimedOut):
        return timed_out(error.args[0])
    if isinstance(error, SystemExit):
        call = "os._exit" if isinstance(error, _OsExit) else "sys.exit"
        return BadReward("ended", f"called {call}({error.code!r}), which would end the run")
    return BadReward("raised", f"raised {user_error_text(error)}")


def _checked(value: Any) -> Score:
    """Return a reward as float, or the failure of a value that is not one finite number."""
    number = finite_number(value)
    if number is not None:
        return number
    count = f" ({len(value)} values)" if isinstance(value, list | tuple) else ""
    text = f"returned {shown_value(value, 200)}{count}, which is not a finite number"
    return BadReward("value", text)


class _Stopped(Exception):
    """A sample failed, and no further one is scored."""


class _TimedOut(Exception):
    """An async call exceeded the timeout, its argument."""


class _OsExit(SystemExit):
    """Code of the user called os._exit."""


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
