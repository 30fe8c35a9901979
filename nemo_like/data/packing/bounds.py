"""Lower bounds on the number of bins, on lockstep work and on the makespan of a schedule.

Notation: B rows, R ranks, M microbatches of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nemo_like.data.packing.packers import prefix_sums
from nemo_like.integer_math import ceil_div


def l2_bound(lengths: Sequence[int] | np.ndarray, capacity: int) -> int:
    """Lower bound on the number of bins by Martello and Toth's L2, in O(n log n).

    Source: Knapsack Problems, 1990, section 8.3. For a threshold k <= capacity / 2: rows above
    capacity - k share a bin with no row of at least k, no two rows above capacity / 2 share a bin,
    and the rows from k to capacity / 2 that do not fit beside those need more bins. The bound is
    the maximum over k, which only has to visit the lengths that occur; k = 0 makes it at least
    ceil(tokens / capacity). `lengths` are int [B], each 1 to `capacity`; raises ValueError
    otherwise.

    Example: rows 6, 6, 6, 5, 5 in bins of 10 need 4 bins (k = 5: no two of the sixes and no six
    with a five), not 3.
    """
    lengths = np.sort(np.asarray(lengths, dtype=np.int64))
    if len(lengths) == 0:
        return 0
    if lengths[0] < 1 or lengths[-1] > capacity:
        raise ValueError(
            f"lengths must be from 1 to the capacity {capacity}; got {lengths[0]} to {lengths[-1]}"
        )
    cumulative_tokens = prefix_sums(lengths)
    first_large = int(np.searchsorted(lengths, capacity // 2, side="right"))
    # Only a threshold equal to some length can change the bound.
    is_new_length = np.ones(0, bool)
    if first_large:
        is_increase = lengths[1:first_large] > lengths[: first_large - 1]
        is_new_length = np.concatenate([[True], is_increase])
    # For each threshold k: the first row with at least k tokens. The last entry is k = 0, and its
    # threshold is set first because it has no row of its own.
    first_small = np.concatenate([np.flatnonzero(is_new_length), [first_large]])
    thresholds = np.concatenate([lengths[first_small[:-1]], [0]])
    first_small[-1] = 0
    # Rows from `first_alone` on share a bin with no row above the threshold.
    first_alone = np.searchsorted(lengths, capacity - thresholds, side="right")
    num_alone = len(lengths) - first_alone
    # The other rows above half the capacity have a bin each, with room for smaller rows.
    num_large = first_alone - first_large
    tokens_large = cumulative_tokens[first_alone] - cumulative_tokens[first_large]
    free_tokens = num_large * capacity - tokens_large
    tokens_small = cumulative_tokens[first_large] - cumulative_tokens[first_small]
    # ceil(missing / capacity), as -floor(-missing / capacity).
    missing_tokens = tokens_small - free_tokens
    num_more = np.maximum(0, ceil_div(missing_tokens, capacity))
    return int((num_alone + num_large + num_more).max())


def lockstep_bound(
    lengths: Sequence[int] | np.ndarray,
    work: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    num_microbatches: int,
) -> float:
    """Lower bound on the sum over microbatches of the max-loaded rank, for `sync="microbatch"`.

    Sort the microbatches of a plan by their max-loaded bin. Then microbatch j takes at least as
    long as a row that fits into no earlier one, and the work that does not fit into the first j is
    distributed over `num_ranks` ranks in the others (`microbatch_limits`). The bound is the maximum
    over j of the former summed up to j, plus the latter. `lengths` int [B] from 1 to `max_tokens`,
    `work` float [B] >= 0.
    """
    if len(lengths) == 0:
        return 0.0
    min_max_work, max_work_before = microbatch_limits(
        lengths, work, max_tokens, num_ranks, num_microbatches
    )
    remaining = np.maximum(0.0, np.sum(work) - max_work_before) / num_ranks
    first_microbatches = prefix_sums(min_max_work)
    bounds = first_microbatches + remaining
    return float(bounds.max())


def rank_bound(
    lengths: Sequence[int] | np.ndarray,
    work: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    num_microbatches: int,
    *,
    may_be_empty: bool,
) -> float:
    """Lower bound on the makespan over ranks of `num_microbatches` bins each, for `sync="step"`.

    For each k, either two of the k largest rows share a rank, or they are on k different ranks. In
    the second case these k ranks also take the tokens that exceed the capacity of the other ranks,
    in the best case from the rows with the least work per token, and, unless bins `may_be_empty`,
    one row in each other bin, in the best case the smallest rows. Both hold on average over the k
    ranks; the last also for the rank of the smallest of the k rows. `lengths` int [B] from 0 to
    `max_tokens`, `work` float [B] >= 0.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(work, dtype=np.float64)
    if len(lengths) == 0:
        return 0.0
    max_k = min(num_ranks, len(lengths))
    k = np.arange(1, max_k + 1)
    by_work = np.argsort(-work, kind="stable")
    ascending_work = np.concatenate([[0.0], np.sort(work)])
    # Work and tokens of the k largest rows, [max_k] each.
    top_work = np.cumsum(work[by_work])[k - 1]
    top_tokens = np.cumsum(lengths[by_work])[k - 1]

    # Tokens that do not fit on the other ranks, at the lowest possible work per token.
    other_capacity = (num_ranks - k) * num_microbatches * max_tokens
    excess_tokens = np.maximum(0, lengths.sum() - other_capacity - top_tokens)
    # Rows that others have computed completely have no tokens, and come last.
    density = np.full(len(work), np.inf)
    np.divide(work, lengths, out=density, where=lengths > 0)
    by_density = np.argsort(density, kind="stable")
    cumulative_tokens = prefix_sums(lengths[by_density])
    cumulative_work = prefix_sums(work[by_density])
    excess_work = np.interp(excess_tokens, cumulative_tokens, cumulative_work)
    apart = (top_work + excess_work) / k
    if not may_be_empty and num_microbatches > 1:
        # Every other bin of these ranks has at least one row, in the best case the smallest ones.
        num_other_bins = np.minimum(k * (num_microbatches - 1), len(work))
        smallest_work = np.cumsum(ascending_work)[num_other_bins]
        apart = np.maximum(apart, (top_work + smallest_work) / k)
        one_rank = (
            work[by_work[k - 1]]
            + ascending_work[num_other_bins]
            + ascending_work[: num_microbatches - 1].sum()
        )
        apart = np.maximum(apart, one_rank)
    # Two of the k largest rows together have at least the work of the two smallest of them.
    largest_work = work[by_work[:max_k]]
    shared = largest_work[1:] + largest_work[:-1]
    # One row cannot share a rank with itself, so there is no second case for k = 1.
    together = np.append(np.inf, shared)
    mean_work = work.sum() / num_ranks
    return float(max(mean_work, np.minimum(apart, together).max()))


