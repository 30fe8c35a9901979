"""How long a planned step takes, relative to one without padding and without waiting. A model, not
a measurement.

The time of a microbatch is its work: `a * L + b * L^2` summed over all positions that are computed,
padding included. With `sync="microbatch"` ranks wait for each other at every microbatch, with
`"step"` once at the end. A pipeline of p stages needs p - 1 turns more than it has microbatches:
the time is multiplied by (M + p - 1) / M. Where weights are sharded, a microbatch takes no less
than moving them does.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from nemo_like.data.planning.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.oversize import round_up_all
from nemo_like.data.planning.plan import BatchPlan

ACHIEVED_FLOPS = 400e12
ACHIEVED_BYTES_PER_S = 300e9
"""Of one GPU: dense bf16 arithmetic and collectives within a node, as an H100 node achieves them;
only their ratio counts.
"""


def traffic_tokens(compute_bytes: int, *, recomputes: bool) -> float:
    """Tokens whose arithmetic takes as long as moving the weights of a sharded model once for a
    microbatch.

    Weights are gathered for forward and backward, float32 gradients are scattered: 2 c + 4 bytes a
    parameter, against 6 FLOPs a parameter and token, 8 with recomputation. The model's size
    cancels.
    """
    return (
        (2 * compute_bytes + 4) / (8 if recomputes else 6) * ACHIEVED_FLOPS / ACHIEVED_BYTES_PER_S
    )


def microbatch_work(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Forward work of each microbatch over all its positions, float64 [R, M]; the alignment at its
    end is attended by none.
    """
    work = by_microbatch(plan, cost.of(plan.padded_lengths))
    tail = plan.num_tokens - by_microbatch(plan, plan.padded_lengths)
    return work + np.where(work > 0, cost.linear * tail, cost.of(plan.num_tokens))


def step_times(
    work: np.ndarray, plan: BatchPlan, *, pp_size: int = 1, least_work: float = 0.0
) -> np.ndarray:
    """Time of each optimizer step in units of work, float64 [S], from the work [R, M] of its
    microbatches.

    A microbatch takes no less than `least_work`.
    """
    work = np.maximum(work, least_work)
    starts = plan.step_offsets[:-1]
    if plan.spec.sync == "microbatch":
        times = np.add.reduceat(work.max(axis=0), starts)
    else:
        times = np.add.reduceat(work, starts, axis=1).max(axis=0)
    counts = np.diff(plan.step_offsets)
    return times * (counts + pp_size - 1) / counts


def ideal_times(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """The work of the real tokens alone, spread evenly over the ranks, float64 [S]: nothing can be
    faster.
    """
    work = by_microbatch(plan, cost.of(plan.lengths)).sum(axis=0)
    return np.add.reduceat(work, plan.step_offsets[:-1]) / plan.spec.num_ranks


def rank_work(work: np.ndarray, plan: BatchPlan) -> np.ndarray:
    """Work of each rank in each step, float64 [R, S]."""
    return np.add.reduceat(work, plan.step_offsets[:-1], axis=1)


def least_microbatches(plan: BatchPlan, batches: list[np.ndarray]) -> np.ndarray:
    """Fewest microbatches of each rank in each step, int64 [S], as far as the L2 bound proves.
    Packed rows only.
    """
    spec = plan.spec
    rows = [
        np.minimum(round_up_all(lengths, spec.row_multiple), spec.capacity or 1)
        for lengths in batches
    ]
    bins = np.array([l2_bound(lengths, spec.capacity or 1) for lengths in rows], dtype=np.int64)
    return round_up_all(-(-bins // spec.num_ranks), spec.microbatch_multiple)


def least_times(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """The least a step can take in as many microbatches under this cap, float64 [S]: proven,
    perhaps not reachable.
    """
    least, spec = [], plan.spec
    is_dummy = (np.diff(plan.offsets) == 0).reshape(plan.num_tokens.shape)
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        rows = rows_of_step(plan, step)
        lengths = np.minimum(plan.padded_lengths[rows], spec.capacity or 1)
        shape = (
            lengths,
            cost.of(plan.padded_lengths[rows]),
            spec.capacity or 1,
            spec.num_ranks,
            stop - start,
        )
        if spec.sync == "microbatch":
            bound = lockstep_bound(*shape)
        else:
            bound = rank_bound(*shape, may_be_empty=bool(is_dummy[:, start:stop].any()))
        least.append(max(bound, float(shape[1].sum()) / spec.num_ranks))
    return np.asarray(least)


def rows_of_step(plan: BatchPlan, step: int) -> np.ndarray:
    """Positions in `plan.rows` of one optimizer step's rows, int64 [n]."""
    num = plan.num_microbatches
    grid = plan.offsets[
        np.add.outer(np.arange(plan.spec.num_ranks) * num, plan.step_offsets[step : step + 2])
    ]
    return np.concatenate([np.arange(start, stop) for start, stop in grid])


def by_microbatch(plan: BatchPlan, values: np.ndarray) -> np.ndarray:
    """Sums over microbatches of `values` [n], given in the order of `plan.rows`; [R, M]."""
    sums = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])
    return np.diff(sums[plan.offsets]).reshape(plan.num_tokens.shape)
