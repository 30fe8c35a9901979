"""Padded microbatches under a token budget: rows x longest row is at most the limit.

Rows are sorted by decreasing length and split into consecutive microbatches. This minimizes their
number, because exchanging rows until they are sorted never raises the longest row of a microbatch.
Ranks are assigned elsewhere.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np

from nemo_like.data.packing.packers import Packing, longest_first, prefix_sums
from nemo_like.integer_math import round_up

_NUM_BISECTIONS = 12
"""Bisection iterations when equalizing microbatch work: the maximum is found to 1 / 4096."""


def form_padded(
    lengths: np.ndarray,
    num_rows: np.ndarray,
    row_work: np.ndarray | None,
    capacity: int,
    *,
    max_rows: int | None = None,
    bins_multiple: int = 1,
) -> Packing:
    """Split items into padded microbatches; returns bins of item indices.

    An item is a row or a group: `num_rows` int64 [I] rows padded to `lengths` int64 [I]. The number
    of microbatches is the smallest multiple of `bins_multiple` possible under `capacity`, or one
    per item if there are fewer items. Among such splits the max-loaded microbatch is as small as
    possible; its work is its number of rows times the `row_work` float64 [I] of its longest row.
    With None, work is tokens and microbatches are filled up to the capacity. An item above the
    capacity is a microbatch of its own.

    Example: rows of 7, 6, 4, 4, 3, 2 tokens and a capacity of 16 give [7, 6] and [4, 4, 3, 2].
    """
    if len(lengths) == 0:
        no_rows = np.empty(0, dtype=np.int64)
        return Packing(no_rows, np.zeros(1, dtype=np.int64))
    order = longest_first(lengths)
    sorted_lengths = lengths[order]
    rows_before = prefix_sums(num_rows[order])
    row_limit = rows_before[-1] if max_rows is None else max_rows
    # Rows of a microbatch whose longest item is item i.
    max_rows_of = np.minimum(capacity // sorted_lengths, row_limit)
    bounds = _fill(rows_before, max_rows_of, len(order))
    assert bounds is not None
    # A microbatch has at least one item, so there are at most as many microbatches as items.
    num_bins = min(round_up(len(bounds) - 1, bins_multiple), len(order))
    if row_work is None:
        work = sorted_lengths.astype(np.float64)
    else:
        work = row_work[order]
        bounds = _minimize_max_work(bounds, rows_before, max_rows_of, work, num_bins)
    bounds = _split_max_loaded(bounds, rows_before.tolist(), work.tolist(), num_bins)
    return Packing(order, np.asarray(bounds, dtype=np.int64))


def _fill(rows_before: np.ndarray, max_rows_of: np.ndarray, max_bins: int) -> list[int] | None:
    """Fill microbatches one after the other; returns their bounds, or None above `max_bins`.

    `rows_before` is int64 [I + 1]. A microbatch that starts at item i takes `max_rows_of[i]` rows,
    and at least item i.
    """
    first = np.arange(len(max_rows_of))
    max_row = rows_before[:-1] + max_rows_of
    stops = np.searchsorted(rows_before, max_row, side="right") - 1
    # A list, because the loop below reads single elements.
    stop_of = np.maximum(stops, first + 1).tolist()
    num_items = len(stop_of)
    bounds = [0]
    while bounds[-1] < num_items:
        if len(bounds) > max_bins:
            return None
        bounds.append(stop_of[bounds[-1]])
    return bounds


def _minimize_max_work(
    bounds: list[int],
    rows_before: np.ndarray,
    max_rows_of: np.ndarray,
    work: np.ndarray,
    num_bins: int,
) -> list[int]:
    """Find bounds of at most `num_bins` microbatches with minimal maximum work, by bisection.

    `rows_before` int64 [I + 1], `max_rows_of` int64 [I], `work` float64 [I] of one row each.
    """
    num_rows = np.diff(rows_before)
    largest_row = float(work[0])
    mean_work = float(np.dot(num_rows, work)) / num_bins
    # No split has a smaller maximum than these two bounds.
    low = max(largest_row, mean_work)
    microbatch_work = np.diff(rows_before[bounds]) * work[bounds[:-1]]
    high = float(microbatch_work.max())
    for _ in range(_NUM_BISECTIONS):
        middle = (low + high) / 2
        rows_within = np.floor(middle / work)
        limited_rows = np.minimum(max_rows_of, rows_within).astype(np.int64)
        candidate = _fill(rows_before, limited_rows, num_bins)
        if candidate is None:
            low = middle
        else:
            bounds = candidate
            high = middle
    return bounds


def _split_max_loaded(
    bounds: list[int], rows_before: list[int], work: list[float], num_bins: int
) -> list[int]:
    """Halve the max-loaded microbatch of two or more items until there are `num_bins`."""

    def heap_entry(start: int, stop: int) -> tuple[float, int, int]:
        # `heapq` is a min-heap; the bounds make entries of equal work distinct.
        num_rows = rows_before[stop] - rows_before[start]
        return -num_rows * work[start], start, stop

    heap = []
    for start, stop in pairwise(bounds):
        if stop - start > 1:
            heap.append(heap_entry(start, stop))
    heapq.heapify(heap)
    bounds = list(bounds)
    while len(bounds) - 1 < num_bins:
        _, start, stop = heapq.heappop(heap)
        middle = (start + stop) // 2
        bounds.append(middle)
        for half_start, half_stop in ((start, middle), (middle, stop)):
            if half_stop - half_start > 1:
                heapq.heappush(heap, heap_entry(half_start, half_stop))
    return sorted(bounds)
