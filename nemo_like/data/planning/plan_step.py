"""One optimizer step: its rows to microbatches, and those to ranks. `plan` strings the steps
together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from nemo_like.data.packing.algorithms import PackingAlgorithm, SequencePacker
from nemo_like.data.packing.packers import Packing, concatenative
from nemo_like.data.planning.balance import assign_bins, schedule
from nemo_like.data.planning.oversize import FittedRows, group_rows
from nemo_like.data.planning.padded import form_padded
from nemo_like.data.planning.spec import PlanSpec


@dataclass(frozen=True, eq=False)
class Placement:
    """One step placed: microbatch m of rank r is bin `r * num_microbatches + m`; an empty bin is a
    dummy.
    """

    bins: Packing
    num_microbatches: int


@dataclass(frozen=True, eq=False)
class _Items:
    """What is placed as one, a row or a group of rows: I items."""

    rows: Packing | None
    """The rows of each item; None where an item is a row."""
    num_rows: np.ndarray
    """int64 [I]"""
    lengths: np.ndarray
    """int64 [I]: positions an item needs in a packed microbatch, the length of its longest row in a
    padded one.
    """
    work: np.ndarray | None
    """float64 [I]: what ranks are balanced by, of the whole item when packed, of its longest row
    when padded; None for `balance="none"`."""


def place_step(
    rows: np.ndarray, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec
) -> Placement:
    """Place `rows` (ids of the batch, int64 [n]) on the ranks of `spec`; bins of row ids."""
    items = _items(fitted.padded_lengths[rows], group_rows(rows, groups), spec)
    if len(items.lengths) == 0:
        placement = Placement(_empty_bins(spec.bins_multiple), spec.microbatch_multiple)
    elif spec.max_tokens is None:
        placement = _in_given_order(items, spec)
    elif spec.layout == "padded":
        placement = _padded(items, spec)
    else:
        placement = _packed(items, spec)
    bins = placement.bins.expand(items.rows)
    bins = Packing(rows[bins.perm], bins.offsets)
    if spec.microbatch_order == "largest_first":
        bins = largest_first(bins, fitted.padded_lengths, spec.num_ranks, spec.layout == "padded")
    return Placement(bins, placement.num_microbatches)


def place_rank(rows: np.ndarray, padded_lengths: np.ndarray, spec: PlanSpec) -> Packing:
    """The fewest microbatches of one rank's rows, for `BatchPlan.with_budget`: bins of row ids,
    largest first.
    """
    lengths = padded_lengths[rows]
    if len(rows) == 0:
        return _empty_bins(0)
    if spec.max_tokens is None:
        bins = concatenative(np.ones_like(lengths), spec.max_rows or 1, len(lengths))
        return Packing(rows[bins.perm], bins.offsets)
    if spec.layout == "padded":
        bins = form_padded(
            lengths, np.ones_like(lengths), None, spec.capacity or 0, max_rows=spec.max_rows
        )
    else:
        bins = _packer(spec).pack_csr(np.minimum(lengths, spec.capacity or 0))
    return largest_first(
        Packing(rows[bins.perm], bins.offsets), padded_lengths, 1, spec.layout == "padded"
    )


def largest_first(
    bins: Packing, padded_lengths: np.ndarray, num_ranks: int, is_padded: bool
) -> Packing:
    """Each rank's bins by decreasing size, equal ones in their order."""
    loads = bins.loads(padded_lengths)
    if is_padded:
        loads = longest_of(bins, padded_lengths) * np.diff(bins.offsets)
    grid = loads.reshape(num_ranks, -1)
    order = np.argsort(-grid, axis=1, kind="stable") + np.arange(num_ranks)[:, None] * grid.shape[1]
    return bins.take(order.ravel())


def longest_of(bins: Packing, lengths: np.ndarray) -> np.ndarray:
    """The longest row of each bin, int64 [K], 0 for an empty one."""
    longest = np.zeros(bins.num_bins, dtype=np.int64)
    filled = np.flatnonzero(np.diff(bins.offsets))
    if len(filled):
        longest[filled] = np.maximum.reduceat(lengths[bins.perm], bins.offsets[:-1][filled])
    return longest


