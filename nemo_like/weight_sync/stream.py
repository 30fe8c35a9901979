"""Named tensors as byte buckets of bounded size: the form in which weights travel. `transport`
moves them.

A bucket pickles as one flat NumPy array and a few strings, never as tensors, so Ray shares its
bytes without a copy. Bytes are those of the tensor in memory, so every type, bfloat16 too, arrives
bit by bit as it left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: every tensor starts at a multiple of the largest element torch has (complex128)."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Tensors end to end in one buffer.

    Example: a bfloat16 [2, 3] "w" (12 bytes) and a float32 [] "b" are names ("w", "b"), shapes ((2,
    3), ()), dtypes ("bfloat16", "float32") and 20 bytes of data: 12, 4 of alignment, 4.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    data: np.ndarray
    """uint8 [bytes]"""

    @classmethod
    def encode(cls, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """Copy the tensors, from whatever device, into one buffer in host memory."""
        named = [(name, tensor.detach()) for name, tensor in tensors]
        shapes = tuple(tuple(tensor.shape) for _, tensor in named)
        dtypes = tuple(str(tensor.dtype).removeprefix("torch.") for _, tensor in named)
        starts, total = _layout([tensor.numel() * tensor.element_size() for _, tensor in named])
        data = torch.zeros(total, dtype=torch.uint8)
        for start, (_, tensor) in zip(starts, named, strict=True):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            data[start : start + raw.numel()].copy_(raw)
        return cls(tuple(name for name, _ in named), shapes, dtypes, data.numpy())

    def decode(self) -> Iterator[tuple[str, Tensor]]:
        """Each name with its tensor, in host memory. Writing to one changes neither bucket nor
        sender.
        """
        flat = torch.empty(len(self.data), dtype=torch.uint8)
        flat.numpy()[:] = (
            self.data
        )  # a copy: what comes out of Ray's store is read-only, which torch cannot express
        sizes = [
            _num_bytes(shape, dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        ]
        starts, total = _layout(sizes)
        if total != flat.numel():
            raise ValueError(
                f"a bucket of {len(self.names)} tensors has {flat.numel()} bytes; its shapes need"
                f" {total}"
            )
        for name, shape, dtype, start, size in zip(
            self.names, self.shapes, self.dtypes, starts, sizes, strict=True
        ):
            yield name, flat[start : start + size].view(getattr(torch, dtype)).reshape(shape)


def plan_buckets(num_bytes: Sequence[int], max_bytes: int) -> tuple[range, ...]:
    """Consecutive tensors, given by size in bytes, cut into buckets of at most `max_bytes`.

    A tensor above the limit has a bucket to itself. Example: sizes [3, 4, 9, 2] under 8 give ranges
    0-2, 2-3, 3-4. Raises ValueError for a limit below 1.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; a bucket holds at least one byte")
    buckets: list[range] = []
    start = total = 0
    for index, size in enumerate(num_bytes):
        size += -size % _ALIGNMENT
        if index > start and total + size > max_bytes:
            buckets.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(num_bytes):
        buckets.append(range(start, len(num_bytes)))
    return tuple(buckets)


def _layout(num_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Where each tensor starts, and the bytes of all of them."""
    starts: list[int] = []
    end = 0
    for size in num_bytes:
        starts.append(end + -end % _ALIGNMENT)
        end = starts[-1] + size
    return starts, end


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape, dtype=np.int64)) * getattr(torch, dtype).itemsize
