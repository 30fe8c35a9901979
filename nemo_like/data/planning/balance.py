"""The joint scheduler: assigns rows to microbatches and microbatches to data-parallel ranks.

Both are decided together, from lengths and work alone: a greedy construction (LPT and others) and
then local search. Invariants of every schedule:
* each row is in one bin, and all rows of a group are in the same bin;
* no bin has more than `max_tokens` tokens;
* every rank has the same number of bins, a multiple of `microbatch_multiple`, and the smallest
  number for which a construction succeeds;
* no bin is empty unless there are fewer rows (or groups) than bins;
* the same arguments give the same schedule.

`bounds` has the lower bounds that `Schedule.stats` compares with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nemo_like.data.packing.packers import Packing, checked_lengths, prefix_sums
from nemo_like.data.planning import balance_kernels
from nemo_like.data.planning.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.local_search import AssignmentSearch, Items
from nemo_like.data.planning.schedule_inputs import (
    check_settings,
    check_token_limit,
    checked_work,
    inverse_permutation,
    sorted_items,
)
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
_MIN_COMPILED_ROWS = 128
"""Number of rows from which the compiled loops are worth the import of numba."""
_MAX_EQUAL_ROWS = _MAX_INTERPRETED_STEPS // _STEPS_PER_ROW
"""Number of rows up to which the interpreted search has the same step limit as the compiled one and
so returns the same schedule.
"""
_avoid_numba: ContextVar[bool] = ContextVar("avoid_numba", default=False)

Assignment = tuple[np.ndarray, np.ndarray]
"""(bin of each item, int64 [n]; rank of each bin, int64 [K])"""


@dataclass(frozen=True, eq=False)
class Schedule:
    """Rows in bins as two arrays, rank-major.

    Bin m of rank r has the rows `perm[offsets[r * M + m] : offsets[r * M + m + 1]]`. The bins of a
    rank are sorted by decreasing work.

    Example: two ranks of two microbatches, `perm=[0, 3, 1, 2]` and `offsets=[0, 1, 2, 4, 4]`: rank
    0 runs rows [0] and [3], rank 1 runs rows [1, 2] and, as no rows are left, an empty bin.
    """

    perm: np.ndarray
    """int64 [n], each row once."""
    offsets: np.ndarray
    """int64 [R * M + 1]."""
    num_ranks: int
    num_microbatches: int
    """M, the number of bins of each rank; 0 if there are no rows."""
    min_microbatches: int
    """Lower bound on M by the L2 bound, rounded up to the multiple."""
    max_tokens: int
    lengths: np.ndarray
    """int64 [n], as given."""
    work: np.ndarray
    """float64 [n], as given or by the cost model."""

    def bins(self) -> list[list[list[int]]]:
        """Rows by rank and microbatch."""
        flat = Packing(self.perm, self.offsets).bins()
        by_rank = []
        for rank in range(self.num_ranks):
            start = rank * self.num_microbatches
            by_rank.append(flat[start : start + self.num_microbatches])
        return by_rank

    @cached_property
    def bin_tokens(self) -> np.ndarray:
        """int64 [R, M]."""
        return self._by_bin(self.lengths)

    @cached_property
    def bin_work(self) -> np.ndarray:
        """float64 [R, M]."""
        return self._by_bin(self.work)

    @cached_property
    def stats(self) -> dict[str, float]:
        """Quality of the schedule, relative to lower bounds.

        `rank_imbalance` is `max_rank_work / max(mean_rank_work, max_row_work)`. `lockstep_ratio` is
        the sum over microbatches of the max-loaded rank, over the same denominator.
        `rank_over_bound` and `lockstep_over_bound` divide by the best lower bound under this token
        limit and number of microbatches instead: 1 is provably optimal.
        """
        rank_work = self.bin_work.sum(axis=1)
        makespan = float(rank_work.max(initial=0.0))
        microbatch_work = self.bin_work.max(axis=0, initial=0.0)
        lockstep_work = float(microbatch_work.sum())
        mean_rank_work = float(self.work.sum()) / self.num_ranks
        max_row_work = float(self.work.max(initial=0.0))
        # The max-loaded rank has at least the mean work, and some rank has the largest row. Without
        # any work the ratios are 0.
        simple_bound = max(mean_rank_work, max_row_work) or 1.0
        shape = (self.lengths, self.work, self.max_tokens, self.num_ranks, self.num_microbatches)
        may_be_empty = bool((np.diff(self.offsets) == 0).any())
        makespan_bound = max(rank_bound(*shape, may_be_empty=may_be_empty), simple_bound)
        lockstep_work_bound = max(lockstep_bound(*shape), simple_bound)
        capacity = max(1, self.bin_tokens.size * self.max_tokens)
        return {
            "num_microbatches": float(self.num_microbatches),
            "min_microbatches": float(self.min_microbatches),
            "utilization": float(self.lengths.sum()) / capacity,
            "rank_imbalance": makespan / simple_bound,
            "rank_over_bound": makespan / makespan_bound,
            "lockstep_ratio": lockstep_work / simple_bound,
            "lockstep_over_bound": lockstep_work / lockstep_work_bound,
        }

    def _by_bin(self, values: np.ndarray) -> np.ndarray:
        """Sum `values` [n] over the rows of each bin, [R, M] of the same dtype."""
        num_bins = len(self.offsets) - 1
        bin_of = np.repeat(np.arange(num_bins), np.diff(self.offsets))
        sums = np.bincount(bin_of, values[self.perm], minlength=num_bins)
        return sums.astype(values.dtype).reshape(self.num_ranks, self.num_microbatches)


@contextmanager
def few_plans() -> Iterator[None]:
    """Plan batches of up to 200 rows without numba inside the block; the plans are the same.

    Importing numba takes more than a second of CPU time, which does not pay off in a process that
    plans a few steps: without it such a plan takes at most about 0.03 s.
    """
    token = _avoid_numba.set(True)
    try:
        yield
    finally:
        _avoid_numba.reset(token)


def schedule(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    num_ranks: int,
    *,
    work: CostModel | np.ndarray | None = None,
    sync: Sync = "microbatch",
    microbatch_multiple: int = 1,
    min_microbatches: int = 1,
    groups: Sequence[int] | np.ndarray | None = None,
    effort: float = 1.0,
    use_numba: bool | None = None,
) -> Schedule:
    """Assign rows to bins and bins to ranks under a token limit.

    The schedule has the smallest number of microbatches for which a construction succeeds, then a
    small makespan. With `sync="microbatch"` the objective is the sum over microbatches of the
    max-loaded rank, with `sync="step"` the total of the max-loaded rank.

    `lengths` int [n] are tokens. `work` is the time of each row, float [n], or the cost model that
    gives it. Each rank has at least `min_microbatches`, a multiple of `microbatch_multiple`. Rows
    with equal id in `groups` int [n] share a bin, in their given order. `effort` scales the limit
    on local search; 0 means none. `use_numba`: None compiles if numba is installed and there are
    enough rows, False interprets with a lower limit, True requires numba.

    Raises ValueError for a row or group above `max_tokens`, for counts below 1 and for arrays of
    other shapes.

    Example: `schedule([6, 4, 4, 4, 2], max_tokens=10, num_ranks=2).bins()` is `[[[0, 3]], [[1, 2,
    4]]]`, two full bins.
    """
    counts = {
        "max_tokens": max_tokens,
        "num_ranks": num_ranks,
        "microbatch_multiple": microbatch_multiple,
    }
    check_settings(counts, sync, effort)
    lengths = checked_lengths(lengths)
    work = checked_work(work, lengths)
    if len(lengths) == 0:
        return _empty_schedule(num_ranks, max_tokens, work)
    item_of, items = sorted_items(groups, lengths, work)
    check_token_limit(item_of, items.tokens, max_tokens, groups is not None)

    num_needed_bins = l2_bound(items.tokens, max_tokens)
    bound = max(min_microbatches, ceil_div(num_needed_bins, num_ranks))
    bound = round_up(bound, microbatch_multiple)
    kernels = _kernels(use_numba, len(items))
    num_microbatches = bound
    # The lower bound is usually attained. With one row per bin the construction always succeeds, so
    # the loop ends.
    while True:
        num_bins = num_microbatches * num_ranks
        search = AssignmentSearch(items, max_tokens, num_ranks, num_bins, kernels)
        found = _minimize(search, sync, effort)
        if found is not None:
            break
        num_microbatches += microbatch_multiple
    bin_of, rank_of = found
    positions = _rank_major_positions(search.bin_work(bin_of), rank_of)
    position_of_row = positions[bin_of[item_of]]
    perm, offsets = _sorted_by_bin(position_of_row, item_of, search.num_bins)
    return Schedule(
        perm=perm,
        offsets=offsets,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        min_microbatches=bound,
        max_tokens=max_tokens,
        lengths=lengths,
        work=work,
    )


def _empty_schedule(num_ranks: int, max_tokens: int, work: np.ndarray) -> Schedule:
    """Return the schedule of no rows; `work` is float [0]."""
    no_rows = np.empty(0, np.int64)
    return Schedule(
        perm=no_rows,
        offsets=np.zeros(1, np.int64),
        num_ranks=num_ranks,
        num_microbatches=0,
        min_microbatches=0,
        max_tokens=max_tokens,
        lengths=no_rows,
        work=work,
    )


def _minimize(search: AssignmentSearch, sync: Sync, effort: float) -> Assignment | None:
    """Return the best assignment found for the objective of `sync`; None if none fits."""
    # The limit is in steps, not in seconds, so that the result is deterministic.
    max_steps = _STEPS_PER_ROW * len(search.items)
    if search.kernels is None:
        max_steps = min(max_steps, _MAX_INTERPRETED_STEPS)
    minimize = _minimize_lockstep if sync == "microbatch" else _minimize_makespan
    return minimize(search, int(effort * max_steps))


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
    counts = {"num_ranks": num_ranks, "microbatch_multiple": microbatch_multiple}
    check_settings(counts, sync, effort=0.0)
    work = np.asarray(bin_work, dtype=np.float64)
    bins_multiple = num_ranks * microbatch_multiple
    num_microbatches = ceil_div(len(work), bins_multiple) * microbatch_multiple
    order = np.argsort(-work, kind="stable")
    # Local search expects items by decreasing work; `order` maps them back to bin ids.
    # Each bin becomes an item of one token in a bin of capacity one, so local search can only swap.
    items = Items(np.ones(len(work), dtype=np.int64), work[order])
    search = AssignmentSearch(
        items,
        capacity=1,
        num_ranks=num_ranks,
        num_bins=num_microbatches * num_ranks,
        kernels=_kernels(None, len(work)),
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
    order = np.lexsort((-bin_work, rank_of))
    return inverse_permutation(order)


def _sorted_by_bin(
    bin_of_row: np.ndarray, item_of: np.ndarray, num_bins: int
) -> tuple[np.ndarray, np.ndarray]:
    """Sort rows by bin, then by item (decreasing work), then as given: (perm [n], offsets [K + 1]).

    Both inputs are int64 [n].
    """
    sizes = np.bincount(bin_of_row, minlength=num_bins)
    perm = np.lexsort((item_of, bin_of_row))
    return perm, prefix_sums(sizes)


def _kernels(use_numba: bool | None, num_rows: int) -> Any | None:
    """Return the compiled kernels, or None to interpret."""
    min_rows = _MAX_EQUAL_ROWS + 1 if _avoid_numba.get() else _MIN_COMPILED_ROWS
    if use_numba is False or (use_numba is None and num_rows < min_rows):
        return None
    kernels = balance_kernels.compiled()
    if use_numba and kernels is None:
        raise ValueError(
            "use_numba=True but numba is not installed; install nemo-like[speed] or leave use_numba"
            " at None"
        )
    return kernels
