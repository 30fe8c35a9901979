"""A device: compute time of a rank, peak FLOP/s, peak memory, and offload to host memory.

Also settings of the C library's allocator of host memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")

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
_SMALLEST_PIECE = 2**20
"""Bytes below which a buffer is not divided further."""

# Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8
_NEVER_TRIM = -1


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


class _Offloaded(NamedTuple):
    """A storage without memory on its device, and its content."""

    storage: torch.UntypedStorage
    buffers: list[Tensor]
    """uint8 [n] each, in host memory; together the bytes of the storage."""

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self.buffers)


class HostMemory:
    """Host buffers for the storages of tensors, kept for the next offload.

    Only the memory of a storage is freed and allocated again: tensors, their views and the
    structures of FSDP or Megatron-Core that refer to it stay as they are. They must not be read
    while they are offloaded. With `pinned` the buffers are page-locked, so that copies from and to
    a GPU run at the speed of its link. With `constant` the tensors are always the same and change
    only before `discard_copies`, so that only the first offload copies them.
    """

    def __init__(self, *, pinned: bool, constant: bool = False) -> None:
        self._pinned = pinned
        self._constant = constant
        self.copied: list[_Offloaded] = []
        """Storages with an equal copy in host memory; only with `constant`."""
        self._free: dict[int, list[Tensor]] = {}
        """Unused buffers by their number of bytes."""
        self.offloaded: list[_Offloaded] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the storages of `tensors`, [...] each, to host memory and free them.

        Tensors that share a storage are copied once. Raises RuntimeError if some are offloaded.
        """
        if self.offloaded:
            raise RuntimeError("the tensors are offloaded already; call onload first")
        if self.copied:
            self.offloaded = self.copied
            for storage, _ in self.copied:
                storage.resize_(0)
            return
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() > 0:
                storages.setdefault(storage.data_ptr(), storage)
        for storage in storages.values():
            buffers = [self._take(size) for size in piece_sizes(storage.nbytes())]
            for part, buffer in _parts(storage, buffers):
                buffer.copy_(part, non_blocking=True)
            self.offloaded.append(_Offloaded(storage, buffers))
        self._wait()
        for storage in storages.values():
            storage.resize_(0)

    def onload(self) -> None:
        """Allocate the offloaded storages and copy their content back; the buffers are kept.

        Does nothing if nothing is offloaded.
        """
        # In the reverse order of `offload`, so that the next one takes the same buffers.
        for offloaded in reversed(self.offloaded):
            offloaded.storage.resize_(offloaded.num_bytes)
            for part, buffer in _parts(offloaded.storage, offloaded.buffers):
                part.copy_(buffer, non_blocking=True)
            if not self._constant:
                for buffer in reversed(offloaded.buffers):
                    self._free.setdefault(buffer.numel(), []).append(buffer)
        if self._constant:
            self.copied = self.offloaded
        self.offloaded = []
        # Before a later offload writes to the same buffers.
        self._wait()

    def discard_copies(self) -> None:
        """With `constant`: let the next offload copy the tensors again, because they changed.

        Raises RuntimeError if they are offloaded.
        """
        if self.offloaded:
            raise RuntimeError("the tensors are offloaded; call onload first")
        for offloaded in self.copied:
            for buffer in offloaded.buffers:
                self._free.setdefault(buffer.numel(), []).append(buffer)
        self.copied = []

    @property
    def is_offloaded(self) -> bool:
        """True between `offload` and `onload`."""
        return bool(self.offloaded)

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        num_free = sum(size * len(buffers) for size, buffers in self._free.items())
        return num_free + sum(each.num_bytes for each in self.offloaded or self.copied)

    def _take(self, num_bytes: int) -> Tensor:
        """Return a buffer, uint8 [num_bytes]."""
        free = self._free.get(num_bytes)
        if free:
            return free.pop()
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pinned)

    def _wait(self) -> None:
        if self._pinned:
            torch.cuda.current_stream().synchronize()


def piece_sizes(num_bytes: int) -> list[int]:
    """Return the sizes of the buffers of a storage, the largest first.

    All but the last are powers of two: torch rounds page-locked memory up to one, so that a single
    buffer could take twice the memory. Example: 259.5 MiB are 256, 2, 1 and 0.5 MiB.
    """
    sizes = []
    while num_bytes > _SMALLEST_PIECE:
        size = 1 << (num_bytes.bit_length() - 1)
        sizes.append(size)
        num_bytes -= size
    if num_bytes > 0:
        sizes.append(num_bytes)
    return sizes


def _parts(
    storage: torch.UntypedStorage, buffers: Iterable[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (view of the storage on its device, buffer), uint8 [n] each, for each buffer."""
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    start = 0
    for buffer in buffers:
        yield content[start : start + buffer.numel()], buffer
        start += buffer.numel()


def keep_freed_memory() -> bool:
    """Have the allocator of this process keep freed memory for later allocations.

    By default glibc returns large blocks to the system as they are freed. Every microbatch then
    requests its activations anew, and the kernel clears each page: 2 to 7 of 13 seconds of a step
    of SmolLM2-135M with 2,048 tokens on two cores of a virtual machine. Afterwards the process
    keeps the memory of its largest step.

    Returns False, and changes nothing, on systems without glibc and where environment variables
    (`MALLOC_*`, `GLIBC_TUNABLES`) configure the allocator.
    """
    is_configured = "GLIBC_TUNABLES" in os.environ or any(
        name.startswith("MALLOC_") for name in os.environ
    )
    if is_configured or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = (
        # Large blocks come from the heap, which keeps them, and not from mappings of their own.
        (_M_MMAP_MAX, 0),
        (_M_TRIM_THRESHOLD, _NEVER_TRIM),
        # One heap: the heap of another thread cannot have blocks above 64 MiB.
        (_M_ARENA_MAX, 1),
    )
    accepted = [library.mallopt(name, value) == 1 for name, value in settings]
    return all(accepted)
