"""Planning of one optimizer step: rows to microbatches, and microbatches to ranks.

A step is a `Packing` with as many bins for each rank: with R ranks and R * M bins, bin r * M + m
is microbatch m of rank r. An empty bin is a dummy microbatch. `plan` joins the steps.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from nemo_like.data.packing.algorithms import PackingAlgorithm, SequencePacker
from nemo_like.data.packing.balance import assign_bins, schedule
from nemo_like.data.packing.packers import Packing, concatenative, longest_first, prefix_sums
from nemo_like.data.planning.image_balance import RowCosts, exchange_rows
from nemo_like.data.planning.oversize import FittedRows, group_rows
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.integer_math import ceil_div, round_up

OVERHEAD_TOKENS = 512
"""Work of a microbatch beyond its rows, in tokens: about those for which a GPU computes as long as
it reads the weights, and the launches of kernels."""
_NUM_BISECTIONS = 12
"""Bisection iterations when equalizing microbatch work: the maximum is found to 1 / 4096."""


@dataclass(frozen=True, eq=False)
class Items:
    """Units that are planned together, each a row or a group of rows: I items."""

    rows: Packing | None
    """Rows of each item; None if every item is a row."""
    num_rows: np.ndarray
    """int64 [I]"""
    lengths: np.ndarray
    """int64 [I]: in the packed layout the total length of an item, in the padded layout the length
    of its longest row.
    """
    work: np.ndarray | None
    """float64 [I]: work for balancing, in the packed layout of the item, in the padded layout of
    its longest row; None for `balance="none"`.
    """
    loss_work: np.ndarray
    """float64 [I]: in the padded layout the work for tokens with loss; see `padded_work`."""


def form_step(
    rows: np.ndarray, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec
) -> Packing:
    """Assign `rows` (row ids int64 [n]) to the ranks of `spec`; the result has bins of row ids.

    `groups` int64 [B] are group ids of all rows of the batch.
    """
    sizes = fitted.sizes(spec)
    trained = None if fitted.num_trained is None else fitted.num_trained[rows]
    items = _items(fitted.padded_lengths[rows], trained, group_rows(rows, groups), spec)
    if fitted.image_tokens is not None and spec.layout == "packed":
        items = _with_images(items, rows, sizes, fitted.image_work)
    if len(items.lengths) == 0:
        step = empty_bins(spec.bins_multiple)
    elif not spec.has_token_limit:
        step = _split_in_order(items, spec)
    elif spec.layout == "padded":
        step = _pad_items(items, spec)
    else:
        step = pack_items(items, spec)
    # Items to positions in `rows`, then to row ids.
    bins = step.expand(items.rows)
    bins = Packing(rows[bins.perm], bins.offsets)
    image_work = fitted.image_work if spec.layout == "packed" else None
    if image_work is not None and groups is None and spec.sync == "microbatch":
        language = row_work(fitted.padded_lengths, spec, fitted.num_trained)
        if language is not None:
            costs = RowCosts(sizes, image_work, language)
            bins = exchange_rows(bins, costs, spec.num_ranks, spec.capacity)
    return in_execution_order(bins, fitted, spec)


def in_execution_order(bins: Packing, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Sort the microbatches of each rank as `spec.microbatch_order` selects."""
    if spec.microbatch_order == "packer":
        return bins
    return largest_first(bins, fitted, spec.num_ranks, spec)


