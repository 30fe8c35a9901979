"""Calls of user code: reward functions, sync or async. What they do wrong becomes a `BadReward`."""

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
"""Samples that an async function works on at the same time."""
_MAX_VALUE_SHOWN = 200


class BadReward(Exception):
    """A reward function failed on `sample`; `str()` is what it did, e.g. "returned None, ..."."""

    def __init__(self, problem: str, sample: RewardSample) -> None:
        super().__init__(problem)
        self.sample = sample


def score_samples(
    function: RewardFunction, samples: Sequence[RewardSample], label: str
) -> list[float]:
    """The reward of each sample; `label` names the function in the worker's activity.

    An async function works on several samples concurrently. Raises BadReward for what it raises,
    for sys.exit and os._exit, and for anything but one finite number per sample.
    """
    if iscoroutinefunction(function):
        return asyncio.run(_score_concurrently(function, samples, label))
    rewards = []
    for index, sample in enumerate(samples):
        activity.note(f"{label}, sample {index + 1} of {len(samples)}")
        with _reported(sample), _exit_refused():
            value = function(sample)
            if isawaitable(value):  # a plain function that returns a coroutine
                value = asyncio.run(_result_of(value))
        rewards.append(_number(value, sample))
    return rewards


async def _score_concurrently(
    function: Callable[[RewardSample], Any], samples: Sequence[RewardSample], label: str
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
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _result_of(value: Awaitable[Any]) -> Any:
    return await value


@contextmanager
def _reported(sample: RewardSample) -> Iterator[None]:
    """Turn what user code raises into a BadReward; Ctrl-C and the end of the run pass."""
    try:
        yield
    except SystemExit as error:
        problem = f"called sys.exit({error.code!r}), which would end the run,"
        raise BadReward(problem, sample) from error
    except _OsExit as error:
        problem = f"called os._exit({error}), which would end the run,"
        raise BadReward(problem, sample) from error
    except asyncio.CancelledError:
        raise
    except Exception as error:
        raise BadReward(f"raised {type(error).__name__}: {error}", sample) from error


class _OsExit(BaseException):
    """User code called os._exit."""


@contextmanager
def _exit_refused() -> Iterator[None]:
    """Inside, os._exit raises in this thread; it works in other threads and in forked processes."""
    exit_process, pid, thread = os._exit, os.getpid(), threading.get_ident()

    def refuse(status: int) -> NoReturn:
        if os.getpid() == pid and threading.get_ident() == thread:
            raise _OsExit(status)
        exit_process(status)

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = exit_process


def _number(value: Any, sample: RewardSample) -> float:
    """`value` as a float. A NumPy or torch scalar counts as a number, a text does not."""
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
