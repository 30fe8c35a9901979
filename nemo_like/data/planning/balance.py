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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning import balance_kernels
from nemo_like.data.planning.bounds import l2_bound
from nemo_like.data.planning.local_search import AssignmentSearch, Items
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
    lengths: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    *,
    work: np.ndarray,
    sync: Sync = "microbatch",
    microbatch_multiple: int = 1,
    min_microbatches: int = 1,
) -> Packing:
    """Assign rows to bins and bins to ranks under a token limit.

    Bin `r * M + m` of the result is microbatch m of rank r. M is the smallest multiple of
    `microbatch_multiple`, at least `min_microbatches`, for which a construction succeeds. The bins
    of a rank are sorted by decreasing work. With `sync="microbatch"` the objective is the sum over
    microbatches of the max-loaded rank, with `sync="step"` the total of the max-loaded rank.

    `lengths` int64 [n] are tokens, each from 1 to `max_tokens`; raises ValueError otherwise. `work`
    float64 [n] is the time of each row, at least 0.

    Example: rows of 6, 4, 4, 4, 2 tokens with equal work per token, 10 tokens and two ranks are the
    bins [0, 3] and [1, 2, 4], one per rank.
    """
    if len(lengths) == 0:
        return Packing(np.empty(0, np.int64), np.zeros(1, np.int64))
    order = np.argsort(-work, kind="stable")
    items = Items(lengths[order], work[order])
    kernels = _kernels(len(items))
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
    items = Items(np.ones(len(work), dtype=np.int64), work[order])
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


def _kernels(num_rows: int) -> Any | None:
    """Return the compiled kernels, or None to interpret."""
    min_rows = _MAX_EQUAL_ROWS + 1 if _avoid_numba.get() else _MIN_COMPILED_ROWS
    return None if num_rows < min_rows else balance_kernels.compiled()
