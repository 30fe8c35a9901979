"""How long a rank computes, without the time it waits for other ranks: what its imbalance is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")


class ComputeClock:
    """Seconds between `start` and `stop`, over any number of such intervals.

    On CPU they are CPU seconds of the process, which do not pass while it waits. On CUDA they are
    the seconds between two events on the current stream, so that they cover the kernels and not
    their launches; time in which the stream waits for a collective passes, so the engine stops
    the clock there.

    Not counted: gathering and reducing FSDP's weights and gradients, Megatron-Core's pipeline
    communication and gradient reduction, and the optimizer step. Counted on CUDA: the collectives
    inside a layer. Those of tensor and context parallelism join ranks with equal work. Those of
    expert parallelism join ranks of different rows, and their waiting time is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: Any = None
        self._intervals: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Begin an interval; does nothing inside one."""
        if self._started is None:
            self._started = self._now()

    def stop(self) -> None:
        """End the interval; does nothing outside of one."""
        if self._started is not None:
            self._intervals.append((self._started, self._now()))
            self._started = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """An interval around a block."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def excluded(self, function: Callable[ParamT, ResultT]) -> Callable[ParamT, ResultT]:
        """`function` with the clock stopped during each call, if it runs then."""

        @functools.wraps(function)
        def call(*args: ParamT.args, **kwargs: ParamT.kwargs) -> ResultT:
            was_running = self._started is not None
            self.stop()
            try:
                return function(*args, **kwargs)
            finally:
                if was_running:
                    self.start()

        return call

    def pop_seconds(self) -> float:
        """The sum of the intervals since the last call; waits for the device."""
        intervals, self._intervals = self._intervals, []
        if self._device.type != "cuda":
            return sum(stop - start for start, stop in intervals)
        torch.cuda.synchronize(self._device)
        return sum(start.elapsed_time(stop) for start, stop in intervals) / 1e3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
