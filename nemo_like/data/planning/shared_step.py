"""Planning of one optimizer step whose rows have common leading tokens.

The units, rows or groups of rows that must stay together, are sorted depth-first. A piece is a run
of consecutive units of one tree; its tokens and its work are those of its union. Pieces are planned
like rows. Bins that got several pieces of a tree need less than their sum, never more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nemo_like.data.packing.algorithms import PackingAlgorithm
from nemo_like.data.packing.bounds import shared_bound
from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.oversize import FittedRows, group_rows
from nemo_like.data.planning.plan_step import (
    Items,
    assign_to_ranks,
    bin_packer,
    empty_bins,
    in_execution_order,
    largest_first,
    pack_items,
    row_work,
)
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import round_up
from nemo_like.models.vision import planner_sizes, unshared_images

_PIECE_SHARES = (1.0, 0.75, None)
"""Largest pieces to try, as shares of the mean work of a bin; None: bins filled in order."""
_GOOD_ENOUGH = 1.01
"""Work of the slowest rank over its lower bound from which no tree is divided for balance."""
_NUM_BISECTIONS = 10
"""Bisection iterations for the work limit of bins that are filled in order."""


@dataclass(frozen=True, eq=False)
class _Units:
    """Rows or groups of rows in depth-first order: U units."""

    rows: Packing
    """Row ids of each unit."""
    alone_tokens: np.ndarray
    """int64 [U]: size of a unit in a microbatch of its own."""
    more_tokens: np.ndarray
    """int64 [U]: size that a unit adds to a microbatch with the unit before it."""
    alone_work: np.ndarray
    """float64 [U]: work in a microbatch of its own; zero for `balance="none"`."""
    more_work: np.ndarray
    """float64 [U]: work that it adds to a microbatch with the unit before it."""
    is_start: np.ndarray
    """bool [U]: it has nothing in common with the unit before it."""

    def pieces(self, max_tokens: int, max_work: float = np.inf) -> tuple[Packing, Items]:
        """Divide each tree into pieces within both limits, as long as possible: (units of each
        piece, pieces as items). A unit above a limit is a piece of its own.
        """
        starts = np.flatnonzero(self.is_start)
        ends = np.append(starts[1:], len(self.is_start))
        offsets = self._runs(max_tokens, max_work, ends[np.cumsum(self.is_start) - 1])
        first = offsets[:-1]
        tokens = np.diff(prefix_sums(self.more_tokens)[offsets])
        tokens += (self.alone_tokens - self.more_tokens)[first]
        work = np.diff(prefix_sums(self.more_work)[offsets])
        work += (self.alone_work - self.more_work)[first]
        num_rows = np.diff(self.rows.offsets[offsets])
        items = Items(None, num_rows, tokens, work, np.zeros(len(work)))
        return Packing(np.arange(len(self.is_start)), offsets), items

    def wrapped(self, num_bins: int, max_tokens: int) -> Packing | None:
        """Fill bins one after the other with all units in their order, up to one work limit, the
        smallest that needs at most `num_bins`; None if `max_tokens` needs more (McNaughton's rule,
        with a repeated prefix at each cut).
        """
        num_units = len(self.is_start)
        ends = np.full(num_units, num_units)
        total = float(self.more_work.sum())
        low, high = total / num_bins, total / num_bins + 2 * float(self.alone_work.max())
        offsets = None
        for _ in range(_NUM_BISECTIONS):
            limit = high if offsets is None else (low + high) / 2
            found = self._runs(max_tokens, limit, ends)
            if len(found) - 1 <= num_bins:
                offsets, high = found, limit
            elif offsets is None:
                return None
            else:
                low = limit
        return None if offsets is None else Packing(np.arange(num_units), offsets)

    def _runs(self, max_tokens: int, max_work: float, end_of: np.ndarray) -> np.ndarray:
        """Offsets of runs of units within both limits, int64 [runs + 1]. The run of unit i ends at
        `end_of[i]`, int64 [U], at the latest.
        """
        tokens_before = prefix_sums(self.more_tokens)
        work_before = prefix_sums(self.more_work)
        # The first unit of a run is complete.
        token_ends = max_tokens - self.alone_tokens + tokens_before[1:]
        work_ends = max_work - self.alone_work + work_before[1:]
        stops = np.minimum(
            np.searchsorted(tokens_before, token_ends, side="right"),
            np.searchsorted(work_before, work_ends, side="right"),
        )
        # A list, because the loop below reads single elements.
        stops = np.minimum(stops - 1, end_of)
        stop_of = np.maximum(stops, np.arange(len(stops)) + 1).tolist()
        bounds = [0]
        while bounds[-1] < len(stop_of):
            bounds.append(stop_of[bounds[-1]])
        return np.asarray(bounds)

    def tree_work(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Arguments of `bounds.shared_bound`, float64 [T] each of T trees."""
        starts = np.flatnonzero(self.is_start)
        union_work = np.where(self.is_start, self.alone_work, self.more_work)
        # What a cut before a unit repeats; the first one of a tree is not cut from another.
        repeated = np.where(self.is_start, np.inf, self.alone_work - self.more_work)
        prefix_work = np.minimum.reduceat(repeated, starts)
        return (
            np.add.reduceat(union_work, starts),
            np.where(np.isinf(prefix_work), 0.0, prefix_work),
            np.maximum.reduceat(self.alone_work, starts),
        )


