"""Named tensors as byte buckets of bounded size, the format of weight updates.

A bucket pickles as one flat NumPy array and a few strings, never as tensors, so Ray shares its
bytes without a copy. The bytes are those of the tensor in memory, so every dtype, bfloat16 too, is
transferred bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: every tensor starts at a multiple of torch's largest element size (complex128)."""


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Consecutive tensors in one buffer.

    Example: a bfloat16 [2, 3] "w" (12 bytes) and a float32 [] "b" give names ("w", "b"), shapes
    ((2, 3), ()), dtypes ("bfloat16", "float32") and 20 bytes of data: 12, 4 of alignment, 4.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    data: np.ndarray
    """uint8 [bytes]"""

    @classmethod
    def encode(cls, tensors: Iterable[tuple[str, Tensor]]) -> Bucket:
        """Copy the tensors, [*shape] each, from any device into one buffer in host memory."""
        names: list[str] = []
        values: list[Tensor] = []
        shapes: list[tuple[int, ...]] = []
        dtypes: list[str] = []
        sizes: list[int] = []
        for name, tensor in tensors:
            dtype = str(tensor.dtype)
            names.append(name)
            values.append(tensor.detach())
            shapes.append(tuple(tensor.shape))
            dtypes.append(dtype.removeprefix("torch."))
            sizes.append(tensor.nbytes)
        starts, total = _layout(sizes)
        # Zeros and not empty, so that the bytes of the alignment are defined.
        data = torch.zeros(total, dtype=torch.uint8)
        for tensor, start, size in zip(values, starts, sizes, strict=True):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            target = data[start : start + size]
            target.copy_(raw)
        return cls(
            tuple(names),
            tuple(shapes),
            tuple(dtypes),
            data.numpy(),
        )

    def decode(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its tensor [*shape], in host memory and independent of the bucket.

        Raises ValueError if the shapes and the number of bytes do not match.
        """
        # A copy: an array from Ray's object store is read-only, which torch cannot represent.
        flat = torch.empty(len(self.data), dtype=torch.uint8)
        flat.numpy()[:] = self.data
        sizes = []
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            sizes.append(_num_bytes(shape, dtype))
        starts, total = _layout(sizes)
        num_bytes = flat.numel()
        if total != num_bytes:
            raise ValueError(
                f"a bucket of {len(self.names)} tensors has {num_bytes} bytes; its shapes need"
                f" {total}"
            )
        for name, shape, dtype, start, size in zip(
            self.names,
            self.shapes,
            self.dtypes,
            starts,
            sizes,
            strict=True,
        ):
            raw = flat[start : start + size]
            values = raw.view(getattr(torch, dtype))
            yield name, values.reshape(shape)


def plan_buckets(num_bytes: Sequence[int], max_bytes: int) -> tuple[range, ...]:
    """Split consecutive tensors, given by size in bytes, into buckets of at most `max_bytes`.

    A tensor above the limit gets a bucket of its own. Each size is rounded up to the alignment of
    16. Example: sizes [3, 4, 9, 2] with a limit of 32 give ranges 0-2 and 2-4. Raises ValueError
    for a limit below 1.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; a bucket needs at least one byte")
    buckets: list[range] = []
    start = 0
    total = 0
    for index, weight_bytes in enumerate(num_bytes):
        # Rounded up, so that the alignment inside the bucket does not exceed the limit.
        size = _aligned(weight_bytes)
        if index > start and total + size > max_bytes:
            buckets.append(range(start, index))
            start = index
            total = 0
        total += size
    if start < len(num_bytes):
        buckets.append(range(start, len(num_bytes)))
    return tuple(buckets)


def _layout(num_bytes: Sequence[int]) -> tuple[list[int], int]:
    """Return the first byte of each tensor, and the number of bytes of all of them."""
    starts: list[int] = []
    end = 0
    for size in num_bytes:
        start = _aligned(end)
        starts.append(start)
        end = start + size
    return starts, end


def _aligned(num_bytes: int) -> int:
    """Round up to the alignment."""
    return num_bytes + -num_bytes % _ALIGNMENT


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * itemsize
