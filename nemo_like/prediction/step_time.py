"""Predicted step time of a plan, in units of work. It is a model, not a measurement.

The time of a microbatch is its work: `a * L + b * L^2` summed over its rows, padding included. With
`sync="microbatch"` data-parallel ranks synchronize in every microbatch, with `"step"` once at the
end. Pipeline bubble: with p stages and M microbatches the time is multiplied by (M + p - 1) / M
(1F1B). With sharded weights a microbatch takes at least the time of their communication.

Shapes: R data-parallel ranks, M microbatches per rank over all steps, S steps.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from nemo_like.data.planning.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import BatchPlan, PlanSpec
from nemo_like.integer_math import ceil_div, round_up
from nemo_like.prediction.placement import Placement

ACHIEVED_FLOPS = 400e12
ACHIEVED_BYTES_PER_S = 300e9
"""Achieved rates of one GPU of an H100 node: dense bf16 FLOP/s, and bytes/s of collectives within
the node. Only their ratio matters.
"""


def train_passes(placement: Placement) -> int:
    """Return the FLOPs of forward and backward pass in units of one forward pass.

    The backward pass computes the gradients of inputs and of weights. With LoRA the weights are
    frozen, and the adapters are small beside them. Full recomputation is one more forward pass.
    """
    num_passes = 3 if placement.lora is None else 2
    return num_passes + (placement.activation_checkpointing == "full")


def comm_bound_tokens(placement: Placement) -> float:
    """Return the tokens of a microbatch whose compute takes as long as its FSDP communication.

    Weights are all-gathered for forward and backward, float32 gradients are reduce-scattered:
    2 c + 4 bytes per parameter with c bytes per value, with LoRA 2 c, against 2 FLOPs per
    parameter, token and pass. The number of parameters cancels.
    """
    flops = 2 * train_passes(placement)
    num_bytes = 2 * placement.compute_bytes + (4 if placement.lora is None else 0)
    flops_per_byte = ACHIEVED_FLOPS / ACHIEVED_BYTES_PER_S
    return num_bytes / flops * flops_per_byte


def min_microbatch_tokens(placement: Placement, num_params: int) -> float:
    """Return the microbatch size below which FSDP communication takes longer than compute.

    It is 0 if weights are not communicated in every microbatch. Weights in 4 bits never are, and
    what remains, adapters and embeddings, is neglected.
    """
    if placement.lora is not None and placement.lora.is_quantized:
        return 0.0
    layout = placement.parallel_layout
    is_unsharded = layout.keeps_unsharded(placement.engine, num_params)
    if placement.engine == "megatron" or is_unsharded or placement.num_shards == 1:
        return 0.0
    return comm_bound_tokens(placement) * layout.cp


def microbatch_work(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Return the forward work of each microbatch, padding included, float64 [R, M]."""
    work = by_microbatch(plan, cost.of(plan.padded_lengths, plan.num_trained))
    num_tail_tokens = plan.num_tokens - by_microbatch(plan, plan.padded_lengths)
    # The alignment tokens at the end of a microbatch are processed, but no row attends to them. A
    # microbatch without rows is one dummy row. Neither has a loss.
    without_loss = np.zeros_like(num_tail_tokens)
    tail_work = cost.products(num_tail_tokens, without_loss)
    dummy_work = cost.of(plan.num_tokens, without_loss)
    return work + np.where(work > 0, tail_work, dummy_work)


def step_times(
    work: np.ndarray, plan: BatchPlan, *, pp_size: int = 1, min_work: float = 0.0
) -> np.ndarray:
    """Return the time of each optimizer step in units of work, float64 [S].

    `work` is float64 [R, M]; a microbatch takes at least `min_work`.
    """
    work = np.maximum(work, min_work)
    starts = plan.step_offsets[:-1]
    if plan.spec.sync == "microbatch":
        # Every microbatch takes as long as its slowest rank.
        slowest = work.max(axis=0)
        times = np.add.reduceat(slowest, starts)
    else:
        # Ranks only wait at the end, so differences between microbatches cancel.
        by_rank = np.add.reduceat(work, starts, axis=1)
        times = by_rank.max(axis=0)
    counts = np.diff(plan.step_offsets)
    return times * (counts + pp_size - 1) / counts


