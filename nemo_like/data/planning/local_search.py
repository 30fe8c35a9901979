"""Construction and local search of assignments: rows to bins, and bins to ranks.

The number of bins is given here; `balance` decides it. Rows are sorted by decreasing work. An
assignment is the bin of each row, int64 [n]. Notation: n rows, K bins, R ranks, M microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.data.packing import packers
from nemo_like.data.planning import balance_kernels
from nemo_like.data.planning.bounds import microbatch_limits, rank_bound

_MIN_RELATIVE_IMPROVEMENT = 1e-6
"""Local search is repeated as long as a pass improves the objective by more than this share."""


@dataclass(frozen=True, eq=False)
class Items:
    """Units of assignment, each a row or a group of rows, sorted by decreasing work."""

    tokens: np.ndarray
    """int64 [n]"""
    work: np.ndarray
    """float64 [n]"""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class AssignmentSearch:
    """Initial assignments and local search for one number of bins and ranks."""

    items: Items
    capacity: int
    """Maximum tokens of a bin."""
    num_ranks: int
    num_bins: int
    """A multiple of `num_ranks`."""
    kernels: Any | None
    """Compiled loops of `balance_kernels`, or None to interpret them."""

    @property
    def num_microbatches(self) -> int:
        """Number of bins of each rank."""
        return self.num_bins // self.num_ranks

    def fill_by_step(self) -> np.ndarray | None:
        """Fill one microbatch after the other up to a common work limit; None if a row is left.

        Returns int64 [n].
        """
        parent = self._array(np.arange(len(self.items) + 1))
        return self._construct("fill_by_step", np.zeros(self.num_bins), self.num_ranks, parent)

    def fill_lpt(self, targets: np.ndarray) -> np.ndarray | None:
        """Assign each row to the bin furthest below its target with room for it; None if a row is
        left. `targets` is float64 [K].
        """
        # LPT chooses the bin with the least work; starting at -target it is the distance to it.
        return self._construct("fill_lpt", -targets)

    def target_work(self) -> np.ndarray:
        """Compute the target work of each bin, float64 [K], equal within a microbatch.

        Each microbatch in turn gets an equal share of the remaining work, or more if it must take a
        row that fits into no earlier microbatch. It then takes at most the work that can fit into
        it, and the following microbatches share the rest.
        """
        min_max_work, max_work_before = microbatch_limits(
            self.items.tokens, self.items.work, self.capacity, self.num_ranks, self.num_microbatches
        )
        targets = np.zeros(self.num_microbatches)
        # All quantities are per rank from here on.
        remaining = float(self.items.work.sum()) / self.num_ranks
        max_work = np.diff(max_work_before) / self.num_ranks
        for m in range(self.num_microbatches):
            share = remaining / (self.num_microbatches - m)
            targets[m] = max(share, min_max_work[m])
            taken = share
            if targets[m] > share:
                taken = min(targets[m], max_work[m])
            remaining = max(0.0, remaining - taken)
        return np.repeat(targets, self.num_ranks)

    def best_fit(self) -> np.ndarray | None:
        """Pack by tokens with best fit decreasing; None if that needs more than `num_bins` bins.

        Returns int64 [n].
        """
        packing = packers.best_fit_decreasing(self.items.tokens, self.capacity, len(self.items))
        return self._use_all_bins(packing)

    def bin_work(self, bin_of: np.ndarray) -> np.ndarray:
        """Work of each bin, float64 [K]."""
        return np.bincount(bin_of, self.items.work, minlength=self.num_bins)

    def lockstep_work(self, bin_of: np.ndarray) -> float:
        """Sum over microbatches of the max-loaded bin, with bins grouped by similar work.

        `bin_of` is int64 [n].
        """
        descending = np.sort(self.bin_work(bin_of))[::-1]
        # Every `num_ranks` bins form a microbatch, whose first bin is the max-loaded one.
        max_loaded = descending[:: self.num_ranks]
        return float(max_loaded.sum())

    def makespan(self, bin_of: np.ndarray, rank_of: np.ndarray) -> float:
        """Work of the max-loaded rank; `rank_of` int64 [K] is the rank of each bin."""
        rank_work = np.bincount(rank_of, self.bin_work(bin_of), minlength=self.num_ranks)
        return float(rank_work.max())

    def makespan_bound(self) -> float:
        """Lower bound on `makespan` over all assignments."""
        return rank_bound(
            self.items.tokens,
            self.items.work,
            self.capacity,
            self.num_ranks,
            self.num_microbatches,
            may_be_empty=len(self.items) < self.num_bins,
        )

    def assign_ranks(self, bin_work: np.ndarray) -> np.ndarray:
        """Assign bins to ranks; returns the rank of each bin, int64 [K].

        Bins of similar work form a microbatch. Within it the largest bin goes to the rank with the
        least work so far.
        """
        order = np.argsort(-bin_work, kind="stable").reshape(-1, self.num_ranks)
        rank_of = np.empty(self.num_bins, dtype=np.int64)
        rank_work = np.zeros(self.num_ranks)
        for bins in order:
            ranks = np.argsort(rank_work, kind="stable")
            rank_of[bins] = ranks
            rank_work[ranks] += bin_work[bins]
        return rank_of

    def swap_bins(
        self, bin_of: np.ndarray, rank_of: np.ndarray, max_steps: int
    ) -> tuple[np.ndarray, int]:
        """Reduce the makespan by swapping bins between ranks: (rank of each bin, steps used).

        Swapping bins never violates the token limit. Each bin is treated as an item of one token in
        a bin of capacity one, so that `balance_ranks` can only swap. `bin_of` is int64 [n],
        `rank_of` int64 [K].
        """
        bin_work = self.bin_work(bin_of)
        order = np.argsort(-bin_work, kind="stable")
        bins_as_items = Items(np.ones(len(order), dtype=np.int64), bin_work[order])
        search = AssignmentSearch(bins_as_items, 1, self.num_ranks, len(order), self.kernels)
        position_of, steps = search.balance_ranks(np.arange(len(order)), rank_of[order], max_steps)
        sorted_rank_of = rank_of[order]
        new_rank_of = np.empty_like(rank_of)
        new_rank_of[order] = sorted_rank_of[position_of]
        return new_rank_of, steps

    def balance_bins(self, bin_of: np.ndarray, max_steps: int) -> tuple[np.ndarray, int]:
        """Reduce the max-loaded bin of each microbatch by local search: (assignment, steps).

        `bin_of` is int64 [n].
        """
        return self._local_search(bin_of, np.arange(self.num_bins), max_steps)

    def balance_ranks(
        self, bin_of: np.ndarray, rank_of: np.ndarray, max_steps: int
    ) -> tuple[np.ndarray, int]:
        """Reduce the makespan by local search over rows; the rank of each bin is fixed.

        `bin_of` is int64 [n], `rank_of` int64 [K].
        """
        return self._local_search(bin_of, rank_of, max_steps)

    def _array(self, values: np.ndarray) -> Any:
        """Convert to a list for the interpreter, which indexes lists faster than arrays.

        `values` has any shape, [n] or [K].
        """
        if self.kernels is None:
            return values.tolist()
        return values

    def _construct(self, kernel: str, bin_work: np.ndarray, *arguments: Any) -> np.ndarray | None:
        """Run a construction kernel; None if it leaves a row unassigned.

        `bin_work` is float64 [K]; returns int64 [n].
        """
        tokens = self._array(self.items.tokens)
        work = self._array(self.items.work)
        bin_of = self._array(np.full(len(self.items), -1))
        bin_tokens = self._array(np.zeros(self.num_bins, dtype=np.int64))
        run = getattr(self.kernels or balance_kernels, kernel)
        if not run(
            tokens, work, self.capacity, bin_of, bin_tokens, self._array(bin_work), *arguments
        ):
            return None
        bin_of = np.asarray(bin_of, dtype=np.int64)
        sizes = np.bincount(bin_of, minlength=self.num_bins)
        used = sizes[sizes > 0]
        if len(used) == min(self.num_bins, len(self.items)):
            return bin_of
        # Some bins are empty although there are rows for them.
        by_bin = np.argsort(bin_of, kind="stable")
        packing = packers.Packing(by_bin, packers.prefix_sums(used))
        return self._use_all_bins(packing)

    def _use_all_bins(self, packing: packers.Packing) -> np.ndarray | None:
        """Spread a packing over all bins, as far as there are rows; None if it has too many.

        Returns int64 [n].
        """
        if packing.num_bins > self.num_bins:
            return None
        num_bins = min(self.num_bins, len(self.items))
        packing = packers.split_fullest(
            packing, self.items.tokens, self.capacity, num_bins, len(self.items)
        )
        sizes = np.diff(packing.offsets)
        bin_of = np.empty(len(self.items), dtype=np.int64)
        bin_of[packing.perm] = np.repeat(np.arange(packing.num_bins), sizes)
        return bin_of

    def _local_search(
        self, bin_of: np.ndarray, slot_of: np.ndarray, max_steps: int
    ) -> tuple[np.ndarray, int]:
        """Run local search until it converges or uses `max_steps`: (assignment, steps used).

        `slot_of` int64 [K] is the slot of each bin; see `balance_kernels.SearchState`.
        """
        num_slots = int(slot_of.max()) + 1
        state = self._search_state(bin_of, slot_of, num_slots)
        local_search = (self.kernels or balance_kernels).local_search
        steps = 0
        objective = np.inf
        while True:
            # Slots of similar work form a step. The grouping is renewed in every pass, because the
            # moves of the previous pass change the order.
            slot_work = np.asarray(state.slot_work)
            order = np.argsort(-slot_work, kind="stable")
            step_of = np.empty(num_slots, dtype=np.int64)
            step_of[order] = np.arange(num_slots) // self.num_ranks
            step_max_work = slot_work[order[:: self.num_ranks]]
            new_objective = step_max_work.sum()
            has_converged = new_objective >= objective * (1 - _MIN_RELATIVE_IMPROVEMENT)
            if has_converged or steps >= max_steps:
                return np.asarray(state.bin_of, dtype=np.int64), steps
            objective = new_objective
            state = state._replace(
                step_of=self._array(step_of), step_max_work=self._array(step_max_work)
            )
            steps += local_search(
                state, self._array(order), self.num_ranks, self.capacity, max_steps - steps
            )

    def _search_state(
        self, bin_of: np.ndarray, slot_of: np.ndarray, num_slots: int
    ) -> balance_kernels.SearchState:
        """Build the search state of an assignment; its steps are set by `_local_search`.

        `bin_of` is int64 [n], `slot_of` int64 [K].
        """
        num_rows = len(bin_of)
        row_slots = slot_of[bin_of]
        # Linked lists of the rows of each slot, in row order.
        by_slot = np.argsort(row_slots, kind="stable")
        is_same_slot = row_slots[by_slot[1:]] == row_slots[by_slot[:-1]]
        is_head = np.concatenate([[True], ~is_same_slot])
        earlier = by_slot[:-1][is_same_slot]
        later = by_slot[1:][is_same_slot]
        heads = by_slot[is_head]
        # -1 is the end of a list.
        first_row = np.full(num_slots, -1)
        next_row = np.full(num_rows, -1)
        prev_row = np.full(num_rows, -1)
        next_row[earlier] = later
        prev_row[later] = earlier
        first_row[row_slots[heads]] = heads

        bin_tokens = np.bincount(bin_of, self.items.tokens, minlength=self.num_bins)
        bin_tokens = bin_tokens.astype(np.int64)
        # Sorted by slot, then by tokens: the emptiest bin of a slot comes first.
        bins_by_slot = np.lexsort((bin_tokens, slot_of))
        slot_starts = np.searchsorted(slot_of[bins_by_slot], np.arange(num_slots))
        bin_num_rows = np.bincount(bin_of, minlength=self.num_bins)
        slot_work = np.bincount(row_slots, self.items.work, minlength=num_slots)
        return balance_kernels.SearchState(
            tokens=self._array(self.items.tokens),
            work=self._array(self.items.work),
            bin_of=self._array(bin_of.copy()),
            bin_tokens=self._array(bin_tokens),
            bin_num_rows=self._array(bin_num_rows),
            slot_of=self._array(slot_of),
            slot_work=self._array(slot_work),
            emptiest_bin=self._array(bins_by_slot[slot_starts]),
            bins_by_slot=self._array(bins_by_slot),
            slot_starts=self._array(np.append(slot_starts, self.num_bins)),
            first_row=self._array(first_row),
            next_row=self._array(next_row),
            prev_row=self._array(prev_row),
            step_of=None,
            step_max_work=None,
        )
