"""What no plan can beat: lower bounds on the number of bins and on the lockstep work of a schedule.
Proofs, not plans.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def l1_bound(lengths: Sequence[int] | np.ndarray, capacity: int) -> int:
    """Fewest bins by tokens alone: ceil(sum / capacity)."""
    return -(-int(np.sum(lengths, dtype=np.int64)) // capacity)


def l2_bound(lengths: Sequence[int] | np.ndarray, capacity: int) -> int:
    """Fewest bins by Martello and Toth's L2 (Knapsack Problems, 1990, section 8.3), in O(n log n).

    For a threshold k <= capacity / 2: rows above capacity - k share a bin with no row of at least
    k, rows above capacity / 2 sit alone among themselves, and what rows from k to capacity / 2 need
    beyond the room those leave takes more bins. The largest over k, which only has to visit the
    lengths that occur, is the bound; k = 0 makes it at least `l1_bound`. `lengths` are int [B],
    each 1 to `capacity`; raises ValueError otherwise.

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
    tokens_before = np.concatenate([[0], np.cumsum(lengths)])
    first_large = int(np.searchsorted(lengths, capacity // 2, side="right"))
    is_new = (
        np.concatenate([[True], lengths[1:first_large] > lengths[: first_large - 1]])
        if first_large
        else np.ones(0, bool)
    )
    first_small = np.concatenate(
        [np.flatnonzero(is_new), [first_large]]
    )  # rows from k on, for each k that occurs
    thresholds = np.concatenate([lengths[first_small[:-1]], [0]])
    first_small[-1] = 0
    first_alone = np.searchsorted(lengths, capacity - thresholds, side="right")
    num_alone, num_large = len(lengths) - first_alone, first_alone - first_large
    room = num_large * capacity - (tokens_before[first_alone] - tokens_before[first_large])
    tokens_small = tokens_before[first_large] - tokens_before[first_small]
    num_more = np.maximum(0, -((room - tokens_small) // capacity))
    return int((num_alone + num_large + num_more).max())


def lockstep_bound(
    lengths: Sequence[int] | np.ndarray,
    work: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    num_microbatches: int,
) -> float:
    """Least possible sum over microbatches of the dearest rank's work, when ranks meet at every
    microbatch.

    Of any plan, put the microbatches in order of their dearest bin. Then microbatch j costs at
    least a row that cannot sit in those before it, and work beyond what fits into the first j is
    spread over `num_ranks` in the others (`microbatch_limits`): the bound is the largest over j of
    the sum of the former up to j plus the latter. `lengths` int [B] from 1 to `max_tokens`, `work`
    float [B] >= 0.
    """
    if len(lengths) == 0:
        return 0.0
    tops, most_work = microbatch_limits(lengths, work, max_tokens, num_ranks, num_microbatches)
    rest = np.maximum(0.0, np.sum(work) - most_work) / num_ranks
    return float((np.concatenate([[0.0], np.cumsum(tops)]) + rest).max())


def rank_bound(
    lengths: Sequence[int] | np.ndarray,
    work: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    num_microbatches: int,
    *,
    may_be_empty: bool,
) -> float:
    """Least possible work of the dearest rank of `num_microbatches` bins each, when ranks meet once
    a step.

    For each k, either two of the k dearest rows share a rank, or they are on k ranks. Those k have
    to hold what tokens the others cannot, of the least dense rows at best; and unless bins
    `may_be_empty`, a row in every other bin, at best the cheapest: on average over the k ranks, and
    for the one that gets the dearest of those. `lengths` int [B] from 1 to `max_tokens`, `work`
    float [B] >= 0.
    """
    lengths, work = np.asarray(lengths, dtype=np.int64), np.asarray(work, dtype=np.float64)
    if len(lengths) == 0:
        return 0.0
    count = np.arange(1, min(num_ranks, len(lengths)) + 1)
    dearest, cheapest = np.argsort(-work, kind="stable"), np.concatenate([[0.0], np.sort(work)])
    top_work, top_tokens = (
        np.cumsum(work[dearest])[count - 1],
        np.cumsum(lengths[dearest])[count - 1],
    )
    needed = np.maximum(
        0, lengths.sum() - (num_ranks - count) * num_microbatches * max_tokens - top_tokens
    )
    sparsest = np.argsort(work / lengths, kind="stable")
    tokens, works = (
        np.concatenate([[0], np.cumsum(values[sparsest])]) for values in (lengths, work)
    )
    apart = (top_work + np.interp(needed, tokens, works)) / count
    if not may_be_empty and num_microbatches > 1:
        num_others = np.minimum(count * (num_microbatches - 1), len(work))
        apart = np.maximum(apart, (top_work + np.cumsum(cheapest)[num_others]) / count)
        apart = np.maximum(
            apart,
            work[dearest[count - 1]]
            + cheapest[num_others]
            + cheapest[: num_microbatches - 1].sum(),
        )
    together = np.append(np.inf, work[dearest[count[1:] - 1]] + work[dearest[count[1:] - 2]])
    return float(max(work.sum() / num_ranks, np.minimum(apart, together).max()))


def microbatch_limits(
    lengths: Sequence[int] | np.ndarray,
    work: np.ndarray,
    max_tokens: int,
    num_ranks: int,
    num_microbatches: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Limits on M microbatches of R bins in order of their dearest bin: (least work of each one's
    dearest bin, float [M]; most work that fits into the first j of them over all ranks, float
    [M+1]).

    The first j hold at most j * R * max_tokens tokens, and at most j * R rows above half the cap.
    So the dearest rows that exceed either do not all sit there, and the dearest bin of the next
    holds at least the last of them. The most work is that of the densest rows of so many tokens,
    one cut; where work grows faster than length, the dearest rows above half the cap come first, as
    many as bins, and then the densest others.
    """
    lengths, work = np.asarray(lengths, dtype=np.int64), np.asarray(work, dtype=np.float64)
    dearest = np.argsort(-work, kind="stable")
    ordered_work, is_large = work[dearest], 2 * lengths[dearest] > max_tokens
    num_bins = np.arange(num_microbatches + 1) * num_ranks
    capacity = num_bins * max_tokens
    after = np.searchsorted(np.cumsum(lengths[dearest]), capacity[:-1], side="right")
    tops = np.append(ordered_work, 0.0)[np.minimum(after, len(work))]
    large_work = ordered_work[is_large]
    tops = np.maximum(tops, np.append(large_work, 0.0)[np.minimum(num_bins[:-1], len(large_work))])
    most_work = _most_work(lengths, work, capacity)
    large, small = lengths[dearest][is_large], ~is_large
    if _grows_faster_than_length(
        large, large_work, (ordered_work[small] / lengths[dearest][small]).max(initial=0.0)
    ):
        tokens, works = (np.concatenate([[0], np.cumsum(values)]) for values in (large, large_work))
        num_large = np.minimum(num_bins, len(large))
        left = np.maximum(0, capacity - tokens[num_large])
        with_large = np.minimum(works[num_large], np.interp(capacity, tokens, works))
        most_work = np.minimum(
            most_work, with_large + _most_work(lengths[dearest][small], ordered_work[small], left)
        )
    return tops, most_work


def _most_work(lengths: np.ndarray, work: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Most work of rows of together at most `tokens` [J], of which one may be cut; float [J]."""
    densest = np.argsort(-(work / lengths), kind="stable")
    lengths_before, work_before = (
        np.concatenate([[0], np.cumsum(values[densest])]) for values in (lengths, work)
    )
    return np.interp(tokens, lengths_before, work_before)


def _grows_faster_than_length(lengths: np.ndarray, work: np.ndarray, density: float) -> bool:
    """Whether a longer row is denser, and each further token of it brings at least `density`; rows
    dearest first.
    """
    longer, dearer = -np.diff(lengths), -np.diff(work)
    slack = 1e-9 * work[:-1]
    return bool(
        np.all(work >= density * lengths * (1 - 1e-9))
        and np.all(longer >= 0)
        and np.all(dearer >= density * longer - slack)
        and np.all(np.diff(work / lengths) <= 1e-9 * density)
    )