def _units_of(
    rows: np.ndarray, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec
) -> _Units:
    """Return the units among `rows` int64 [n], which are not empty."""
    prefixes = fitted.prefixes
    assert prefixes is not None
    units = Packing(rows, np.arange(len(rows) + 1))
    members = group_rows(rows, groups)
    if members is not None:
        units, _ = prefixes.arrange(Packing(rows[members.perm], members.offsets))
    first = units.offsets[:-1]
    units = units.take(np.argsort(prefixes.position_of[units.perm[first]]))
    first = units.offsets[:-1]
    # Groups may be interleaved: then this is less than a row has in common with all units before.
    positions = prefixes.position_of[units.perm]
    lower = np.minimum(positions[:-1], positions[1:])
    upper = np.maximum(positions[:-1], positions[1:])
    shared = np.append(0, prefixes.common(lower, upper))
    is_start = shared[first] == 0
    alone_shared = shared.copy()
    alone_shared[first] = 0
    more_tokens, more_work = _row_costs(units.perm, shared, fitted, spec)
    # A row between two others divides the part that the later one stores, and both are rounded up.
    is_between = positions < np.maximum.accumulate(positions)
    more_tokens += np.where(is_between & (spec.row_multiple > 1), spec.row_multiple, 0)
    alone_tokens, alone_work = _row_costs(units.perm, alone_shared, fitted, spec)
    alone_tokens = np.add.reduceat(alone_tokens, first)
    # Nothing is added to a unit above the limit, nor is it added to another one.
    is_oversize = alone_tokens > spec.capacity
    is_start |= is_oversize
    is_start[1:] |= is_oversize[:-1]
    return _Units(
        rows=units,
        alone_tokens=alone_tokens,
        more_tokens=np.add.reduceat(more_tokens, first),
        alone_work=np.add.reduceat(alone_work, first),
        more_work=np.add.reduceat(more_work, first),
        is_start=is_start,
    )


def _row_costs(
    rows: np.ndarray, shared: np.ndarray, fitted: FittedRows, spec: PlanSpec
) -> tuple[np.ndarray, np.ndarray]:
    """Sizes int64 [n] and work float64 [n] of `rows` of which `shared` tokens are computed by
    other rows.
    """
    tokens = round_up(fitted.lengths[rows] - shared, spec.row_multiple)
    num_trained = None if fitted.num_trained is None else fitted.num_trained[rows]
    work = row_work(tokens, spec, num_trained, shared)
    if fitted.image_tokens is not None:
        counts = fitted.image_tokens[rows]
        images = unshared_images(counts, fitted.lengths[rows], shared)
        tokens = planner_sizes(tokens, images, spec.image_weight)
        if work is not None and fitted.image_work is not None:
            work = work + fitted.image_work[rows] * (images / np.maximum(counts, 1))
    return tokens, np.zeros(len(rows)) if work is None else work


