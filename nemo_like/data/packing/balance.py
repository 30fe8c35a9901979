"""The joint scheduler: assigns rows to microbatches and microbatches to data-parallel ranks.

Both are decided together, from lengths and work alone: a greedy construction (LPT and others) and
then local search. Invariants of every schedule:
* each row is in one bin;
* no bin has more than `max_tokens` tokens;
* every rank has the same number of bins, a multiple of `microbatch_multiple`, and the smallest
  number for which a construction succeeds;
* no bin is empty unless there are fewer rows than bins;
* the same arguments give the same schedule.

`bounds` has lower bounds with which a schedule can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.data.packing import balance_kernels, packers
from nemo_like.data.packing.bounds import l2_bound, microbatch_limits, rank_bound
from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.parallel_layout import Sync

_STEPS_PER_ROW = 1000
"""Local-search steps per row at effort 1. More gain little; a compiled step takes about 2 ns."""
_MAX_INTERPRETED_STEPS = 200_000
"""Limit on local-search steps without compiled code, where a step takes about 1 us."""
_RANK_TOLERANCE = 4e-3
"""Ranks with r rows each count as balanced when the makespan is within this share divided by r of
the lower bound: the fewer rows, the coarser the best balance.
"""
_MAX_EQUAL_ROWS = _MAX_INTERPRETED_STEPS // _STEPS_PER_ROW
"""Number of rows up to which the interpreted search has the same step limit as the compiled one and
so returns the same schedule. It takes at most about 0.03 s, and the compilation 20 s.
"""
_MIN_RELATIVE_IMPROVEMENT = 1e-6
"""Local search is repeated as long as a pass improves the objective by more than this share."""


Assignment = tuple[np.ndarray, np.ndarray]
"""(bin of each item, int64 [n]; rank of each bin, int64 [K])"""


def compile_kernels() -> None:
    """Compile the loops for plans of any size, or load them from numba's cache on disk."""
    lengths = np.arange(20) + 1
    for sync in ("microbatch", "step"):
        schedule(lengths, 40, 2, work=lengths.astype(np.float64), sync=sync, compiled=True)


def needs_kernels(num_rows: int) -> bool:
    """Return True if a step of `num_rows` rows is planned by compiled loops."""
    return num_rows > _MAX_EQUAL_ROWS


def schedule(
    lengths: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    *,
    work: np.ndarray,
    sync: Sync = "microbatch",
    microbatch_multiple: int = 1,
    min_microbatches: int = 1,
    compiled: bool | None = None,
) -> Packing:
    """Assign rows to bins and bins to ranks under a token limit.

    Bin `r * M + m` of the result is microbatch m of rank r. M is the smallest multiple of
    `microbatch_multiple`, at least `min_microbatches`, for which a construction succeeds. The bins
    of a rank are sorted by decreasing work. With `sync="microbatch"` the objective is the sum over
    microbatches of the max-loaded rank, with `sync="step"` the total of the max-loaded rank.

    `lengths` int64 [n] are tokens, each from 1 to `max_tokens`; raises ValueError otherwise. `work`
    float64 [n] is the time of each row, at least 0.

    `compiled` selects whether the loops are compiled; by default that depends on the number of
    rows alone.

    Example: rows of 6, 4, 4, 4, 2 tokens with equal work per token, 10 tokens and two ranks are the
    bins [0, 3] and [1, 2, 4], one per rank.
    """
    if len(lengths) == 0:
        return Packing(np.empty(0, np.int64), np.zeros(1, np.int64))
    order = np.argsort(-work, kind="stable")
    items = SearchItems(lengths[order], work[order])
    kernels = _kernels(len(items), compiled=compiled)
    num_needed = ceil_div(l2_bound(items.tokens, max_tokens), num_ranks)
    num_microbatches = round_up(max(min_microbatches, num_needed), microbatch_multiple)
    # The lower bound is usually attained. With one row per bin the construction always succeeds, so
    # the loop ends.
    while True:
        num_bins = num_microbatches * num_ranks
        search = AssignmentSearch(items, max_tokens, num_ranks, num_bins, kernels)
        found = _minimize(search, sync)
        if found is not None:
            break
        num_microbatches += microbatch_multiple
    bin_of, rank_of = found
    positions = _rank_major_positions(search.bin_work(bin_of), rank_of)[bin_of]
    sizes = np.bincount(positions, minlength=num_bins)
    # Within a bin by decreasing work.
    return Packing(order[np.argsort(positions, kind="stable")], prefix_sums(sizes))


def _minimize(search: AssignmentSearch, sync: Sync) -> Assignment | None:
    """Return the best assignment found for the objective of `sync`; None if none fits."""
    # The limit is in steps, not in seconds, so that the result is deterministic.
    max_steps = _STEPS_PER_ROW * len(search.items)
    if search.kernels is None:
        max_steps = min(max_steps, _MAX_INTERPRETED_STEPS)
    minimize = _minimize_lockstep if sync == "microbatch" else _minimize_makespan
    return minimize(search, max_steps)


