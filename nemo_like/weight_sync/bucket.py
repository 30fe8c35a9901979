"""Layouts of weight buckets: named tensors of one dtype in a buffer of bytes.

Sender and receiver compute nothing themselves: the layouts are planned once per weight update and
sent to the receivers, and both sides make the same views of a buffer. The bytes are those of the
tensors in memory, so every dtype, bfloat16 too, is transferred bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes: every tensor starts at a multiple of it, a cache line and more than any element size."""

MAX_BUCKET_BYTES = 256 * 2**20
"""Default limit of a bucket. At most two buckets exist at a time on each side."""

_MIN_BUCKETS = 8
_MIN_BUCKET_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Names, shapes and positions of the tensors of one bucket.

    Example: bfloat16 [2, 3] "w" and [] "b" start at bytes 0 and 64, and the bucket has 66 bytes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    starts: tuple[int, ...]
    """The first byte of each tensor."""
    num_bytes: int
    """Bytes of the bucket, alignment included."""
    dtype: str
    """dtype of all tensors, as in `torch.bfloat16` without the module."""

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> BucketLayout:
        """Return the layout of tensors with these names and shapes, in this order."""
        starts: list[int] = []
        end = 0
        for shape in shapes.values():
            start = aligned(end)
            starts.append(start)
            end = start + num_bytes_of(shape, dtype)
        return cls(tuple(shapes), tuple(shapes.values()), tuple(starts), end, dtype_name(dtype))

    def views(self, buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with the view [*shape] of its bytes in `buffer`, uint8 [n].

        The buffer may be larger than the bucket. Raises ValueError if it is smaller.
        """
        if buffer.numel() < self.num_bytes:
            raise ValueError(
                f"a bucket of {len(self.names)} tensors needs {self.num_bytes} bytes; the buffer"
                f" has {buffer.numel()}"
            )
        dtype: torch.dtype = getattr(torch, self.dtype)
        for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True):
            raw = buffer[start : start + num_bytes_of(shape, dtype)]
            yield name, raw.view(dtype).view(shape)


def plan_layouts(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, max_bytes: int
) -> tuple[BucketLayout, ...]:
    """Return the layouts of the buckets that transfer tensors of these names and shapes.

    The limit of a bucket is lowered from `max_bytes` to an eighth of all bytes, but not below
    8 MiB: nothing overlaps with the gather of the first bucket and with the load of the last.
    """
    names = list(shapes)
    sizes = [num_bytes_of(shape, dtype) for shape in shapes.values()]
    total = sum(map(aligned, sizes))
    overlapping = max(_MIN_BUCKET_BYTES, -(-total // _MIN_BUCKETS))
    layouts = []
    for bucket in plan_buckets(sizes, min(max_bytes, overlapping)):
        members = {name: shapes[name] for name in names[bucket.start : bucket.stop]}
        layouts.append(BucketLayout.of(members, dtype))
    return tuple(layouts)


def plan_buckets(num_bytes: Sequence[int], max_bytes: int) -> tuple[range, ...]:
    """Split consecutive tensors, given by size in bytes, into buckets of at most `max_bytes`.

    A tensor above the limit gets a bucket of its own. Each size is rounded up to the alignment of
    64. Example: sizes [3, 4, 9, 2] with a limit of 128 give ranges 0-2 and 2-4. Raises ValueError
    for a limit below 1.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes is {max_bytes}; a bucket needs at least one byte")
    buckets: list[range] = []
    start = 0
    total = 0
    for index, weight_bytes in enumerate(num_bytes):
        # Rounded up, so that the alignment inside the bucket does not exceed the limit.
        size = aligned(weight_bytes)
        if index > start and total + size > max_bytes:
            buckets.append(range(start, index))
            start = index
            total = 0
        total += size
    if start < len(num_bytes):
        buckets.append(range(start, len(num_bytes)))
    return tuple(buckets)


def aligned(num_bytes: int) -> int:
    """Round up to the alignment."""
    return num_bytes + -num_bytes % ALIGNMENT


def num_bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a tensor of this shape and dtype."""
    return math.prod(shape) * dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in `torch`. Example: "bfloat16"."""
    return str(dtype).removeprefix("torch.")