def form_shared_step(
    rows: np.ndarray, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec
) -> Packing:
    """Assign `rows` (row ids int64 [n]) to the ranks of `spec`; see `form_step`."""
    if len(rows) == 0:
        return empty_bins(spec.bins_multiple)
    units = _units_of(rows, fitted, groups, spec)
    pieces, items = units.pieces(spec.capacity)
    if spec.balance == "none":
        items = replace(items, work=None)
    bins = pack_items(items, spec).expand(pieces).expand(units.rows)
    if spec.algorithm == PackingAlgorithm.BALANCED:
        bins = _divide_trees(bins, units, fitted, spec)
    return in_execution_order(bins, fitted, spec)


def _divide_trees(bins: Packing, units: _Units, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Return `bins`, of complete trees, or better ones with divided trees; all with row ids.

    A divided tree costs its prefix once more, but smaller pieces balance better. Several divisions
    are planned and compared by the work that remains after pieces of one tree that share a bin are
    merged. Few microbatches have precedence over little work.
    """
    bound = shared_bound(*units.tree_work(), spec.num_ranks)
    best = _ranked(bins, fitted, spec)
    for share in _PIECE_SHARES:
        if best[1] <= bound * _GOOD_ENOUGH:
            break
        num_bins = best[2].num_bins
        if share is None:
            divided = units.wrapped(num_bins, spec.capacity)
        else:
            limit = share * bound * spec.num_ranks / num_bins
            pieces, items = units.pieces(spec.capacity, limit)
            divided = pack_items(items, spec).expand(pieces)
        if divided is not None:
            found = _ranked(divided.expand(units.rows), fitted, spec)
            best = min(best, found, key=lambda each: each[:2])
    return best[2]


def _ranked(bins: Packing, fitted: FittedRows, spec: PlanSpec) -> tuple[int, float, Packing]:
    """Assign bins of row ids to ranks again if that is better: (number of bins, work of the slowest
    rank, bins).
    """
    assigned = assign_to_ranks(bins, _bin_work(bins, fitted, spec), spec)
    options = [assigned]
    if bins.num_bins == assigned.num_bins:
        options.append(bins)
    slowest = []
    for option in options:
        by_rank = _bin_work(option, fitted, spec).reshape(spec.num_ranks, -1)
        in_lockstep = by_rank.max(0).sum()
        slowest.append(float(in_lockstep if spec.sync == "microbatch" else by_rank.sum(1).max()))
    best = int(np.argmin(slowest))
    return options[best].num_bins, slowest[best], options[best]


def _bin_work(bins: Packing, fitted: FittedRows, spec: PlanSpec) -> np.ndarray:
    """Work of each bin of row ids without the common tokens of its rows, float64 [K]."""
    assert fitted.prefixes is not None
    bins, shared = fitted.prefixes.arrange(bins)
    _, work = _row_costs(bins.perm, shared, fitted, spec)
    return np.diff(prefix_sums(work)[bins.offsets])


def form_shared_rank(rows: np.ndarray, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Pack the rows of one rank, int64 [n], into few microbatches, largest first; `form_rank`."""
    if len(rows) == 0:
        return empty_bins(0)
    units = _units_of(rows, fitted, None, spec)
    pieces, items = units.pieces(spec.capacity)
    bins = bin_packer(spec).pack_csr(np.minimum(items.lengths, spec.capacity))
    return largest_first(bins.expand(pieces).expand(units.rows), fitted, 1, spec)


def shared_work_bound(counts: TokenCounts, spec: PlanSpec) -> float:
    """Lower bound on the work of the slowest rank of one step of rows with prefixes."""
    fitted = FittedRows.of(counts, spec)
    units = _units_of(np.arange(len(counts.lengths)), fitted, None, spec)
    return shared_bound(*units.tree_work(), spec.num_ranks)
