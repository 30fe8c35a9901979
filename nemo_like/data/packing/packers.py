"""Bin packers as functions over checked lengths: prepare the input, run a kernel, sort by bin.

Names, settings and user messages are in `algorithms`; the inner loops are in `kernels`. All packers
take `lengths` int64 [n], each 1 to `capacity`, and at most `max_items` rows per bin; `seed` is used
by `first_fit_shuffle` only.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from nemo_like.data.packing import kernels
from nemo_like.data.packing.kernels import stable_argsort
from nemo_like.integer_math import ceil_div


@dataclass(frozen=True, eq=False)
class Packing:
    """Bins as two arrays: bin k has the rows `perm[offsets[k] : offsets[k + 1]]`.

    Example: bins [2, 0] and [1] are `Packing(perm=[2, 0, 1], offsets=[0, 2, 3])`.
    """

    perm: np.ndarray
    """int64 [n], each row once."""
    offsets: np.ndarray
    """int64 [K + 1]."""

    @property
    def num_bins(self) -> int:
        """K."""
        return len(self.offsets) - 1

    def bins(self) -> list[list[int]]:
        """Return the rows of each bin as lists."""
        rows = self.perm.tolist()
        return [rows[start:stop] for start, stop in pairwise(self.offsets.tolist())]

    def loads(self, lengths: np.ndarray) -> np.ndarray:
        """Sum `lengths` [n] over the rows of each bin; [K] of the same dtype."""
        # Differences of cumulative sums, since `np.add.reduceat` does not handle empty bins.
        cumulative = np.concatenate([np.zeros(1, lengths.dtype), np.cumsum(lengths[self.perm])])
        return np.diff(cumulative[self.offsets])

    def take(self, bins: np.ndarray) -> Packing:
        """Select bins in the given order, int64 [K']; -1 selects an empty bin."""
        # The appended entry is the empty bin that index -1 refers to.
        all_sizes = np.append(np.diff(self.offsets), 0)
        all_starts = np.append(self.offsets[:-1], 0)
        sizes = np.where(bins < 0, 0, all_sizes[bins])
        offsets = prefix_sums(sizes)
        # Row j of the result is row j + shift of `perm`, with one shift per bin.
        shifts = np.repeat(all_starts[bins] - offsets[:-1], sizes)
        positions = shifts + np.arange(offsets[-1])
        return Packing(self.perm[positions], offsets)

    def expand(self, items: Packing | None) -> Packing:
        """Replace each item of these bins by its rows; None means that items are rows."""
        if items is None:
            return self
        rows = items.take(self.perm)
        return Packing(rows.perm, rows.offsets[self.offsets])


def prefix_sums(values: np.ndarray) -> np.ndarray:
    """Return [0, v_0, v_0 + v_1, ...]: the sums of the first 0, 1, ... `values` [n]; [n + 1]."""
    return np.concatenate([[0], np.cumsum(values)])


def checked_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Convert `lengths` to int64 [B]; raises ValueError unless all are integers >= 1."""
    values = np.asarray(lengths)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are one list of integers; got {values.dtype} of shape {values.shape}"
        )
    values = values.astype(np.int64)
    if len(values) and values.min() < 1:
        row = int(values.argmin())
        raise ValueError(f"row {row} has length {values[row]}; a row has at least one token")
    return values


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Sort rows by decreasing length, equal ones in their given order; int64 [n]."""
    longest = int(lengths.max(initial=0))
    return stable_argsort(longest - lengths, longest + 1)


def first_fit_decreasing(
    lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0
) -> Packing:
    """Pack the longest row first, each into the first bin with room. `lengths` is int64 [n]."""
    return _first_fit(lengths, longest_first(lengths), capacity, max_items)


def first_fit_shuffle(lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0) -> Packing:
    """Pack rows in a random order, each into the first bin with room. `lengths` is int64 [n]."""
    order = np.random.default_rng(seed).permutation(len(lengths))
    return _first_fit(lengths, order, capacity, max_items)


def concatenative(lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0) -> Packing:
    """Pack rows in the given order; the first that does not fit closes the bin (next fit).

    `lengths` is int64 [n].
    """
    num_bins, bin_of = _run(kernels.next_fit, lengths, lambda array: (capacity, max_items))
    return _sorted_by_bin(np.arange(len(lengths)), bin_of, num_bins)


def best_fit_decreasing(
    lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0
) -> Packing:
    """Pack the longest row first, each into the fullest bin with room.

    Of equally full bins the last one that changed is used. `lengths` is int64 [n].
    """
    order = longest_first(lengths)
    kernel = None
    if capacity <= kernels.MAX_TABLE:
        kernel = _compiled(kernels.best_fit, len(lengths))
    if kernel is None:
        # Interpreted, runs of equal lengths are packed at once, which visits fewer bins.
        ordered = lengths[order].tolist()
        bins, counts, num_bins = kernels.best_fit_runs(ordered, capacity, max_items)
        bin_of = np.repeat(np.asarray(bins, dtype=np.int64), counts)
        return _sorted_by_bin(order, bin_of, num_bins)
    level_starts = _bitset_level_starts(capacity + 1)
    max_bins = _max_open_bins(lengths, capacity, max_items)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    num_bins = kernel(
        lengths[order],
        capacity,
        np.full(capacity + 1, -1),
        np.zeros(level_starts[-1], dtype=np.int64),
        level_starts,
        np.empty(max_bins, dtype=np.int64),
        np.full(max_bins, max_items),
        bin_of,
    )
    return _sorted_by_bin(order, bin_of, num_bins)


def modified_first_fit_decreasing(
    lengths: np.ndarray, capacity: int, max_items: int, seed: int = 0
) -> Packing:
    """Pack by Johnson and Garey's five phases; the last is first fit decreasing of the rest.

    `lengths` is int64 [n].
    """
    order = longest_first(lengths)
    ordered = lengths[order]
    num_bins = int(np.count_nonzero(2 * lengths > capacity))
    bin_of = np.full(len(lengths), -1)
    # Phase 1: a bin for each row above half the capacity, longest first.
    bin_of[:num_bins] = np.arange(num_bins)
    values, counts = np.unique(ordered[num_bins:], return_counts=True)
    first_positions = len(lengths) - np.cumsum(counts)
    first_above_sixth = int(np.searchsorted(values, capacity // 6, side="right"))
    first_above_third = int(np.searchsorted(values, capacity // 3, side="right"))
    arguments = (
        values,
        first_positions,
        counts,
        np.arange(len(values) + 1),
        (first_above_sixth, first_above_third),
        max_items,
        capacity - ordered[:num_bins],
        np.full(num_bins, max_items - 1),
        bin_of,
    )
    kernel = _compiled(kernels.modified_first_fit, len(lengths))
    if kernel is None:
        interpreted: Callable[..., Any] = kernels.modified_first_fit
        # The interpreter indexes lists faster than arrays.
        lists = []
        for value in arguments:
            lists.append(value.tolist() if isinstance(value, np.ndarray) else value)
        interpreted(*lists)
        bin_of = np.asarray(lists[-1], dtype=np.int64)
    else:
        kernel(*arguments)
    rest = np.flatnonzero(bin_of < 0)
    if len(rest):
        # Phase 5. Phases 2 to 4 left no room for these rows, so they get new bins.
        packing = _first_fit(ordered[rest], np.arange(len(rest)), capacity, max_items)
        new_bins = np.repeat(np.arange(packing.num_bins), np.diff(packing.offsets))
        bin_of[rest[packing.perm]] = num_bins + new_bins
        num_bins += packing.num_bins
    return _sorted_by_bin(order, bin_of, num_bins)


def least_loaded(
    lengths: np.ndarray, capacity: int, max_items: int, num_bins: int
) -> Packing | None:
    """Pack the longest row first, each into the least loaded of `num_bins` bins (LPT).

    Returns None if a row does not fit there. `lengths` is int64 [n].
    """
    order = longest_first(lengths)
    fits, bin_of = _run(
        kernels.least_loaded, lengths[order], lambda array: (capacity, max_items, num_bins)
    )
    return _sorted_by_bin(order, bin_of, num_bins) if fits else None


def split_fullest(
    packing: Packing, lengths: np.ndarray, capacity: int, num_bins: int, max_items: int
) -> Packing:
    """Repack the k fullest bins into more bins, so that there are `num_bins` >= K in total.

    k is minimal such that the mean load of the new bins is at least the load of the next fullest
    bin, so the maximum load is as small as it can be without changing the other bins. The rows of
    the k bins go longest first to the least loaded new bin. There is at most one bin per row.
    `lengths` is int64 [n].
    """
    num_extra = num_bins - packing.num_bins
    if num_extra <= 0:
        return packing
    loads = packing.loads(lengths)
    sizes = np.diff(packing.offsets)
    fullest = np.argsort(-loads, kind="stable")
    sorted_loads = loads[fullest]
    k = np.arange(1, packing.num_bins + 1)
    mean_load = np.cumsum(sorted_loads) / (k + num_extra)
    next_load = np.append(sorted_loads[1:], 0)
    # The k bins must also have at least as many rows as there are new bins.
    has_enough_rows = np.cumsum(sizes[fullest]) >= k + num_extra
    is_enough = has_enough_rows & (mean_load >= next_load)
    # `argmax` is the first True, that is the smallest k.
    num_repacked = int(is_enough.argmax()) + 1
    is_repacked = np.zeros(packing.num_bins, dtype=bool)
    is_repacked[fullest[:num_repacked]] = True

    is_repacked_row = np.repeat(is_repacked, sizes)
    # Sorted, so that the result does not depend on the order of rows within the old bins.
    rows = np.sort(packing.perm[is_repacked_row])
    num_new = num_repacked + num_extra
    repacked = least_loaded(lengths[rows], capacity, max_items, num_new)
    # LPT balances loads but may leave a row that fits into no bin.
    if repacked is None:
        return _halve_fullest(packing, lengths, num_bins)
    perm = np.concatenate([packing.perm[~is_repacked_row], rows[repacked.perm]])
    new_sizes = np.concatenate([sizes[~is_repacked], np.diff(repacked.offsets)])
    return Packing(perm, prefix_sums(new_sizes))


def _halve_fullest(packing: Packing, lengths: np.ndarray, num_bins: int) -> Packing:
    """Repeatedly split the fullest bin of two or more rows in two, until there are `num_bins`.

    This is always possible, but less balanced than repacking several bins at once. `lengths` is
    int64 [n].
    """
    num_extra = num_bins - packing.num_bins
    # A bin of one row cannot be split.
    is_splittable = np.diff(packing.offsets) > 1
    loads = np.where(is_splittable, packing.loads(lengths), -1)
    # Only the `num_extra` fullest bins can be split: halves are smaller than their bin.
    fullest = np.argsort(-loads, kind="stable")
    split = np.sort(fullest[:num_extra])
    bins = packing.take(split).bins()
    # `heapq` is a min-heap, so negative loads make the fullest bin the first.
    heap = []
    for b, load in enumerate(loads[split].tolist()):
        if load >= 0:
            heap.append((-load, b))
    heapq.heapify(heap)
    while len(bins) < len(split) + num_extra:
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
    not_split = np.delete(np.arange(packing.num_bins), split)
    kept = packing.take(not_split)
    sizes = [len(rows) for rows in bins]
    ends = np.cumsum(sizes) + len(kept.perm)
    perm = np.concatenate([kept.perm, *map(np.asarray, bins)])
    return Packing(perm, np.concatenate([kept.offsets, ends]))


def _first_fit(lengths: np.ndarray, order: np.ndarray, capacity: int, max_items: int) -> Packing:
    """Pack rows in `order` int64 [n], each into the first bin with room."""
    # The kernel searches a complete binary tree, so the number of leaves is a power of two.
    max_bins = _max_open_bins(lengths, capacity, max_items)
    num_leaves = 1 << (max_bins - 1).bit_length()

    def workspace(array: Callable[[np.ndarray], Any]) -> tuple[Any, ...]:
        """Return the further arguments: the tree is [2 * num_leaves], `free_items` [num_leaves]."""
        tree = np.full(2 * num_leaves, capacity)
        free_items = np.full(num_leaves, max_items)
        return max_items, array(tree), num_leaves, array(free_items)

    num_bins, bin_of = _run(kernels.first_fit, lengths[order], workspace)
    return _sorted_by_bin(order, bin_of, num_bins)


def _run(
    kernel: Callable[..., Any],
    lengths: np.ndarray,
    workspace: Callable[[Callable[[np.ndarray], Any]], tuple[Any, ...]],
) -> tuple[Any, np.ndarray]:
    """Run a kernel, compiled over arrays or interpreted over lists.

    `workspace` takes the function that converts arrays and returns the further arguments. Returns
    (result of the kernel, bin of each position int64 [n]).
    """
    compiled = _compiled(kernel, len(lengths))
    if compiled is None:
        bin_list: Any = [0] * len(lengths)
        result = kernel(lengths.tolist(), *workspace(np.ndarray.tolist), bin_list)
        return result, np.asarray(bin_list, dtype=np.int64)
    bin_of = np.zeros(len(lengths), dtype=np.int64)
    return compiled(lengths, *workspace(np.asarray), bin_of), bin_of


def _compiled(kernel: Callable[..., Any], num_rows: int) -> Callable[..., Any] | None:
    """Return the compiled kernel, or None to interpret it."""
    if num_rows < kernels.MIN_COMPILED:
        return None
    return kernels.compiled(kernel)


def _sorted_by_bin(order: np.ndarray, bin_of: np.ndarray, num_bins: int) -> Packing:
    """Sort rows by bin, within a bin in the order of packing.

    `bin_of` int64 [n] is the bin of each position of `order` int64 [n].
    """
    sizes = np.bincount(bin_of, minlength=num_bins)
    by_bin = stable_argsort(bin_of, num_bins)
    return Packing(order[by_bin], prefix_sums(sizes))


def _max_open_bins(lengths: np.ndarray, capacity: int, max_items: int) -> int:
    """Upper bound on the number of bins that first fit or best fit opens.

    `lengths` is int64 [n].
    """
    # Of the bins below `max_items` rows at most one is less than half full; bins with `max_items`
    # rows are bounded by the number of rows.
    by_tokens = 2 * int(lengths.sum()) // capacity + 1
    by_items = len(lengths) // max(max_items, 1)
    return max(1, min(len(lengths), by_tokens + by_items))


def _bitset_level_starts(num_bits: int) -> np.ndarray:
    """Offsets of the levels of a bitset of 32-bit words, int64 [levels + 1].

    Each level has one bit per word of the level below; the last level is one word.
    """
    starts = [0]
    while True:
        num_bits = ceil_div(num_bits, 32)
        starts.append(starts[-1] + num_bits)
        if num_bits == 1:
            return np.asarray(starts, dtype=np.int64)