def assign_bins(
    bin_work: Sequence[float] | np.ndarray,
    num_ranks: int,
    *,
    sync: Sync = "microbatch",
    microbatch_multiple: int = 1,
) -> np.ndarray:
    """Assign given bins to ranks without changing them: bin ids int64 [R, M], -1 for no bin.

    M is the smallest multiple of `microbatch_multiple` with room for every bin of `bin_work` [K].
    The bins of a rank are sorted by decreasing work, so microbatches have bins of similar work,
    which minimizes the sum of their maxima. With `sync="step"` bins are then swapped between ranks.

    Example: work [5, 1, 4, 2] over 2 ranks is `[[0, 1], [2, 3]]`: lockstep 5 + 2, ranks 6 and 6.
    """
    work = np.asarray(bin_work, dtype=np.float64)
    bins_multiple = num_ranks * microbatch_multiple
    num_microbatches = ceil_div(len(work), bins_multiple) * microbatch_multiple
    order = np.argsort(-work, kind="stable")
    # Local search expects items by decreasing work; `order` maps them back to bin ids.
    # Each bin becomes an item of one token in a bin of capacity one, so local search can only swap.
    items = SearchItems(np.ones(len(work), dtype=np.int64), work[order])
    search = AssignmentSearch(
        items,
        capacity=1,
        num_ranks=num_ranks,
        num_bins=num_microbatches * num_ranks,
        kernels=_kernels(len(work)),
    )
    position_of = np.arange(len(work))
    rank_of = search.assign_ranks(search.bin_work(position_of))
    if sync == "step" and len(work):
        max_steps = min(_STEPS_PER_ROW * len(work), _MAX_INTERPRETED_STEPS)
        position_of, _ = search.balance_ranks(position_of, rank_of, max_steps)
    ids = np.full(search.num_bins, -1)
    positions = _rank_major_positions(search.bin_work(position_of), rank_of)
    ids[positions[position_of]] = order
    return ids.reshape(num_ranks, num_microbatches)


def _minimize_lockstep(search: AssignmentSearch, max_steps: int) -> Assignment | None:
    """Minimize the sum over microbatches of the max-loaded bin; None if no construction succeeds.

    Each construction is searched with a share of the steps, and the best one with the rest. Best
    fit decreasing ignores work, so it is only the fallback.
    """
    constructed = [search.fill_by_step(), search.fill_lpt(search.target_work())]
    starts = [start for start in constructed if start is not None]
    if not starts:
        fallback = search.best_fit()
        if fallback is None:
            return None
        starts = [fallback]
    candidates = []
    remaining = max_steps
    max_start_steps = max_steps // (2 * len(starts))
    for start in starts:
        bin_of, steps = search.balance_bins(start, max_start_steps)
        remaining -= steps
        candidates.append(bin_of)
    # `min` returns the first of equal candidates, so the result is deterministic.
    best = min(candidates, key=search.lockstep_work)
    bin_of, _ = search.balance_bins(best, remaining)
    return bin_of, search.assign_ranks(search.bin_work(bin_of))


def _minimize_makespan(search: AssignmentSearch, max_steps: int) -> Assignment | None:
    """Minimize the total work of the max-loaded rank; None if no construction succeeds.

    The constructions are tried one after the other, first as they are, then with their bins
    balanced first, until the makespan is close to its lower bound or the steps are used up.
    """
    constructions = (
        lambda: search.fill_lpt(np.zeros(search.num_bins)),
        search.fill_by_step,
        search.best_fit,
    )
    tolerance = _RANK_TOLERANCE * search.num_ranks / len(search.items)
    good_enough = search.makespan_bound() * (1 + tolerance)
    best: Assignment | None = None
    best_makespan = np.inf
    remaining = max_steps
    attempts = [
        (max_bin_steps, construct)
        for max_bin_steps in (0, max_steps // 3)
        for construct in constructions
    ]
    for max_bin_steps, construct in attempts:
        bin_of = construct()
        if bin_of is None:
            continue
        bin_of, steps = search.balance_bins(bin_of, min(max_bin_steps, remaining))
        remaining -= steps
        rank_of = search.assign_ranks(search.bin_work(bin_of))
        # Exchanging complete bins is cheap and always possible; moving rows then refines it.
        max_swaps = min(max_steps // 6, remaining)
        rank_of, steps = search.swap_bins(bin_of, rank_of, max_swaps)
        remaining -= steps
        max_moves = max(0, min(max_steps // 6, remaining))
        bin_of, steps = search.balance_ranks(bin_of, rank_of, max_moves)
        remaining -= steps
        makespan = search.makespan(bin_of, rank_of)
        if makespan < best_makespan:
            best = (bin_of, rank_of)
            best_makespan = makespan
        if best_makespan <= good_enough or remaining <= 0:
            break
    if best is None:
        return None
    bin_of, rank_of = best
    bin_of, _ = search.balance_ranks(bin_of, rank_of, max(remaining, max_steps // 6))
    return bin_of, rank_of


def _rank_major_positions(bin_work: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    """Position of each bin, int64 [K], when sorted by rank and then by decreasing work."""
    positions = np.empty(len(bin_work), dtype=np.int64)
    positions[np.lexsort((-bin_work, rank_of))] = np.arange(len(bin_work))
    return positions


def _kernels(num_rows: int, *, compiled: bool | None = None) -> Any | None:
    """Return the compiled kernels, or None to interpret."""
    compiled = needs_kernels(num_rows) if compiled is None else compiled
    return balance_kernels.compiled() if compiled else None


@dataclass(frozen=True, eq=False)
class SearchItems:
    """Units of assignment, each a row or a group of rows, sorted by decreasing work."""

    tokens: np.ndarray
    """int64 [n]"""
    work: np.ndarray
    """float64 [n]"""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, eq=False)
class AssignmentSearch:
    """Initial assignments and local search for one number of bins and ranks.

    An assignment is the bin of each row, int64 [n]; rows are sorted by decreasing work. Notation: n
    rows, K bins, R ranks, M microbatches.
    """

    items: SearchItems
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
        bins_as_items = SearchItems(np.ones(len(order), dtype=np.int64), bin_work[order])
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


if __name__ == "__main__":
    compile_kernels()
