"""Assignments of rows to bins and bins to ranks, made and then improved. Decides nothing about how
many bins there are.

`Rows` come sorted by work, dearest first; an assignment is the bin of each, int64 [n].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.data.packing import packers
from nemo_like.data.planning import balance_kernels
from nemo_like.data.planning.bounds import microbatch_limits, rank_bound


@dataclass(frozen=True, eq=False)
class Rows:
    """What is assigned as a whole (a row, or a group of rows), sorted by work, dearest first."""

    tokens: np.ndarray  # int64 [n]
    work: np.ndarray  # float64 [n]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class Refiner:
    """Starts and refinement for one shape of schedule."""

    rows: Rows
    capacity: int
    """Most tokens of a bin."""
    num_ranks: int
    num_bins: int
    """A multiple of `num_ranks`."""
    kernels: Any | None
    """Compiled loops, or None to interpret them."""

    def complete(self) -> np.ndarray | None:
        """Microbatch after microbatch, each bin completed as exactly as rows allow; None where a
        row is left over.
        """
        free = self._array(np.arange(len(self.rows) + 1))
        return self._run("complete", np.zeros(self.num_bins), self.num_ranks, free)

    def fill(self, targets: np.ndarray) -> np.ndarray | None:
        """Each row to the bin that lacks most of its target [K] among those with room; None where a
        row fits in none.
        """
        return self._run("fill", -targets)

    def targets(self) -> np.ndarray:
        """Work to aim at for each bin, float64 [K], equal within a microbatch: level where nothing
        forces otherwise.

        In turn each microbatch gets an equal share of what is left, or more where a row that fits
        in none before it forces that; then it takes what work it can hold, and the ones after share
        the rest.
        """
        num_microbatches = self.num_bins // self.num_ranks
        tops, most_work = microbatch_limits(
            self.rows.tokens, self.rows.work, self.capacity, self.num_ranks, num_microbatches
        )
        targets, left = np.zeros(num_microbatches), float(self.rows.work.sum()) / self.num_ranks
        held = np.diff(most_work) / self.num_ranks
        for m in range(num_microbatches):
            share = left / (num_microbatches - m)
            targets[m] = max(share, tops[m])
            left = max(0.0, left - (min(targets[m], held[m]) if targets[m] > share else share))
        return np.repeat(targets, self.num_ranks)

    def best_fit(self) -> np.ndarray | None:
        """Best fit decreasing by tokens."""
        return self.spread(
            packers.best_fit_decreasing(self.rows.tokens, self.capacity, len(self.rows))
        )

    def spread(self, packing: packers.Packing | None) -> np.ndarray | None:
        """A packing of these rows over all bins, as far as there are rows; None without one or if
        it has too many.
        """
        if packing is None or packing.num_bins > self.num_bins:
            return None
        num_bins = min(self.num_bins, len(self.rows))
        packing = packers.spread(packing, self.rows.tokens, self.capacity, num_bins, len(self.rows))
        bin_of = np.empty(len(self.rows), dtype=np.int64)
        bin_of[packing.perm] = np.repeat(np.arange(packing.num_bins), np.diff(packing.offsets))
        return bin_of

    def bin_work(self, bin_of: np.ndarray) -> np.ndarray:
        return np.bincount(bin_of, self.rows.work, minlength=self.num_bins)

    def lockstep_work(self, bin_of: np.ndarray) -> float:
        """Sum over microbatches of their dearest bin, bins of like work together."""
        return float(np.sort(self.bin_work(bin_of))[::-1][:: self.num_ranks].sum())

    def max_rank_work(self, bin_of: np.ndarray, rank_of: np.ndarray) -> float:
        """Work of the dearest rank; `rank_of` [K]."""
        return float(np.bincount(rank_of, self.bin_work(bin_of), minlength=self.num_ranks).max())

    def rank_bound(self) -> float:
        """The least `max_rank_work` any assignment has."""
        rows, num_microbatches = self.rows, self.num_bins // self.num_ranks
        shape = (rows.tokens, rows.work, self.capacity, self.num_ranks, num_microbatches)
        return rank_bound(*shape, may_be_empty=len(rows) < self.num_bins)

    def deal(self, bin_work: np.ndarray) -> np.ndarray:
        """The rank of each bin, int64 [K]: bins of like work form a microbatch, its dearest goes to
        the rank with least.
        """
        order = np.argsort(-bin_work, kind="stable").reshape(-1, self.num_ranks)
        rank_of, rank_work = np.empty(self.num_bins, dtype=np.int64), np.zeros(self.num_ranks)
        for bins in order:
            ranks = np.argsort(rank_work, kind="stable")
            rank_of[bins] = ranks
            rank_work[ranks] += bin_work[bins]
        return rank_of

    def exchange_bins(
        self, bin_of: np.ndarray, rank_of: np.ndarray, max_steps: int
    ) -> tuple[np.ndarray, int]:
        """Lower the dearest rank by exchanging whole bins, which no cap forbids: (rank of each bin,
        steps taken).
        """
        bin_work = self.bin_work(bin_of)
        order = np.argsort(-bin_work, kind="stable")
        places = Refiner(
            Rows(np.ones(len(order), dtype=np.int64), bin_work[order]),
            1,
            self.num_ranks,
            len(order),
            self.kernels,
        )
        place_of, steps = places.level_ranks(np.arange(len(order)), rank_of[order], max_steps)
        dealt = np.empty_like(rank_of)
        dealt[order] = rank_of[order][place_of]
        return dealt, steps

    def level_bins(self, bin_of: np.ndarray, max_steps: int) -> tuple[np.ndarray, int]:
        """Lower the dearest bin of each microbatch by exchanges, as long as it helps: (assignment,
        steps taken).
        """
        return self._level(bin_of, np.arange(self.num_bins), max_steps)

    def level_ranks(
        self, bin_of: np.ndarray, rank_of: np.ndarray, max_steps: int
    ) -> tuple[np.ndarray, int]:
        """The same for the dearest rank, bins staying where they are."""
        return self._level(bin_of, rank_of, max_steps)

    def _array(self, values: np.ndarray) -> Any:
        return values.tolist() if self.kernels is None else values

    def _run(self, start: str, bin_work: np.ndarray, *more: Any) -> np.ndarray | None:
        tokens, work = self._array(self.rows.tokens), self._array(self.rows.work)
        bin_of = self._array(np.full(len(self.rows), -1))
        bin_tokens = self._array(np.zeros(self.num_bins, dtype=np.int64))
        loop = getattr(self.kernels or balance_kernels, start)
        if not loop(tokens, work, self.capacity, bin_of, bin_tokens, self._array(bin_work), *more):
            return None
        bin_of = np.asarray(bin_of, dtype=np.int64)
        sizes = np.bincount(bin_of, minlength=self.num_bins)
        used = sizes[sizes > 0]
        if len(used) == min(self.num_bins, len(self.rows)):
            return bin_of
        offsets = np.concatenate([[0], np.cumsum(used)])
        return self.spread(packers.Packing(np.argsort(bin_of, kind="stable"), offsets))

    def _level(
        self, bin_of: np.ndarray, unit_of: np.ndarray, max_steps: int
    ) -> tuple[np.ndarray, int]:
        num_units = int(unit_of.max()) + 1
        state = self._state(bin_of, unit_of, num_units)
        steps, before = 0, np.inf
        while True:
            unit_work = np.asarray(state.unit_work)
            order = np.argsort(-unit_work, kind="stable")
            line_of = np.empty(num_units, dtype=np.int64)
            line_of[order] = np.arange(num_units) // self.num_ranks
            tops = unit_work[order[:: self.num_ranks]]
            if tops.sum() >= before * (1 - 1e-6) or steps >= max_steps:
                return np.asarray(state.bin_of, dtype=np.int64), steps
            before = tops.sum()
            state = state._replace(line_of=self._array(line_of), tops=self._array(tops))
            level = (self.kernels or balance_kernels).level
            steps += level(
                state, self._array(order), self.num_ranks, self.capacity, max_steps - steps
            )

    def _state(
        self, bin_of: np.ndarray, unit_of: np.ndarray, num_units: int
    ) -> balance_kernels.State:
        units = unit_of[bin_of]
        by_unit = np.argsort(units, kind="stable")
        same = units[by_unit[1:]] == units[by_unit[:-1]]
        first, following, preceding = (
            np.full(num_units, -1),
            np.full(len(units), -1),
            np.full(len(units), -1),
        )
        following[by_unit[:-1][same]] = by_unit[1:][same]
        preceding[by_unit[1:][same]] = by_unit[:-1][same]
        starts = by_unit[np.concatenate([[True], ~same])]
        first[units[starts]] = starts
        bin_tokens = np.bincount(bin_of, self.rows.tokens, minlength=self.num_bins).astype(np.int64)
        bins_of = np.lexsort((bin_tokens, unit_of))  # by unit, the roomiest first
        starts_of_units = np.searchsorted(unit_of[bins_of], np.arange(num_units))
        arrays = (
            self.rows.tokens,
            self.rows.work,
            bin_of.copy(),
            bin_tokens,
            np.bincount(bin_of, minlength=self.num_bins),
            unit_of,
            np.bincount(units, self.rows.work, minlength=num_units),
            bins_of[starts_of_units],
            bins_of,
            np.append(starts_of_units, self.num_bins),
            first,
            following,
            preceding,
        )
        return balance_kernels.State(*map(self._array, arrays), line_of=None, tops=None)
