"""The plan: which rows form which microbatch on which data-parallel rank. Computed from lengths
alone, on one machine or on every rank alike; it holds no row, only numbers, and everything
downstream follows from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from nemo_like.data.packing.metrics import bin_stats
from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.oversize import (
    FittedRows,
    checked_groups,
    checked_lengths,
    fit_rows,
    round_up_all,
)
from nemo_like.data.planning.plan_step import Placement, joined, longest_of, place_rank, place_step
from nemo_like.data.planning.spec import Microbatch, PlanSpec

__all__ = ["BatchPlan", "Microbatch", "PlanSpec", "RankPlan", "plan_batch"]


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a plan, with row indices into the rank's own shard."""

    microbatches: tuple[Microbatch, ...]
    step_offsets: tuple[int, ...]
    """Bounds of each optimizer step in `microbatches`, equal on all ranks."""
    spec: PlanSpec

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    def step(self, step: int) -> tuple[Microbatch, ...]:
        """The microbatches of optimizer step `step`."""
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of {self.num_steps}")
        return self.microbatches[self.step_offsets[step] : self.step_offsets[step + 1]]


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Which rows form which microbatch on which rank, for a batch of `num_rows` rows. A value:
    equal by content.

    1. Every row is exactly once in the microbatches, in `deferred` or in `dropped`; dropped only by
       `oversize="drop"`, and counted. 2. No microbatch has more than `spec.max_tokens` positions
       (or `spec.max_rows` rows), except a row alone, or a group that must stay together, that
       exceeds it: an error, a truncation, a warned singleton or a drop, as `spec.oversize` says. 3.
       Every rank runs the same number of microbatches in a step, a multiple of
       `spec.microbatch_multiple`; where rows run out, dummies without rows. 4. The same lengths,
       groups and spec (its seed is part of it) give the same plan. 5. No row crosses a global
       batch: step s holds rows s * global_batch_size up to the next; rows of a group share a
       microbatch. 6. Padded lengths are multiples of `spec.row_multiple` (2 * cp and the rounding
       asked), positions of a microbatch of `spec.total_multiple` (2 * cp, cp * tp under sequence
       parallelism).

    Example: lengths [5, 3, 4, 4] packed under 8 tokens on 2 ranks: each rank runs one microbatch of
    8 tokens, one of rows 0 and 1, the other of rows 2 and 3, and `step_offsets` is (0, 1).
    """

    spec: PlanSpec
    num_rows: int
    step_offsets: tuple[int, ...]
    """Bounds of each optimizer step in a rank's microbatches, equal on all ranks."""
    rows: np.ndarray
    """int64 [n]: row ids in the order they are visited, rank after rank."""
    lengths: np.ndarray
    """int64 [n]: real tokens kept of each of `rows`."""
    padded_lengths: np.ndarray
    """int64 [n]: positions of each of `rows`."""
    offsets: np.ndarray
    """int64 [R*M+1]: microbatch m of rank r is `rows[offsets[r*M + m] : offsets[r*M + m + 1]]`."""
    deferred: tuple[int, ...] = ()
    """Rows left for a later plan."""
    dropped: tuple[int, ...] = ()
    """Rows above the cap that were left out."""
    num_truncated: int = 0
    num_oversize: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.step_offsets) - 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each rank over the whole plan, dummies included."""
        return self.step_offsets[-1]

    @cached_property
    def ranks(self) -> tuple[tuple[Microbatch, ...], ...]:
        """The microbatches of each rank, with row ids of the batch."""
        return tuple(self._microbatches(rank, self.rows) for rank in range(self.spec.num_ranks))

    @cached_property
    def num_tokens(self) -> np.ndarray:
        """Positions of each microbatch, int64 [R, M]; a dummy has the smallest legal ones."""
        tokens = round_up_all(
            self._bins.loads(self._by_row(self.padded_lengths)), self.spec.total_multiple
        )
        tokens[np.diff(self.offsets) == 0] = self.spec.dummy_tokens
        return tokens.reshape(self.spec.num_ranks, -1)

    def rows_of_rank(self, dp_rank: int) -> np.ndarray:
        """Row ids of a rank in the order they are visited, int64 [n_r]: the row order of the rank's
        shard.
        """
        start, stop = self._bounds(dp_rank)
        return self.rows[start:stop]

    def rank_plan(self, dp_rank: int, shard_rows: np.ndarray | None = None) -> RankPlan:
        """A rank's microbatches with indices into its shard, whose rows are `shard_rows` (default
        `rows_of_rank`, and then the indices of a microbatch are a range). Give another plan's
        `rows_of_rank` where both share one shard.
        """
        start, stop = self._bounds(dp_rank)
        local = np.zeros(self.num_rows, dtype=np.int64)
        local[self.rows[start:stop] if shard_rows is None else shard_rows] = np.arange(stop - start)
        return RankPlan(self._microbatches(dp_rank, local[self.rows]), self.step_offsets, self.spec)

    def with_budget(
        self, max_tokens: int | None = None, *, max_rows: int | None = None
    ) -> BatchPlan:
        """The same rows on the same ranks and steps in microbatches under other caps, as scoring
        may use.

        Each rank packs its own rows into as few microbatches as it can, largest first, with dummies
        where another needs more; groups need not stay together. Rows above the new cap run alone.
        Give `max_rows` (and no `max_tokens`) where rows are taken at a time. Raises ValueError for
        a cap below the longest row under `oversize="error"`.
        """
        spec = self.spec.with_budget(max_tokens, max_rows)
        if spec == self.spec:
            return self
        kept, padded = np.zeros((2, self.num_rows), dtype=np.int64)
        kept[self.rows] = self.lengths
        padded[self.rows] = round_up_all(self.lengths, spec.row_multiple)
        if (
            spec.capacity is not None
            and spec.oversize == "error"
            and padded.max(initial=0) > spec.capacity
        ):
            row = int(padded.argmax())
            raise ValueError(
                f"row {row} has {kept[row]} tokens ({padded[row]} padded), above"
                f" {spec.logprob_budget_key} = {max_tokens}; raise it"
            )
        grid = self.offsets[
            np.add.outer(np.arange(spec.num_ranks) * self.num_microbatches, self.step_offsets)
        ]
        placements = [
            joined(
                [
                    place_rank(self.rows[grid[rank, step] : grid[rank, step + 1]], padded, spec)
                    for rank in range(len(grid))
                ],
                spec.microbatch_multiple,
            )
            for step in range(self.num_steps)
        ]
        fitted = FittedRows(
            kept, padded, np.zeros(self.num_rows, dtype=bool), self.num_truncated, self.num_oversize
        )
        return _assembled(spec, fitted, placements, self.dropped)

    def metrics(self) -> dict[str, float]:
        """The plan in numbers, by the names they are logged under.

        Loads of bins are real tokens, so alignment padding counts as waste; dummies are no bins.
        Without `max_tokens` the largest microbatch is the capacity. An imbalance is the busiest
        rank over the mean, weighted over steps by work.
        """
        sizes = np.diff(self.offsets)
        tokens = self.num_tokens
        filled = tokens.ravel()[sizes > 0]
        capacity = self.spec.max_tokens or int(filled.max(initial=1))
        loads = self._bins.loads(self._by_row(self.lengths))
        per_step = (
            np.add.reduceat(loads.reshape(tokens.shape).sum(0), self.step_offsets[:-1])
            if self.num_steps
            else loads[:0]
        )
        stats = bin_stats(loads[sizes > 0], capacity, int((-(-per_step // capacity)).sum()))
        return {
            "packing/utilization": stats["average_utilization"],
            "packing/waste_ratio": stats["waste_ratio"],
            "packing/bin_balance": stats["bin_balance"],
            "packing/efficiency": stats["bin_efficiency"],
            "packing/padding_share": float(tokens.sum() - self.lengths.sum())
            / max(float(tokens.sum()), 1.0),
            "packing/rank_imbalance_tokens": self._imbalance(
                self.padded_lengths.astype(np.float64)
            ),
            "packing/rank_imbalance_flops": self._imbalance(self.spec.cost.of(self.padded_lengths)),
            "packing/num_microbatches": self.num_microbatches / max(self.num_steps, 1),
            "packing/num_dummies": float(np.count_nonzero(sizes == 0)),
            "packing/num_truncated": float(self.num_truncated),
            "packing/num_dropped": float(len(self.dropped)),
            "packing/num_oversize": float(self.num_oversize),
        }

    def to_json(self) -> str:
        """One JSON object of plain numbers; `from_json` gives an equal plan."""
        values = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in self._values()
        }
        return json.dumps({**values, "spec": self.spec.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> BatchPlan:
        """The plan that `to_json` wrote."""
        values = json.loads(text)
        arrays = {
            name: np.asarray(values[name], dtype=np.int64)
            for name in ("rows", "lengths", "padded_lengths", "offsets")
        }
        tuples = {name: tuple(values[name]) for name in ("step_offsets", "deferred", "dropped")}
        return cls(**{**values, **arrays, **tuples, "spec": PlanSpec.from_dict(values["spec"])})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BatchPlan):
            return NotImplemented
        return all(
            np.array_equal(a, b)
            for (_, a), (_, b) in zip(self._values(), other._values(), strict=True)
        )

    def __hash__(self) -> int:
        return hash(
            (
                self.spec,
                self.num_rows,
                self.step_offsets,
                self.rows.tobytes(),
                self.offsets.tobytes(),
            )
        )

    def __str__(self) -> str:
        return "\n".join([self._headline(), *self._table()])

    def _headline(self) -> str:
        caps = [
            f"{cap} {unit}"
            for cap, unit in ((self.spec.max_tokens, "tokens"), (self.spec.max_rows, "rows"))
            if cap
        ]
        metrics = self.metrics()
        return (
            f"{self.num_rows} rows on {self.spec.num_ranks} ranks, {self.num_steps} steps,"
            f" {self.num_microbatches} microbatches "
            f"each ({self.spec.layout}, at most {' and '.join(caps)}); "
            f"{metrics['packing/padding_share']:.1%} padding, busiest rank"
            f" {metrics['packing/rank_imbalance_flops']:.3f}x "
            f"the mean in work, {metrics['packing/num_dummies']:.0f} dummies, {len(self.dropped)}"
            f" dropped"
        )

    def _table(self, most_lines: int = 16, most_columns: int = 8) -> list[str]:
        """A line per step and rank: positions (rows) of each microbatch."""
        sizes = np.diff(self.offsets).reshape(self.num_tokens.shape)
        lines = []
        for step, (start, stop) in enumerate(pairwise(self.step_offsets)):
            for rank in range(self.spec.num_ranks):
                if len(lines) == most_lines:
                    return [*lines, "..."]
                shown = range(start, min(stop, start + most_columns))
                cells = " ".join(f"{self.num_tokens[rank, m]:>7} ({sizes[rank, m]})" for m in shown)
                lines.append(
                    f"step {step} rank {rank}:"
                    f" {cells}{' ...' if stop - start > most_columns else ''}"
                )
        return lines

    def _imbalance(self, work: np.ndarray) -> float:
        """Sum over steps of the busiest rank's work over that of the mean rank, for work [n] of
        each of `rows`.
        """
        if not len(work):
            return 1.0
        by_rank = self._bins.loads(self._by_row(work)).reshape(self.spec.num_ranks, -1)
        by_step = np.add.reduceat(by_rank, self.step_offsets[:-1], axis=1)
        return float(by_step.max(0).sum() / (by_step.sum() / self.spec.num_ranks))

    @cached_property
    def _bins(self) -> Packing:
        return Packing(self.rows, self.offsets)

    def _by_row(self, values: np.ndarray) -> np.ndarray:
        """Values [n] given in the order of `rows`, as an array over row ids [num_rows]."""
        by_row = np.zeros(self.num_rows, dtype=values.dtype)
        by_row[self.rows] = values
        return by_row

    def _bounds(self, dp_rank: int) -> tuple[int, int]:
        if not 0 <= dp_rank < self.spec.num_ranks:
            raise IndexError(f"dp_rank {dp_rank} of {self.spec.num_ranks}")
        bounds = (
            self.offsets[:: self.num_microbatches]
            if self.num_microbatches
            else np.zeros(self.spec.num_ranks + 1, np.int64)
        )
        return int(bounds[dp_rank]), int(bounds[dp_rank + 1])

    def _microbatches(self, dp_rank: int, rows: np.ndarray) -> tuple[Microbatch, ...]:
        """A rank's microbatches; `rows` [n] are the indices to write for each of `self.rows`."""
        start, stop = self._bounds(dp_rank)
        first = dp_rank * self.num_microbatches
        offsets = (self.offsets[first : first + self.num_microbatches + 1] - start).tolist()
        columns = [
            tuple(column[start:stop].tolist())
            for column in (rows, self.lengths, self.padded_lengths)
        ]
        tokens = self.num_tokens[dp_rank].tolist()
        return tuple(
            Microbatch(*(column[a:b] for column in columns), num_tokens=tokens[m])
            for m, (a, b) in enumerate(pairwise(offsets))
        )

    def _values(self) -> list[tuple[str, Any]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


def plan_batch(
    lengths: Sequence[int] | np.ndarray,
    spec: PlanSpec,
    groups: Sequence[int] | np.ndarray | None = None,
) -> BatchPlan:
    """Plan a batch of rows of the given `lengths` [B]; rows of equal id in `groups` [B] stay in one
    microbatch.

    Raises ValueError for a row above the cap under `oversize="error"` and for a group that cannot
    stay together.
    """
    row_lengths = checked_lengths(lengths)
    num_rows = len(row_lengths)
    row_groups = checked_groups(groups, num_rows, spec)
    fitted = fit_rows(row_lengths, row_groups, spec)
    rows_per_step = spec.global_batch_size or max(num_rows, 1)
    placements = []
    for start in range(0, num_rows, rows_per_step):
        rows = np.arange(start, min(start + rows_per_step, num_rows))
        placements.append(place_step(rows[~fitted.is_dropped[rows]], fitted, row_groups, spec))
    return _assembled(spec, fitted, placements, tuple(np.flatnonzero(fitted.is_dropped).tolist()))


def _assembled(
    spec: PlanSpec, fitted: FittedRows, placements: list[Placement], dropped: tuple[int, ...]
) -> BatchPlan:
    """The steps strung together, rank after rank."""
    step_offsets = np.concatenate(
        [[0], np.cumsum([p.num_microbatches for p in placements], dtype=np.int64)]
    )
    bins = _rank_major(placements, spec.num_ranks)
    padded = fitted.padded_lengths[bins.perm]
    if spec.layout == "padded":
        padded = np.repeat(longest_of(bins, fitted.padded_lengths), np.diff(bins.offsets))
    return BatchPlan(
        spec=spec,
        num_rows=len(fitted.lengths),
        step_offsets=tuple(step_offsets.tolist()),
        rows=bins.perm,
        lengths=fitted.lengths[bins.perm],
        padded_lengths=padded,
        offsets=bins.offsets,
        dropped=dropped,
        num_truncated=fitted.num_truncated,
        num_oversize=fitted.num_oversize,
    )


def _rank_major(placements: list[Placement], num_ranks: int) -> Packing:
    """All bins, those of rank 0 over all steps first."""
    if not placements:
        return Packing(np.empty(0, dtype=np.int64), np.zeros(1, dtype=np.int64))
    if len(placements) == 1:
        return placements[0].bins
    perm = np.concatenate([placement.bins.perm for placement in placements])
    sizes = np.concatenate([np.diff(placement.bins.offsets) for placement in placements])
    first = np.cumsum([0] + [placement.bins.num_bins for placement in placements[:-1]])
    grids = [
        (np.arange(placement.bins.num_bins) + start).reshape(num_ranks, placement.num_microbatches)
        for placement, start in zip(placements, first, strict=True)
    ]
    return Packing(perm, np.concatenate([[0], np.cumsum(sizes)])).take(
        np.concatenate(grids, axis=1).ravel()
    )
