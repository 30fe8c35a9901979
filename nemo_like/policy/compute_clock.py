"""Clock of a rank's compute time, without the time in which it waits for other ranks."""

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
    """Sum of the seconds between `start` and `stop` over any number of intervals.

    On the CPU these are CPU seconds of the process, which do not advance while it waits. On CUDA
    they are the seconds between two events on the current stream, so they measure kernels and not
    their launches. The stream's wait for a collective counts, so the engine stops the clock there.

    Not counted: all-gathers and reduce-scatters of FSDP, Megatron-Core's pipeline communication and
    gradient reduction, and the optimizer step. Counted on CUDA: the collectives inside a layer.
    Tensor- and context-parallel ranks have equal work. Expert-parallel ranks have different rows,
    so their waiting time is included.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: Any = None
        self._intervals: list[tuple[Any, Any]] = []

    def start(self) -> None:
        """Begin an interval; does nothing if one has begun."""
        if self._started is None:
            self._started = self._now()

    def stop(self) -> None:
        """End the interval; does nothing if none has begun."""
        if self._started is not None:
            self._intervals.append((self._started, self._now()))
            self._started = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure a block as one interval."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def excluded(self, function: Callable[ParamT, ResultT]) -> Callable[ParamT, ResultT]:
        """Wrap `function` so that a running clock is stopped during each call."""

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

    def drop(self) -> None:
        """Forget all intervals so far; does not wait for the device."""
        self._intervals = []

    def pop_seconds(self) -> float:
        """Return the sum of the intervals since the last call; waits for the device."""
        intervals = self._intervals
        self._intervals = []
        if self._device.type != "cuda":
            return sum(stop - start for start, stop in intervals)
        # The end event of the last interval may not have happened yet.
        torch.cuda.synchronize(self._device)
        # Events measure milliseconds.
        return sum(start.elapsed_time(stop) for start, stop in intervals) / 1e3

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