def microbatch_limits(
    lengths: Sequence[int] | np.ndarray,
    work: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    num_microbatches: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Limits on M microbatches of R bins, sorted by their max-loaded bin.

    Returns (minimum work of the max-loaded bin of each microbatch, float64 [M]; maximum total work
    of the first j microbatches over all ranks, float64 [M + 1]).

    The first j microbatches hold at most j * R * max_tokens tokens and at most j * R rows above
    half the limit. So the largest rows that exceed either number are not all in them, and the
    max-loaded bin of microbatch j has at least the work of the last of these rows. The maximum work
    is reached by the rows with the most work per token, the last one taken in part. If work grows
    faster than length, rows above half the limit come first, one per bin, then the others.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    work = np.asarray(work, dtype=np.float64)
    by_work = np.argsort(-work, kind="stable")
    sorted_work = work[by_work]
    sorted_lengths = lengths[by_work]
    is_large = 2 * sorted_lengths > max_tokens
    # Bins and tokens of the first j microbatches, [M + 1] each.
    num_bins = np.arange(num_microbatches + 1) * num_ranks
    capacity = num_bins * max_tokens

    cumulative_lengths = np.cumsum(sorted_lengths)
    first_outside = np.searchsorted(cumulative_lengths, capacity[:-1], side="right")
    first_outside = np.minimum(first_outside, len(work))
    # The appended 0 is the work of a microbatch into which no row has to go.
    work_or_none = np.append(sorted_work, 0.0)
    min_max_work = work_or_none[first_outside]
    large_work = sorted_work[is_large]
    large_work_or_none = np.append(large_work, 0.0)
    first_large_outside = np.minimum(num_bins[:-1], len(large_work))
    min_max_work = np.maximum(min_max_work, large_work_or_none[first_large_outside])

    max_work = _max_work(lengths, work, capacity)
    large = sorted_lengths[is_large]
    small = sorted_lengths[~is_large]
    small_work = sorted_work[~is_large]
    max_small_density = (small_work / small).max(initial=0.0)
    if _grows_faster_than_length(large, large_work, max_small_density):
        cumulative_tokens = prefix_sums(large)
        cumulative_work = prefix_sums(large_work)
        # At most one row above half the limit fits into a bin.
        num_large = np.minimum(num_bins, len(large))
        free_tokens = np.maximum(0, capacity - cumulative_tokens[num_large])
        by_capacity = np.interp(capacity, cumulative_tokens, cumulative_work)
        max_large_work = np.minimum(cumulative_work[num_large], by_capacity)
        max_small_work = _max_work(small, small_work, free_tokens)
        max_work = np.minimum(max_work, max_large_work + max_small_work)
    return min_max_work, max_work


def _max_work(lengths: np.ndarray, work: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Maximum work of rows with at most `tokens` [J] tokens in total, float64 [J].

    This is the fractional knapsack bound: one row may be taken in part. `lengths` int64 [n],
    `work` float64 [n].
    """
    by_density = np.argsort(-(work / lengths), kind="stable")
    cumulative_tokens = prefix_sums(lengths[by_density])
    cumulative_work = prefix_sums(work[by_density])
    return np.interp(tokens, cumulative_tokens, cumulative_work)


def _grows_faster_than_length(lengths: np.ndarray, work: np.ndarray, density: float) -> bool:
    """Return True if longer rows have more work per token and each further token adds at least
    `density`; `lengths` int64 [n] and `work` float64 [n] are sorted by decreasing work.
    """
    more_tokens = -np.diff(lengths)
    more_work = -np.diff(work)
    # Rounding errors of the sums that work comes from must not turn the bound off.
    tolerance = 1e-9 * work[:-1]
    if np.any(more_tokens < 0):
        return False
    is_dense = work >= density * lengths * (1 - 1e-9)
    adds_enough = more_work >= density * more_tokens - tolerance
    is_convex = np.diff(work / lengths) <= 1e-9 * density
    return bool(is_dense.all() and adds_enough.all() and is_convex.all())


def shared_bound(
    union_work: np.ndarray, prefix_work: np.ndarray, row_work: np.ndarray, num_ranks: int
) -> float:
    """Lower bound on the work of the slowest rank if rows share leading tokens, for either `sync`.

    Tree t of float64 [T] trees has `union_work` if it is computed once; `prefix_work` is that of
    the tokens that all of its rows have in common, which every piece of it computes again;
    `row_work` is the work of its most expensive row with all tokens. k pieces have at least the
    work union + (k - 1) * prefix. If no rank has more than W, then k >= (union - prefix) / (W -
    prefix), and all pieces together have at most `num_ranks * W`. The bound is the smallest W, at
    least the most expensive row, for which this can hold, found by bisection to 1e-9.
    """
    if len(union_work) == 0:
        return 0.0

    def total(limit: float) -> float:
        # Rows without tokens of their own leave no room beside the prefix.
        room = np.maximum(limit - prefix_work, 1e-9 * limit)
        pieces = np.ceil((union_work - prefix_work) / room * (1 - 1e-12))
        return float((union_work + np.maximum(pieces - 1, 0) * prefix_work).sum())

    low = max(float(row_work.max()), float(union_work.sum()) / num_ranks)
    if total(low) <= num_ranks * low:
        return low
    high = total(low) / num_ranks
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if total(middle) > num_ranks * middle:
            low = middle
        else:
            high = middle
    return low