def _items(padded: np.ndarray, groups: Packing | None, spec: PlanSpec) -> _Items:
    work = {
        "flops": spec.cost.of,
        "tokens": lambda lengths: lengths.astype(np.float64),
        "none": lambda lengths: None,
    }
    row_work = work[spec.balance](padded)
    if groups is None:
        return _Items(None, np.ones_like(padded), padded, row_work)
    num_rows = np.diff(groups.offsets)
    if spec.layout == "packed":
        return _Items(
            groups,
            num_rows,
            groups.loads(padded),
            None if row_work is None else groups.loads(row_work),
        )
    longest = longest_of(groups, padded)
    return _Items(groups, num_rows, longest, work[spec.balance](longest))


def _packed(items: _Items, spec: PlanSpec) -> Placement:
    capacity = spec.capacity or 0
    lengths = np.minimum(
        items.lengths, capacity
    )  # an item above the cap fills a bin, so it stays alone
    if items.work is not None and spec.algorithm == PackingAlgorithm.BEST_FIT_DECREASING:
        planned = schedule(
            lengths,
            capacity,
            spec.num_ranks,
            work=items.work,
            sync=spec.sync,
            microbatch_multiple=spec.microbatch_multiple,
        )
        return Placement(Packing(planned.perm, planned.offsets), planned.num_microbatches)
    packer = _packer(spec)
    fewest = packer.pack_csr(lengths)
    num_bins = min(-(-fewest.num_bins // spec.bins_multiple) * spec.bins_multiple, len(lengths))
    return _dealt(packer.spread(fewest, lengths, num_bins), items.work, spec)


def _padded(items: _Items, spec: PlanSpec) -> Placement:
    bins = form_padded(
        items.lengths,
        items.num_rows,
        items.work,
        spec.capacity or 0,
        max_rows=spec.max_rows,
        bins_multiple=spec.bins_multiple,
    )
    work = None
    if items.work is not None:  # of a microbatch: its longest row's for each of its rows
        work = items.work[bins.perm[bins.offsets[:-1]]] * bins.loads(items.num_rows)
    return _dealt(bins, work, spec, is_bin_work=True)


def _in_given_order(items: _Items, spec: PlanSpec) -> Placement:
    """Consecutive shares of the rows to the ranks, each cut `max_rows` at a time."""
    rows_before = np.concatenate([[0], np.cumsum(items.num_rows)])
    shares = np.searchsorted(
        rows_before, np.arange(spec.num_ranks + 1) * rows_before[-1] // spec.num_ranks
    )
    parts = []
    for start, stop in pairwise(shares.tolist()):
        part = concatenative(items.num_rows[start:stop], spec.max_rows or 1, max(stop - start, 1))
        parts.append(Packing(part.perm + start, part.offsets))
    return joined(parts, spec.microbatch_multiple)


def joined(parts: list[Packing], microbatch_multiple: int) -> Placement:
    """One part per rank, filled up with empty bins to equal numbers."""
    num_microbatches = (
        max(-(-max(part.num_bins for part in parts) // microbatch_multiple), 1)
        * microbatch_multiple
    )
    offsets, last = [np.zeros(1, dtype=np.int64)], 0
    for part in parts:
        ends = np.full(num_microbatches, len(part.perm))
        ends[: part.num_bins] = part.offsets[1:]
        offsets.append(ends + last)
        last += len(part.perm)
    return Placement(
        Packing(np.concatenate([part.perm for part in parts]), np.concatenate(offsets)),
        num_microbatches,
    )


def _dealt(
    bins: Packing, work: np.ndarray | None, spec: PlanSpec, is_bin_work: bool = False
) -> Placement:
    """Bins kept as they are and given to ranks: in turn without `work`, else so that ranks are
    even.
    """
    if work is None:
        num_microbatches = -(-bins.num_bins // spec.bins_multiple) * spec.microbatch_multiple
        grid = np.full(num_microbatches * spec.num_ranks, -1)
        grid[: bins.num_bins] = np.arange(bins.num_bins)
        grid = grid.reshape(num_microbatches, spec.num_ranks).T
    else:
        bin_work = work if is_bin_work else bins.loads(work)
        grid = assign_bins(
            bin_work, spec.num_ranks, sync=spec.sync, microbatch_multiple=spec.microbatch_multiple
        )
    return Placement(bins.take(np.ravel(grid)), grid.shape[1])


def _packer(spec: PlanSpec) -> SequencePacker:
    return SequencePacker(
        algorithm=PackingAlgorithm(spec.algorithm), bin_capacity=spec.capacity or 0, seed=spec.seed
    )


def _empty_bins(num_bins: int) -> Packing:
    return Packing(np.empty(0, dtype=np.int64), np.zeros(num_bins + 1, dtype=np.int64))
