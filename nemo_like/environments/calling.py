"""Calls reward functions, which are user code, sync or async; their errors become `BadReward`."""

from __future__ import annotations

import asyncio
import math
import numbers
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isawaitable, iscoroutinefunction
from typing import Any, NoReturn, cast

from nemo_like.distributed import activity
from nemo_like.environments.reward import RewardFunction, RewardSample

_MAX_CONCURRENT = 32
"""Maximum number of concurrent calls of an async function."""
_MAX_VALUE_SHOWN = 200


class BadReward(Exception):
    """A reward function failed on `sample`; `str()` is the problem, e.g. "returned None, ..."."""

    def __init__(self, problem: str, sample: RewardSample) -> None:
        super().__init__(problem)
        self.sample = sample


def score_samples(
    function: RewardFunction,
    samples: Sequence[RewardSample],
    label: str,
) -> list[float]:
    """Return the reward of each sample; `label` names the function in the worker's activity.

    An async function is called for several samples concurrently. Raises BadReward for its
    exceptions, for sys.exit and os._exit, and for a value that is not one finite number.
    """
    if iscoroutinefunction(function):
        return asyncio.run(_score_concurrently(function, samples, label))
    rewards = []
    for index, sample in enumerate(samples):
        # A slow reward function is progress, sample by sample, and not a hung worker.
        activity.note(f"{label}, sample {index + 1} of {len(samples)}")
        with _reported(sample), _exit_refused():
            value = function(sample)
            if isawaitable(value):  # a plain function that returns a coroutine
                value = asyncio.run(_result_of(value))
        rewards.append(_number(value, sample))
    return rewards


async def _score_concurrently(
    function: Callable[[RewardSample], Any],
    samples: Sequence[RewardSample],
    label: str,
) -> list[float]:
    slots = asyncio.Semaphore(_MAX_CONCURRENT)
    done = 0

    async def score(sample: RewardSample) -> float:
        nonlocal done
        async with slots:
            with _reported(sample):
                value = await function(sample)
        done += 1
        activity.note(f"{label}, {done} of {len(samples)} samples done")
        return _number(value, sample)

    activity.note(f"{label}, 0 of {len(samples)} samples done")
    with _exit_refused():
        tasks = [asyncio.ensure_future(score(sample)) for sample in samples]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            # After the first failure the others must not run on outside of this block.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _result_of(value: Awaitable[Any]) -> Any:
    return await value


@contextmanager
def _reported(sample: RewardSample) -> Iterator[None]:
    """Convert exceptions of user code to BadReward, but not Ctrl-C and the end of the run."""
    try:
        yield
    except SystemExit as error:
        problem = f"called sys.exit({error.code!r}), which would end the run,"
        raise BadReward(problem, sample) from error
    except _OsExit as error:
        problem = f"called os._exit({error}), which would end the run,"
        raise BadReward(problem, sample) from error
    except asyncio.CancelledError:
        # Another sample failed, and its BadReward is the one to report.
        raise
    except Exception as error:
        raise BadReward(f"raised {type(error).__name__}: {error}", sample) from error


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
    # The libraries are not imported for the check; both have `ndim` and `item`.
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if not isinstance(value, numbers.Real):
        shown = repr(value)
        if len(shown) > _MAX_VALUE_SHOWN:
            shown = f"{shown[:_MAX_VALUE_SHOWN]}..."
        count = f" ({len(value)} values)" if isinstance(value, list | tuple) else ""
        raise BadReward(f"returned {shown}{count}, which is not a finite number,", sample)
    number = float(cast(float, value))
    if not math.isfinite(number):
        raise BadReward(f"returned {value!r}, which is not a finite number,", sample)
    return number
