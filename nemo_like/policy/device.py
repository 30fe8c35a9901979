"""Measurements of a device: compute time of a rank, peak FLOP/s, peak memory."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


# Dense bf16 tensor-core FLOP/s of the vendors' datasheets, by a part of the device name.
_DATASHEET_BF16 = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "GB200": 2250e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "4090": 165e12,
}


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """Speed and memory of a worker's device."""

    peak_flops: float
    """Peak FLOP/s, the denominator of MFU."""
    peak_flops_source: str
    memory_bytes: int | None = None
    """Memory of a GPU; None on the CPU."""


def peak_flops(device: torch.device, seconds: float = 0.05) -> tuple[float, str]:
    """Return the peak FLOP/s of `device` and the source of the number.

    On a known GPU it is the datasheet's dense bf16 rate. Elsewhere it is the fastest float32 matrix
    product measured within `seconds`, with this process's threads, so that MFU is meaningful on a
    CPU too.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        # Longest first: "H100 PCIe" also contains "H100", and "GH200" contains "H200".
        for model in sorted(_DATASHEET_BF16, key=len, reverse=True):
            if model in name:
                return _DATASHEET_BF16[model], f"{model} datasheet, dense bf16"
    size = 512 if device.type == "cpu" else 4096
    left = torch.randn(size, size, device=device)
    right = torch.randn(size, size, device=device)
    best = float("inf")
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or best == float("inf"):
        begin = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            # Without this only the launch would be timed.
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    # A product of two n x n matrices takes n^3 multiplications and as many additions.
    return 2 * size**3 / best, f"measured, float32 matrix product of {size}"


def total_memory_bytes(device: torch.device) -> int | None:
    """Return the memory of a GPU; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def reset_peak_memory(device: torch.device) -> None:
    """Reset the maximum of `peak_memory_bytes`; does nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int | None:
    """Return the peak bytes of tensors on `device` since `reset_peak_memory`; None on the CPU."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device)