def form_rank(rows: np.ndarray, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Pack the rows of one rank into as few microbatches as possible, largest first.

    Used by `BatchPlan.with_budget`. `rows` int64 [n] are row ids; the result has bins of row ids.
    """
    lengths = fitted.padded_lengths[rows]
    if spec.layout == "packed":
        lengths = fitted.sizes(spec)[rows]
    if len(rows) == 0:
        return empty_bins(0)
    if not spec.has_token_limit:
        # Limited by rows: with one token per row the capacity is a number of rows.
        bins = concatenative(np.ones_like(lengths), spec.max_rows or 1, len(lengths))
        return Packing(rows[bins.perm], bins.offsets)
    if spec.layout == "padded":
        bins = form_padded(
            lengths, np.ones_like(lengths), None, spec.capacity, max_rows=spec.max_rows
        )
    else:
        # A row above the capacity counts as a full bin, so it stays alone.
        bins = bin_packer(spec).pack_csr(np.minimum(lengths, spec.capacity))
    bins = Packing(rows[bins.perm], bins.offsets)
    return largest_first(bins, fitted, 1, spec)


def largest_first(bins: Packing, fitted: FittedRows, num_ranks: int, spec: PlanSpec) -> Packing:
    """Sort the bins of each rank by decreasing number of positions, equal ones in their order.

    `bins` has row ids.
    """
    bins, row_positions, _ = fitted.place(bins, spec)
    positions = np.diff(prefix_sums(row_positions)[bins.offsets])
    if spec.layout == "padded":
        num_rows = np.diff(bins.offsets)
        positions = longest_of(bins, fitted.padded_lengths) * num_rows
    by_rank = positions.reshape(num_ranks, -1)
    order = np.argsort(-by_rank, axis=1, kind="stable")
    # Indices within a rank to indices of bins, rank-major.
    num_microbatches = by_rank.shape[1]
    first_bin = np.arange(num_ranks)[:, None] * num_microbatches
    bin_ids = order + first_bin
    return bins.take(bin_ids.ravel())


def longest_of(bins: Packing, lengths: np.ndarray) -> np.ndarray:
    """Length of the longest row of each bin, int64 [K]; 0 for an empty bin.

    `lengths` int64 is indexed by the row ids in `bins`.
    """
    longest = np.zeros(bins.num_bins, dtype=np.int64)
    # `reduceat` would return the first element of the next bin for an empty one.
    filled = np.flatnonzero(np.diff(bins.offsets))
    if len(filled):
        starts = bins.offsets[filled]
        longest[filled] = np.maximum.reduceat(lengths[bins.perm], starts)
    return longest


def join_ranks(rank_bins: list[Packing], microbatch_multiple: int) -> Packing:
    """Join the bins of all ranks and add empty bins, so that all ranks have the same number."""
    max_bins = max(bins.num_bins for bins in rank_bins)
    # At least one microbatch, so that a step without rows still runs on every rank.
    num_multiples = max(ceil_div(max_bins, microbatch_multiple), 1)
    num_microbatches = num_multiples * microbatch_multiple
    offsets = [np.zeros(1, dtype=np.int64)]
    num_rows = 0
    for bins in rank_bins:
        # A bin that ends where it starts is empty.
        ends = np.full(num_microbatches, len(bins.perm))
        ends[: bins.num_bins] = bins.offsets[1:]
        offsets.append(ends + num_rows)
        num_rows += len(bins.perm)
    perm = np.concatenate([bins.perm for bins in rank_bins])
    return Packing(perm, np.concatenate(offsets))


def _items(
    padded: np.ndarray, num_trained: np.ndarray | None, groups: Packing | None, spec: PlanSpec
) -> Items:
    """Build items from rows: padded lengths and tokens with loss int64 [n], and their groups."""
    if groups is None:
        # A group of its own for every row.
        num_rows = np.ones_like(padded)
        longest = total = padded
    else:
        num_rows = np.diff(groups.offsets)
        longest = longest_of(groups, padded)
        total = groups.loads(padded)
    if spec.layout == "padded":
        work, loss_work = padded_work(longest, _sums(groups, num_trained), spec)
        return Items(groups, num_rows, longest, work, loss_work)
    work = _sums(groups, row_work(padded, spec, num_trained))
    return Items(groups, num_rows, total, work, np.zeros(len(total)))


def _with_images(
    items: Items, rows: np.ndarray, sizes: np.ndarray, image_work: np.ndarray | None
) -> Items:
    """Return items of `rows` int64 [n] with the sizes and the work of their images.

    `sizes` int64 [B] and `image_work` float64 [B] have one entry per row of the batch.
    """
    work = items.work
    if work is not None and image_work is not None:
        work = work + _sums(items.rows, image_work[rows])
    return replace(items, lengths=_sums(items.rows, sizes[rows]), work=work)


def _sums(groups: Packing | None, values: np.ndarray | None) -> np.ndarray | None:
    """Sum `values` [n] of rows over the groups, [I]; without groups an item is a row."""
    return values if values is None or groups is None else groups.loads(values)


def row_work(
    lengths: np.ndarray,
    spec: PlanSpec,
    num_trained: np.ndarray | None = None,
    shared: np.ndarray | None = None,
) -> np.ndarray | None:
    """Work of rows by which ranks are balanced, float64 [n]; None for `balance="none"`.

    `lengths` and `num_trained`, the tokens with loss, are int64 [n]; so are `shared`, the tokens
    before them that another row computes.
    """
    if spec.balance == "flops":
        complete = lengths if shared is None else lengths + shared
        return spec.cost.of(complete, num_trained, shared)
    if spec.balance == "tokens":
        return lengths.astype(np.float64)
    return None


def padded_work(
    longest: np.ndarray, num_trained: np.ndarray | None, spec: PlanSpec
) -> tuple[np.ndarray | None, np.ndarray]:
    """Return (work of one row padded to `longest`, work for tokens with loss), float64 [n] each.

    The first grows with padding and the second does not. The second is 0 unless the numbers of
    tokens with loss, `num_trained` int64 [n], are known.
    """
    if num_trained is None:
        return row_work(longest, spec), np.zeros(len(longest))
    head = spec.cost.head if spec.balance == "flops" else 0.0
    return row_work(longest, spec, np.zeros_like(longest)), head * num_trained


def _pipeline_microbatches(work: np.ndarray, spec: PlanSpec) -> int:
    """Return the number of microbatches with the shortest pipeline, at most one per item of a rank.

    A step of M microbatches takes (M + b) / M times its work, with b = `bubble_microbatches`, of a
    rank with work W and an overhead o per microbatch: (M + b) / M * (W + M o), minimal at
    sqrt(b W / o). `work` is float64 [I], of the items of all ranks.
    """
    overhead = spec.cost.linear if spec.balance == "flops" else 1.0
    rank_work = float(work.sum()) / spec.num_ranks
    bubble = spec.bubble_microbatches
    best = math.sqrt(bubble * rank_work / max(OVERHEAD_TOKENS * overhead, 1e-9))
    return max(1, min(round(best), len(work) // spec.num_ranks))


def pack_items(items: Items, spec: PlanSpec) -> Packing:
    """Pack items and assign the bins to ranks, jointly with the `balanced` algorithm."""
    capacity = spec.capacity
    # An item above the capacity counts as a full bin, so no other row shares its bin.
    lengths = np.minimum(items.lengths, capacity)
    if spec.algorithm == PackingAlgorithm.BALANCED:
        assert items.work is not None, "checked by the spec"
        return schedule(
            lengths,
            capacity,
            spec.num_ranks,
            work=items.work,
            sync=spec.sync,
            microbatch_multiple=spec.microbatch_multiple,
            min_microbatches=_pipeline_microbatches(items.work, spec),
        )
    packer = bin_packer(spec)
    bins = packer.pack_csr(lengths)
    # Fill up with split bins instead of dummies, as far as there are rows.
    num_bins = round_up(bins.num_bins, spec.bins_multiple)
    bins = packer.split_fullest(bins, lengths, min(num_bins, len(lengths)))
    bin_work = None if items.work is None else bins.loads(items.work)
    return assign_to_ranks(bins, bin_work, spec)


def _pad_items(items: Items, spec: PlanSpec) -> Packing:
    """Form padded microbatches under the token budget and assign them to ranks."""
    bins = form_padded(
        items.lengths,
        items.num_rows,
        items.work,
        spec.capacity,
        max_rows=spec.max_rows,
        bins_multiple=spec.bins_multiple,
    )
    bin_work = None
    if items.work is not None:
        # Every row is padded to the longest one, which is the first of its bin.
        longest_items = bins.perm[bins.offsets[:-1]]
        bin_work = items.work[longest_items] * bins.loads(items.num_rows)
        bin_work += bins.loads(items.loss_work)
    return assign_to_ranks(bins, bin_work, spec)


def _split_in_order(items: Items, spec: PlanSpec) -> Packing:
    """Give each rank a consecutive share of the rows, in microbatches of `max_rows` rows."""
    # Shares have equal numbers of rows, rounded to items: a group is never divided.
    rows_before = prefix_sums(items.num_rows)
    share_ends = np.arange(spec.num_ranks + 1) * rows_before[-1] // spec.num_ranks
    item_bounds = np.searchsorted(rows_before, share_ends)
    rank_bins = []
    for start, stop in pairwise(item_bounds.tolist()):
        # The capacity is a number of rows here, and the length of an item its number of rows.
        num_rows = items.num_rows[start:stop]
        max_items = max(stop - start, 1)
        bins = concatenative(num_rows, spec.max_rows or 1, max_items)
        rank_bins.append(Packing(bins.perm + start, bins.offsets))
    return join_ranks(rank_bins, spec.microbatch_multiple)


def assign_to_ranks(bins: Packing, bin_work: np.ndarray | None, spec: PlanSpec) -> Packing:
    """Assign bins to ranks without changing them: by `bin_work` float64 [K], or round-robin."""
    if bin_work is None:
        num_multiples = ceil_div(bins.num_bins, spec.bins_multiple)
        num_microbatches = num_multiples * spec.microbatch_multiple
        # -1 is a bin without rows, a dummy.
        bin_ids = np.full(num_microbatches * spec.num_ranks, -1)
        bin_ids[: bins.num_bins] = np.arange(bins.num_bins)
        # Row m of the array is microbatch m, so consecutive bins go to consecutive ranks.
        rank_major = bin_ids.reshape(num_microbatches, spec.num_ranks).T
    else:
        rank_major = assign_bins(
            bin_work, spec.num_ranks, sync=spec.sync, microbatch_multiple=spec.microbatch_multiple
        )
    return bins.take(np.ravel(rank_major))


def on_ranks(
    bins: Packing, fitted: FittedRows, spec: PlanSpec, num_microbatches: int = 0
) -> Packing:
    """Return one step of formed microbatches: assign them to the ranks of `spec`.

    `bins` has the row ids of each microbatch; none is empty. Each rank runs at least
    `num_microbatches`, with dummies where there are fewer.
    """
    step = bins
    # One microbatch is the most frequent step of an aligned rank; it needs no assignment.
    if bins.num_bins > 1 or spec.bins_multiple > 1:
        work = work_of_bins(bins, fitted.padded_lengths, fitted.num_trained, spec)
        if work is not None and fitted.image_work is not None:
            work = work + bins.loads(fitted.image_work)
        step = assign_to_ranks(bins, work, spec)
    step = in_execution_order(step, fitted, spec)
    num_assigned = step.num_bins // spec.num_ranks
    if num_assigned < num_microbatches:
        # -1 is an empty bin.
        ids = np.full((spec.num_ranks, num_microbatches), -1)
        ids[:, :num_assigned] = np.arange(step.num_bins).reshape(spec.num_ranks, num_assigned)
        step = step.take(ids.ravel())
    return step


def bin_packer(spec: PlanSpec) -> SequencePacker:
    """Return the bin packer of `spec`, best fit decreasing for `balanced`.

    The bins of a single rank need no balance, only to be few, for which best fit is the fastest.
    """
    algorithm = PackingAlgorithm(spec.algorithm)
    if algorithm == PackingAlgorithm.BALANCED:
        algorithm = PackingAlgorithm.BEST_FIT_DECREASING
    return SequencePacker(algorithm=algorithm, bin_capacity=spec.capacity, seed=spec.seed)


def empty_bins(num_bins: int) -> Packing:
    """Return `num_bins` bins without rows."""
    no_rows = np.empty(0, dtype=np.int64)
    offsets = np.zeros(num_bins + 1, dtype=np.int64)
    return Packing(no_rows, offsets)


def work_of_bins(
    bins: Packing, padded: np.ndarray, num_trained: np.ndarray | None, spec: PlanSpec
) -> np.ndarray | None:
    """Return the work of each microbatch, float64 [K]; None for `balance="none"`.

    `padded` int64 [B] are the padded row lengths, `num_trained` int64 [B] the tokens with loss.
    """
    if spec.layout == "packed":
        work = row_work(padded, spec, num_trained)
        return None if work is None else bins.loads(work)
    bin_trained = None if num_trained is None else bins.loads(num_trained)
    work, loss_work = padded_work(longest_of(bins, padded), bin_trained, spec)
    return None if work is None else work * np.diff(bins.offsets) + loss_work


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

    Items are sorted by decreasing length and split into consecutive microbatches. This minimizes
    their number, because exchanging rows until they are sorted never raises the longest row of a
    microbatch.

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


def rank_major_bins(steps: list[Packing], num_ranks: int) -> Packing:
    """Join the bins of all steps; the bins of rank 0 over all steps come first."""
    if not steps:
        return Packing(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if len(steps) == 1:
        return steps[0]
    perm = np.concatenate([step.perm for step in steps])
    sizes = np.concatenate([np.diff(step.offsets) for step in steps])
    step_major = Packing(perm, prefix_sums(sizes))
    # Ids of the bins of each step, int64 [R, M of the step].
    bin_ids = []
    first = 0
    for step in steps:
        ids = first + np.arange(step.num_bins)
        bin_ids.append(ids.reshape(num_ranks, -1))
        first += step.num_bins
    rank_major_ids = np.concatenate(bin_ids, axis=1).ravel()
    return step_major.take(rank_major_ids)
