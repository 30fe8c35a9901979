"""Copies between host and device for which the host does not wait.

A blocking copy to a CUDA device waits for all work that was queued before it. The device then has
nothing to do until the host has queued more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 256
"""Bytes; kernels read vectors of 16 bytes, and torch's own allocations are aligned like this."""


def to_device(arrays: Mapping[str, np.ndarray], device: str | torch.device) -> dict[str, Tensor]:
    """Copy `arrays` of any shapes and dtypes to `device`, in one transfer; shapes are kept.

    On a CUDA device the results are views of one buffer, copied from pinned memory. The copy is
    ordered on the current stream, and the arrays may be changed at once. On the CPU the results
    share the memory of the arrays.
    """
    device = torch.device(device)
    if device.type != "cuda" or not arrays:
        return {
            name: torch.from_numpy(np.ascontiguousarray(array)).to(device)
            for name, array in arrays.items()
        }
    slots, num_bytes = slots_of(arrays)
    staging = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pack(arrays, slots, staging)
    # torch keeps the pinned memory until the copy is done, also when `staging` is released.
    return unpack(staging.to(device, non_blocking=True), slots)


def tensor_to_device(tensor: Tensor, device: str | torch.device) -> Tensor:
    """Copy a tensor to `device`, with the same shape; without waiting if it is in host memory."""
    device = torch.device(device)
    if device.type != "cuda":
        # A copy to host memory that is not waited for could be read before it has its values.
        return tensor.to(device)
    if tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def start_copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor of a device to host memory, with the same shape, without waiting for it.

    The result must not be read before `wait_for_copies`. It may be copied back to the same device
    before that, since both copies are ordered on the current stream. A tensor in host memory is
    returned itself.
    """
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def wait_for_copies(device: str | torch.device) -> None:
    """Wait until the copies of `start_copy_to_host` from `device` are complete."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def fetch_scalars(scalars: Sequence[Tensor]) -> list[float]:
    """Return the values of tensors of one element, [] each and of one device, in one transfer."""
    if not scalars:
        return []
    # float64 holds every float32 and every integer below 2^53.
    stacked = torch.stack([scalar.detach().double() for scalar in scalars])
    return stacked.tolist()


@dataclass(frozen=True, slots=True)
class _Slot:
    """Place of one array in a buffer of bytes."""

    start: int
    num_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def slots_of(arrays: Mapping[str, np.ndarray]) -> tuple[dict[str, _Slot], int]:
    """Return the place of each array and the size of the buffer in bytes."""
    slots = {}
    end = 0
    for name, array in arrays.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + array.nbytes
        # An empty tensor gives the torch dtype of a NumPy dtype.
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        slots[name] = _Slot(start, array.nbytes, dtype, array.shape)
    return slots, end


def pack(arrays: Mapping[str, np.ndarray], slots: Mapping[str, _Slot], buffer: Tensor) -> None:
    """Copy `arrays` into `buffer`, uint8 [num_bytes] in host memory."""
    target = buffer.numpy()
    for name, array in arrays.items():
        slot = slots[name]
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        target[slot.start : slot.start + slot.num_bytes] = flat


def unpack(buffer: Tensor, slots: Mapping[str, _Slot]) -> dict[str, Tensor]:
    """Return views of `buffer`, uint8 [num_bytes], with the dtypes and shapes of the slots."""
    tensors = {}
    for name, slot in slots.items():
        part = buffer[slot.start : slot.start + slot.num_bytes]
        tensors[name] = part.view(slot.dtype).view(slot.shape)
    return tensors
