"""Padded microbatches under a token budget: rows of like length together, rows x longest row at
most the cap.

Rows are sorted longest first and cut into consecutive microbatches. That is optimal in their
number, because exchanging rows until they are sorted never raises a microbatch's longest row; it
decides no ranks.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from nemo_like.data.packing.packers import Packing, longest_first

_NUM_HALVINGS = 12
"""Bisection steps of the evening: the dearest microbatch is found to a part in 4096."""


def form_padded(
    lengths: np.ndarray,
    num_rows: np.ndarray,
    row_work: np.ndarray | None,
    capacity: int,
    *,
    max_rows: int | None = None,
    bins_multiple: int = 1,
) -> Packing:
    """Cut items (rows, or groups of `num_rows` [I] rows padded to `lengths` [I]) into microbatches;
    bins of item indices.

    Their number is the smallest multiple of `bins_multiple` that the cap allows (or one per item
    where items run out). Among such cuts the dearest microbatch is as cheap as possible, counting
    `row_work` [I] of its longest row for each of its rows; None counts tokens and only fills up to
    the cap. An item above the cap by itself is a microbatch of its own.

    Example: rows of 7, 6, 4, 4, 3, 2 tokens and a capacity of 16 give [7, 6] and [4, 4, 3, 2].
    """
    if len(lengths) == 0:
        return Packing(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    order = longest_first(lengths)
    sorted_lengths, sorted_rows = lengths[order], num_rows[order]
    rows_before = np.concatenate([[0], np.cumsum(sorted_rows)])
    most_rows = np.minimum(
        capacity // sorted_lengths, rows_before[-1] if max_rows is None else max_rows
    )
    bounds = _cut(rows_before, most_rows, len(order))
    assert bounds is not None
    num_bins = min(-(-(len(bounds) - 1) // bins_multiple) * bins_multiple, len(order))
    work = sorted_lengths.astype(np.float64) if row_work is None else row_work[order]
    if row_work is not None:
        bounds = _evened(bounds, rows_before, most_rows, work, num_bins)
    bounds = _split_dearest(bounds, rows_before.tolist(), work.tolist(), num_bins)
    return Packing(order, np.asarray(bounds, dtype=np.int64))


def _cut(rows_before: np.ndarray, most_rows: np.ndarray, max_bins: int) -> list[int] | None:
    """Bounds of microbatches filled one after the other, `most_rows[i]` rows where item i is the
    longest; None if there are more than `max_bins`."""
    first = np.arange(len(most_rows))
    stops = np.searchsorted(rows_before, rows_before[:-1] + most_rows, side="right") - 1
    stop_of = np.maximum(stops, first + 1).tolist()
    bounds, last = [0], len(stop_of)
    while bounds[-1] < last:
        if len(bounds) > max_bins:
            return None
        bounds.append(stop_of[bounds[-1]])
    return bounds


def _evened(
    bounds: list[int],
    rows_before: np.ndarray,
    most_rows: np.ndarray,
    work: np.ndarray,
    num_bins: int,
) -> list[int]:
    """Bounds of at most `num_bins` microbatches whose dearest is as cheap as bisection finds."""
    dearest = float((np.diff(rows_before[bounds]) * work[bounds[:-1]]).max())
    low, high = max(float(work[0]), float(np.dot(np.diff(rows_before), work)) / num_bins), dearest
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        within = np.minimum(most_rows, np.floor(middle / work)).astype(np.int64)
        cheaper = _cut(rows_before, within, num_bins)
        if cheaper is None:
            low = middle
        else:
            bounds, high = cheaper, middle
    return bounds


def _split_dearest(
    bounds: list[int], rows_before: list[int], work: list[float], num_bins: int
) -> list[int]:
    """Halve the dearest microbatch of two or more items until there are `num_bins`."""

    def entry(start: int, stop: int) -> tuple[float, int, int]:
        return -(rows_before[stop] - rows_before[start]) * work[start], start, stop

    heap = [entry(start, stop) for start, stop in pairwise(bounds) if stop - start > 1]
    heapq.heapify(heap)
    bounds = list(bounds)
    while len(bounds) - 1 < num_bins:
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        bounds.append(middle)
        for half in ((start, middle), (middle, stop)):
            if half[1] - half[0] > 1:
                heapq.heappush(heap, entry(*half))
    return sorted(bounds)
