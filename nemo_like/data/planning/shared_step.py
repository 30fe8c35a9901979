"""Planning of one optimizer step whose rows have common leading tokens.

The units, rows or groups of rows that must stay together, are sorted depth-first. A piece is a run
of consecutive units of one tree; its tokens and its work are those of its union. Pieces are planned
like rows. Bins that got several pieces of a tree need less than their sum, never more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.oversize import FittedRows, group_rows
from nemo_like.data.planning.plan_step import (
    Items,
    bin_packer,
    empty_bins,
    in_execution_order,
    largest_first,
    plan_packed,
    row_work,
)
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.integer_math import round_up


@dataclass(frozen=True, eq=False)
class _Units:
    """Rows or groups of rows in depth-first order: U units."""

    rows: Packing
    """Row ids of each unit."""
    alone_tokens: np.ndarray
    """int64 [U]: positions of a unit in a microbatch of its own."""
    more_tokens: np.ndarray
    """int64 [U]: positions that a unit adds to a microbatch with the unit before it."""
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
        num_units = len(self.is_start)
        starts = np.flatnonzero(self.is_start)
        end_of = np.append(starts[1:], num_units)[np.cumsum(self.is_start) - 1]
        tokens_before = prefix_sums(self.more_tokens)
        work_before = prefix_sums(self.more_work)
        # The first unit of a piece is complete.
        token_ends = max_tokens - self.alone_tokens + tokens_before[1:]
        work_ends = max_work - self.alone_work + work_before[1:]
        stops = np.minimum(
            np.searchsorted(tokens_before, token_ends, side="right"),
            np.searchsorted(work_before, work_ends, side="right"),
        )
        stops = np.maximum(np.minimum(stops - 1, end_of), np.arange(num_units) + 1).tolist()
        bounds = [0]
        while bounds[-1] < num_units:
            bounds.append(stops[bounds[-1]])
        offsets = np.asarray(bounds)
        first = offsets[:-1]
        tokens = np.diff(tokens_before[offsets]) + (self.alone_tokens - self.more_tokens)[first]
        work = np.diff(work_before[offsets]) + (self.alone_work - self.more_work)[first]
        num_rows = np.diff(self.rows.offsets[offsets])
        items = Items(None, num_rows, tokens, work, np.zeros(len(work)))
        return Packing(np.arange(num_units), offsets), items


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
    is_oversize = alone_tokens > (spec.capacity or 0)
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
    """Positions int64 [n] and work float64 [n] of `rows` of which `shared` tokens are computed by
    other rows.
    """
    tokens = round_up(fitted.lengths[rows] - shared, spec.row_multiple)
    num_trained = None if fitted.num_trained is None else fitted.num_trained[rows]
    work = row_work(tokens, spec, num_trained, shared)
    return tokens, np.zeros(len(rows)) if work is None else work


def plan_shared_step(
    rows: np.ndarray, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec
) -> Packing:
    """Assign `rows` (row ids int64 [n]) to the ranks of `spec`; see `plan_step`."""
    if len(rows) == 0:
        return empty_bins(spec.bins_multiple)
    units = _units_of(rows, fitted, groups, spec)
    pieces, items = units.pieces(spec.capacity or 0)
    if spec.balance == "none":
        items = replace(items, work=None)
    bins = plan_packed(items, spec).expand(pieces).expand(units.rows)
    return in_execution_order(bins, fitted, spec)


def plan_shared_rank(rows: np.ndarray, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Pack the rows of one rank, int64 [n], into few microbatches, largest first; `plan_rank`."""
    if len(rows) == 0:
        return empty_bins(0)
    units = _units_of(rows, fitted, None, spec)
    pieces, items = units.pieces(spec.capacity or 0)
    bins = bin_packer(spec).pack_csr(np.minimum(items.lengths, spec.capacity or 0))
    return largest_first(bins.expand(pieces).expand(units.rows), fitted, 1, spec)
