"""The packers as functions over checked lengths: prepare, run a kernel, and sort the result into
bins.

Names, settings and messages for users are in `algorithms`; the inner loops are in `kernels`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nemo_like.data.packing import kernels
from nemo_like.data.packing.kernels import stable_argsort


@dataclass(frozen=True, eq=False)
class Packing:
    """Bins as two arrays: bin k holds rows `perm[offsets[k] : offsets[k + 1]]`.

    Example: bins [2, 0] and [1] are `Packing(perm=[2, 0, 1], offsets=[0, 2, 3])`.
    """

    perm: np.ndarray
    """int64 [n], each row once."""
    offsets: np.ndarray
    """int64 [K+1]."""

    @property
    def num_bins(self) -> int:
        return len(self.offsets) - 1

    def bins(self) -> list[list[int]]:
        """The rows of each bin."""
        rows, bounds = self.perm.tolist(), self.offsets.tolist()
        return [rows[start:stop] for start, stop in pairwise(bounds)]

    def loads(self, lengths: np.ndarray) -> np.ndarray:
        """Sum of each bin over `lengths` of the rows [n], of the dtype of `lengths` [K]."""
        return np.diff(
            np.concatenate([np.zeros(1, lengths.dtype), np.cumsum(lengths[self.perm])])[
                self.offsets
            ]
        )

    def take(self, bins: np.ndarray) -> Packing:
        """The given bins in the given order, int64 [K'], where -1 is an empty bin."""
        sizes = np.where(bins < 0, 0, np.append(np.diff(self.offsets), 0)[bins])
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        positions = np.repeat(
            np.append(self.offsets[:-1], 0)[bins] - offsets[:-1], sizes
        ) + np.arange(offsets[-1])
        return Packing(self.perm[positions], offsets)

    def expand(self, items: Packing | None) -> Packing:
        """Bins of what the items hold, for bins of `items`; None leaves them as they are."""
        if items is None:
            return self
        rows = items.take(self.perm)
        return Packing(rows.perm, rows.offsets[self.offsets])


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Rows by decreasing length, equal ones in their given order, int64 [n]."""
    longest = int(lengths.max(initial=0))
    return stable_argsort(longest - lengths, longest + 1)


def first_fit_decreasing(
    lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0
) -> Packing:
    """Longest first, each row to the first bin with room."""
    return _first_fit(lengths, longest_first(lengths), capacity, max_items)


def first_fit_shuffle(lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0) -> Packing:
    """Rows in a random order, each to the first bin with room."""
    return _first_fit(
        lengths, np.random.default_rng(seed).permutation(len(lengths)), capacity, max_items
    )


def concatenative(lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0) -> Packing:
    """Rows in the given order; the first that does not fit opens the next bin, and the old one
    stays closed.
    """
    order = np.arange(len(lengths))
    placed, bin_of = _run(kernels.next_fit, lengths, lambda array: (capacity, max_items))
    return _grouped(order, bin_of, placed)


def best_fit_decreasing(
    lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0
) -> Packing:
    """Longest first, each row to the fullest bin with room; of equally full ones the last
    touched.
    """
    order = longest_first(lengths)
    kernel = _compiled(kernels.best_fit, len(lengths)) if capacity <= kernels.MAX_TABLE else None
    if kernel is None:
        bins, takes, num_bins = kernels.best_fit_runs(lengths[order].tolist(), capacity, max_items)
        return _grouped(order, np.repeat(np.asarray(bins, dtype=np.int64), takes), num_bins)
    starts = _bitset_starts(capacity + 1)
    num_leaves = _most_bins(lengths, capacity, max_items)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    num_bins = kernel(
        lengths[order],
        capacity,
        np.full(capacity + 1, -1),
        np.zeros(starts[-1], dtype=np.int64),
        starts,
        np.empty(num_leaves, dtype=np.int64),
        np.full(num_leaves, max_items),
        bin_of,
    )
    return _grouped(order, bin_of, num_bins)


def modified_first_fit_decreasing(
    lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0
) -> Packing:
    """Johnson and Garey's five phases, first fit decreasing of what is left over as the last."""
    order = longest_first(lengths)
    ordered = lengths[order]
    num_bins = int(np.count_nonzero(2 * lengths > capacity))
    bin_of = np.full(len(lengths), -1)
    bin_of[:num_bins] = np.arange(
        num_bins
    )  # phase 1: a bin for each row above half the capacity, longest first
    values, counts = np.unique(ordered[num_bins:], return_counts=True)
    bounds = tuple(
        int(np.searchsorted(values, capacity // share, side="right")) for share in (6, 3)
    )
    work_space = (
        *(values, len(lengths) - np.cumsum(counts), counts, np.arange(len(values) + 1)),
        *(bounds, max_items, capacity - ordered[:num_bins], np.full(num_bins, max_items - 1)),
    )
    kernel = _compiled(kernels.modified_first_fit, len(lengths))
    if kernel is None:
        interpreted: Callable[..., Any] = kernels.modified_first_fit
        lists = [
            space.tolist() if isinstance(space, np.ndarray) else space
            for space in (*work_space, bin_of)
        ]
        interpreted(*lists)
        bin_of = np.asarray(lists[-1], dtype=np.int64)
    else:
        kernel(*work_space, bin_of)
    left = np.flatnonzero(bin_of < 0)
    if len(left):
        rest = _first_fit(ordered[left], np.arange(len(left)), capacity, max_items)
        bin_of[left[rest.perm]] = num_bins + np.repeat(
            np.arange(rest.num_bins), np.diff(rest.offsets)
        )
        num_bins += rest.num_bins
    return _grouped(order, bin_of, num_bins)


def least_loaded(
    lengths: np.ndarray, capacity: int, max_items: int, num_bins: int
) -> Packing | None:
    """Longest first, each row to the least loaded of `num_bins` bins; None where that does not
    fit.
    """
    order = longest_first(lengths)
    fits, bin_of = _run(
        kernels.least_loaded, lengths[order], lambda array: (capacity, max_items, num_bins)
    )
    return _grouped(order, bin_of, num_bins) if fits else None


def balanced(lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0) -> Packing:
    """The number of bins of best fit decreasing, rows dealt to the least loaded where that fits."""
    fewest = best_fit_decreasing(lengths, capacity, max_items)
    return (
        least_loaded(lengths, capacity, max_items, fewest.num_bins) or fewest
        if len(lengths)
        else fewest
    )


def split_fullest(
    packing: Packing, lengths: np.ndarray, capacity: int, num_bins: int, max_items: int
) -> Packing:
    """The same rows in `num_bins` >= K bins, at most one per row: the fullest bins are dealt anew
    over more bins.

    As many of the fullest are taken as it needs for their share of the new bins to reach the
    fullest one left alone, so the largest load is as small as it can get without touching the rest;
    their rows go longest first to the least loaded.
    """
    extra = num_bins - packing.num_bins
    if extra <= 0:
        return packing
    loads, sizes = packing.loads(lengths), np.diff(packing.offsets)
    fullest = np.argsort(-loads, kind="stable")
    num_taken = np.arange(1, packing.num_bins + 1)
    share = np.cumsum(loads[fullest]) / (num_taken + extra)
    next_load = np.append(loads[fullest][1:], 0)
    enough = (np.cumsum(sizes[fullest]) >= num_taken + extra) & (share >= next_load)
    taken = np.zeros(packing.num_bins, dtype=bool)
    taken[fullest[: int(enough.argmax()) + 1]] = True
    is_dealt = np.repeat(taken, sizes)
    rows = np.sort(packing.perm[is_dealt])
    dealt = least_loaded(lengths[rows], capacity, max_items, int(taken.sum()) + extra)
    if dealt is None:
        return _halved(packing, lengths, num_bins)
    kept = packing.perm[~is_dealt]
    return Packing(
        np.concatenate([kept, rows[dealt.perm]]),
        np.concatenate([[0], np.cumsum(np.concatenate([sizes[~taken], np.diff(dealt.offsets)]))]),
    )


def _halved(packing: Packing, lengths: np.ndarray, num_bins: int) -> Packing:
    """Split the fullest bin of two or more rows in two, again and again: always possible, less even
    than dealing anew.
    """
    extra = num_bins - packing.num_bins
    loads = np.where(np.diff(packing.offsets) > 1, packing.loads(lengths), -1)
    split = np.sort(
        np.argsort(-loads, kind="stable")[:extra]
    )  # no other bin can become the fullest
    bins = packing.take(split).bins()
    heap = [(-load, b) for b, load in enumerate(loads[split].tolist()) if load >= 0]
    heapq.heapify(heap)
    while len(bins) < len(split) + extra:
        _, b = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0, 0]
        for row in sorted(bins[b], key=lambda row: -lengths[row]):
            side = int(sums[1] < sums[0])
            halves[side].append(row)
            sums[side] += int(lengths[row])
        bins[b] = halves[0]
        bins.append(halves[1])
        for half, index in ((0, b), (1, len(bins) - 1)):
            if len(halves[half]) > 1:
                heapq.heappush(heap, (-sums[half], index))
    kept = packing.take(np.delete(np.arange(packing.num_bins), split))
    sizes = np.cumsum([len(rows) for rows in bins]) + len(kept.perm)
    return Packing(
        np.concatenate([kept.perm, *map(np.asarray, bins)]), np.concatenate([kept.offsets, sizes])
    )


def _first_fit(lengths: np.ndarray, order: np.ndarray, capacity: int, max_items: int) -> Packing:
    num_leaves = 1 << (_most_bins(lengths, capacity, max_items) - 1).bit_length()

    def workspace(array: Callable[[np.ndarray], Any]) -> tuple[Any, ...]:
        tree, slots = np.full(2 * num_leaves, capacity), np.full(num_leaves, max_items)
        return max_items, array(tree), num_leaves, array(slots)

    num_bins, bin_of = _run(kernels.first_fit, lengths[order], workspace)
    return _grouped(order, bin_of, num_bins)


def _run(
    kernel: Callable[..., Any],
    lengths: np.ndarray,
    workspace: Callable[[Callable[[np.ndarray], Any]], tuple[Any, ...]],
) -> tuple[Any, np.ndarray]:
    """Run a kernel compiled over arrays or interpreted over lists: (its result, the bin of each
    position int64 [n]).
    """
    compiled = _compiled(kernel, len(lengths))
    if compiled is None:
        bin_of: Any = [0] * len(lengths)
        result = kernel(lengths.tolist(), *workspace(np.ndarray.tolist), bin_of)
        return result, np.asarray(bin_of, dtype=np.int64)
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    return compiled(lengths, *workspace(np.asarray), bin_of), bin_of


def _compiled(kernel: Callable[..., Any], num_rows: int) -> Callable[..., Any] | None:
    return kernels.compiled(kernel) if num_rows >= kernels.MIN_COMPILED else None


def _grouped(order: np.ndarray, bin_of: np.ndarray, num_bins: int) -> Packing:
    """Rows sorted by bin, within a bin in the order of placement; `bin_of` [n] is the bin of each
    position of `order`.
    """
    offsets = np.zeros(num_bins + 1, dtype=np.int64)
    np.cumsum(np.bincount(bin_of, minlength=num_bins), out=offsets[1:])
    return Packing(order[stable_argsort(bin_of, num_bins)], offsets)


def _most_bins(lengths: np.ndarray, capacity: int, max_items: int) -> int:
    """No more bins than this are ever opened by first or best fit: of the bins with a free slot at
    most one is half empty.
    """
    return max(
        1,
        min(
            len(lengths), 2 * int(lengths.sum()) // capacity + 1 + len(lengths) // max(max_items, 1)
        ),
    )


def _bitset_starts(num_bits: int) -> np.ndarray:
    """Where each level of a bitset of 32-bit words begins, int64 [levels + 1]; the last level is
    one word.
    """
    starts = [0]
    while True:
        num_bits = -(-num_bits // 32)
        starts.append(starts[-1] + num_bits)
        if num_bits == 1:
            return np.asarray(starts, dtype=np.int64)
