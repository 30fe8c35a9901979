"""Few shapes for compiled models: padded lengths, microbatch shapes, and a warmup of all of them.

A model compiled for static shapes is compiled once per shape. Rows are therefore padded to a few
lengths, and the first steps have every shape on every rank: a rank that compiles later than the
others would let them wait in a collective for as long as the compilation takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.data.packing.packers import checked_lengths
from nemo_like.integer_math import round_up


@dataclass(frozen=True)
class ShapeBuckets:
    """Padded lengths: a row is padded to the smallest that it does not exceed.

    Raises ValueError unless `lengths` are increasing and at least 1.

    Example: `ShapeBuckets((16, 64))` pads rows of 10, 16 and 17 tokens to 16, 16 and 64.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        is_increasing = list(self.lengths) == sorted(set(self.lengths))
        if not self.lengths or not is_increasing or self.lengths[0] < 1:
            raise ValueError(f"lengths are {self.lengths}: give increasing lengths of at least 1")

    @classmethod
    def from_lengths(
        cls, lengths: np.ndarray, num_buckets: int, *, multiple: int = 1
    ) -> ShapeBuckets:
        """Choose up to `num_buckets` padded lengths with minimal padding of observed `lengths`.

        `lengths` are integers [N], N >= 1. All padded lengths are multiples of `multiple`. Takes
        O(num_buckets × distinct lengths) after sorting. Raises ValueError.
        """
        if num_buckets < 1 or multiple < 1:
            raise ValueError(
                f"num_buckets is {num_buckets} and multiple {multiple}: give at least 1"
            )
        values = round_up(checked_lengths(lengths), multiple)
        if len(values) == 0:
            raise ValueError("lengths is empty: give at least one observed length")
        distinct, counts = np.unique(values, return_counts=True)
        chosen = _minimal_padding(distinct.tolist(), counts.tolist(), num_buckets)
        return cls(tuple(chosen))

    def bucket_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the index of the bucket of each row, int64 [N], from integers [N].

        Raises ValueError for a row above the last bucket.
        """
        values = checked_lengths(lengths)
        if len(values) and values.max() > self.lengths[-1]:
            row = int(np.argmax(values))
            raise ValueError(
                f"row {row} has {values[row]} tokens, the largest bucket {self.lengths[-1]}: "
                "truncate the row or add a bucket"
            )
        return np.searchsorted(np.array(self.lengths), values).astype(np.int64)

    def padded_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """Return the padded length of each row, int64 [N], from integers [N]. Raises ValueError."""
        return np.array(self.lengths, dtype=np.int64)[self.bucket_of(lengths)]

    def num_padding(self, lengths: np.ndarray) -> int:
        """Return the padding of all rows in tokens, from integers [N]. Raises ValueError."""
        return int(self.padded_lengths(lengths).sum() - checked_lengths(lengths).sum())

    def shapes(self, max_tokens: int, max_rows: int | None = None) -> tuple[tuple[int, int], ...]:
        """Return one shape (rows, length) per bucket, with as many rows as `max_tokens` allows.

        A microbatch with fewer rows is filled up with dummy rows, so these are all shapes that
        occur. Raises ValueError if not even one row of the largest bucket is within `max_tokens`.
        """
        if self.lengths[-1] > max_tokens:
            raise ValueError(
                f"max_tokens is {max_tokens}: give at least the largest bucket, {self.lengths[-1]}"
            )
        shapes = []
        for length in self.lengths:
            num_rows = max_tokens // length
            if max_rows is not None:
                num_rows = min(num_rows, max_rows)
            shapes.append((num_rows, length))
        return tuple(shapes)


def _minimal_padding(lengths: list[int], counts: list[int], num_buckets: int) -> list[int]:
    """Choose at most `num_buckets` of the distinct, increasing `lengths` with `counts` rows each.

    With C[j] rows among the first j lengths, the padded tokens of the first j lengths with one
    bucket more are min over i < j of tokens[i] + lengths[j - 1] × (C[j] - C[i]). For each i this is
    a line in lengths[j - 1] with slope -C[i]. Slopes decrease and queries increase, so the lower
    envelope of the lines is a queue, and a bucket takes linear time.
    """
    num_lengths = len(lengths)
    rows_before = [0]
    for count in counts:
        rows_before.append(rows_before[-1] + count)
    tokens = [lengths[stop - 1] * rows_before[stop] for stop in range(1, num_lengths + 1)]
    tokens.insert(0, 0)
    # starts[b][j]: the first length of the last of b + 1 buckets for the first j lengths.
    starts = [[0] * (num_lengths + 1)]
    for _ in range(1, min(num_buckets, num_lengths)):
        tokens, last_starts = _add_bucket(lengths, rows_before, tokens)
        starts.append(last_starts)
    chosen = []
    stop = num_lengths
    for last_starts in reversed(starts):
        if stop == 0:
            break
        chosen.append(lengths[stop - 1])
        stop = last_starts[stop]
    return chosen[::-1]


def _add_bucket(
    lengths: list[int], rows_before: list[int], tokens: list[int]
) -> tuple[list[int], list[int]]:
    """Return `tokens` and the start of the last bucket, with one bucket more than `tokens` has.

    `tokens[j]` are the padded tokens of the first j `lengths`; `rows_before[j]` their rows.
    """
    new_tokens = [0]
    starts = [0]
    envelope: deque[int] = deque()
    for stop in range(1, len(lengths) + 1):
        _append_line(envelope, stop - 1, rows_before, tokens)
        length = lengths[stop - 1]
        while len(envelope) > 1:
            first = tokens[envelope[0]] - length * rows_before[envelope[0]]
            second = tokens[envelope[1]] - length * rows_before[envelope[1]]
            if first < second:
                break
            envelope.popleft()
        start = envelope[0]
        new_tokens.append(tokens[start] + length * (rows_before[stop] - rows_before[start]))
        starts.append(start)
    return new_tokens, starts


def _append_line(
    envelope: deque[int], line: int, rows_before: list[int], tokens: list[int]
) -> None:
    """Append line `tokens[i] - x × rows_before[i]` to the lower envelope, without hidden lines."""
    while len(envelope) > 1:
        before = envelope[-2]
        last = envelope[-1]
        # The last line is hidden if the new one crosses the one before no later than it does.
        # Crossings are fractions; comparing products keeps integers exact.
        new_crossing = (tokens[line] - tokens[before]) * (rows_before[last] - rows_before[before])
        last_crossing = (tokens[last] - tokens[before]) * (rows_before[line] - rows_before[before])
        if new_crossing > last_crossing:
            break
        envelope.pop()
    envelope.append(line)


@dataclass(frozen=True, eq=False)
class WarmupPlan:
    """Steps that have every shape on every rank, before all other microbatches."""

    shapes: tuple[tuple[int, int], ...]
    """S shapes (rows, length): step s computes `shapes[s]` on all ranks."""
    microbatches: np.ndarray
    """int64 [S, ranks], the microbatch of each step and rank; -1 is one of dummy rows."""
    remaining: np.ndarray
    """int64, the microbatches that follow the warmup, in their given order."""

    @property
    def num_dummy(self) -> int:
        """Microbatches of dummy rows."""
        return int((self.microbatches < 0).sum())


def warmup_shapes(shapes: Sequence[tuple[int, int]] | np.ndarray) -> tuple[tuple[int, int], ...]:
    """Return the distinct (rows, length) of microbatches, int64 [M, 2], by decreasing tokens.

    The largest is first, so that memory is exceeded in the first step or not at all, and smaller
    shapes reuse the memory of larger ones.
    """
    distinct = {(int(num_rows), int(length)) for num_rows, length in shapes}
    return tuple(sorted(distinct, key=lambda shape: (-shape[0] * shape[1], shape)))


def warmup_plan(shapes: Sequence[tuple[int, int]] | np.ndarray, num_ranks: int) -> WarmupPlan:
    """Plan steps in which every rank computes every shape once, before all others.

    `shapes` are the (rows, length) of M microbatches, int64 [M, 2]. A step uses the first
    microbatches of its shape, one per rank; where a shape has fewer microbatches than ranks, the
    others compute dummy rows without loss. Raises ValueError for less than one rank.

    Example: three microbatches of shape a and one of b on two ranks: step 0 has a on both ranks,
    step 1 has b and a dummy microbatch of shape b, and one microbatch of shape a remains.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}: give at least 1")
    microbatches_of: dict[tuple[int, int], list[int]] = {}
    for microbatch, (num_rows, length) in enumerate(shapes):
        microbatches_of.setdefault((int(num_rows), int(length)), []).append(microbatch)
    steps = warmup_shapes(shapes)
    planned = np.full((len(steps), num_ranks), -1, dtype=np.int64)
    for step, shape in enumerate(steps):
        first = microbatches_of[shape][:num_ranks]
        planned[step, : len(first)] = first
    remaining = np.setdiff1d(np.arange(len(shapes)), planned)
    return WarmupPlan(steps, planned, remaining)