def ideal_times(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Return the work of the real tokens spread evenly over the ranks, float64 [S].

    It is a lower bound of every plan's step time.
    """
    work = by_microbatch(plan, cost.of(plan.lengths, plan.num_trained)).sum(axis=0)
    step_work = np.add.reduceat(work, plan.step_offsets[:-1])
    return step_work / plan.spec.num_ranks


def rank_work(work: np.ndarray, plan: BatchPlan) -> np.ndarray:
    """Return the work of each rank in each step, float64 [R, S], from `work` [R, M]."""
    return np.add.reduceat(work, plan.step_offsets[:-1], axis=1)


def min_microbatches(spec: PlanSpec, batches: list[np.ndarray]) -> np.ndarray:
    """Return a lower bound (L2) of the microbatches of each rank in each step, int64 [S].

    `batches` are the row lengths of each step, int [B]. The bound holds for packed rows.
    """
    capacity = spec.capacity or 1
    bins = []
    for lengths in batches:
        padded = round_up(lengths, spec.row_multiple)
        # Rows above the capacity are microbatches of their own; the bound needs them to fit.
        bins.append(l2_bound(np.minimum(padded, capacity), capacity))
    per_rank = ceil_div(np.array(bins, dtype=np.int64), spec.num_ranks)
    return round_up(per_rank, spec.microbatch_multiple)


def time_bounds(plan: BatchPlan, cost: CostModel) -> np.ndarray:
    """Return a lower bound of the time of each step with as many microbatches, float64 [S].

    The token budget comes from the plan. The bound is proven and may be unreachable.
    """
    spec = plan.spec
    capacity = spec.capacity or 1
    is_dummy = (np.diff(plan.offsets) == 0).reshape(plan.num_tokens.shape)
    bounds = []
    for step, (start, stop) in enumerate(pairwise(plan.step_offsets)):
        rows = rows_of_step(plan, step)
        padded = plan.padded_lengths[rows]
        # A row above the capacity runs alone; the bounds need it to fit.
        lengths = np.minimum(padded, capacity)
        work = cost.of(padded, None if plan.num_trained is None else plan.num_trained[rows])
        num_microbatches = stop - start
        if spec.sync == "microbatch":
            bound = lockstep_bound(lengths, work, capacity, spec.num_ranks, num_microbatches)
        else:
            bound = rank_bound(
                lengths,
                work,
                capacity,
                spec.num_ranks,
                num_microbatches,
                may_be_empty=bool(is_dummy[:, start:stop].any()),
            )
        mean_work = float(work.sum()) / spec.num_ranks
        bounds.append(max(bound, mean_work))
    return np.asarray(bounds)


def rows_of_step(plan: BatchPlan, step: int) -> np.ndarray:
    """Return the indices into `plan.rows` of the rows of one optimizer step, int64 [n]."""
    first_of_rank = np.arange(plan.spec.num_ranks) * plan.num_microbatches
    step_range = plan.step_offsets[step : step + 2]
    # [R, 2]: a step's microbatches are consecutive within a rank.
    ranges = plan.offsets[np.add.outer(first_of_rank, step_range)]
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def by_microbatch(plan: BatchPlan, values: np.ndarray) -> np.ndarray:
    """Sum `values` [n], given in the order of `plan.rows`, over each microbatch; [R, M]."""
    # Differences of cumulative sums, since `np.add.reduceat` does not handle dummies.
    sums = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])
    by_bin = np.diff(sums[plan.offsets])
    return by_bin.reshape(plan.num_tokens.shape)
