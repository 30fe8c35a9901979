"""Numbers of a plan: the metrics that a run logs, and one line that describes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nemo_like.config.errors import counted
from nemo_like.data.packing.metrics import bin_stats
from nemo_like.integer_math import ceil_div

if TYPE_CHECKING:
    from nemo_like.data.planning.plan import BatchPlan


def plan_metrics(plan: BatchPlan) -> dict[str, float]:
    """Return the metrics of the plan by the names they are logged under.

    Bin loads are computed real tokens, so alignment padding counts as waste; dummies are not
    bins. The shares of what common leading tokens save exist only for plans with `prefixes`,
    and the idle share of a stage's time, for microbatches of equal time, only for pipelines.
    Without `max_tokens` the largest microbatch is the capacity. An imbalance is the max-loaded
    rank over the mean rank, weighted over steps by work.
    """
    num_rows = np.diff(plan.offsets)
    tokens = plan.num_tokens
    is_filled = num_rows > 0
    largest = int(tokens.ravel()[is_filled].max(initial=1))
    capacity = plan.spec.max_tokens or largest
    loads = plan.bins.loads(plan.by_row(plan.computed_lengths))
    # Rows of different steps cannot share a bin, so the minimum is per step.
    step_tokens = loads[:0]
    if plan.num_steps:
        microbatch_tokens = loads.reshape(tokens.shape).sum(0)
        step_tokens = np.add.reduceat(microbatch_tokens, plan.step_offsets[:-1])
    min_bins_of_step = ceil_div(step_tokens, capacity)
    stats = bin_stats(loads[is_filled], capacity, int(min_bins_of_step.sum()))
    num_positions = float(tokens.sum())
    num_computed = plan.computed_lengths.sum()
    num_padding = float(tokens.sum() - num_computed)
    positions = plan.padded_lengths.astype(np.float64)
    optional = {}
    if plan.context_size is not None:
        weight = float(num_computed) or 1.0
        mean_size = float((plan.context_size * plan.computed_lengths).sum()) / weight
        optional["packing/mean_context_size"] = mean_size
    if plan.spec.pp_size > 1:
        bubble = plan.num_steps * plan.spec.bubble_microbatches
        # An empty plan has neither.
        num_slots = max(plan.num_microbatches + bubble, 1)
        optional["packing/pipeline_bubble_share"] = bubble / num_slots
    if plan.image_work is not None:
        optional["packing/rank_imbalance_vision"] = _imbalance(plan, plan.computed_image_work)
    if plan.shared is not None:
        num_row_tokens = max(plan.lengths.sum(), 1)
        optional["packing/shared_token_share"] = float(1 - num_computed / num_row_tokens)
        optional["packing/shared_work_share"] = plan.shared_work_share
    return {
        "packing/utilization": stats["average_utilization"],
        "packing/waste_ratio": stats["waste_ratio"],
        "packing/bin_balance": stats["bin_balance"],
        "packing/efficiency": stats["bin_efficiency"],
        "packing/padding_share": num_padding / max(num_positions, 1.0),
        "packing/rank_imbalance_tokens": _imbalance(plan, positions),
        "packing/rank_imbalance_flops": _imbalance(plan, plan.work),
        "packing/num_microbatches": plan.num_microbatches / max(plan.num_steps, 1),
        "packing/num_dummies": float(np.count_nonzero(num_rows == 0)),
        "packing/num_truncated": float(plan.num_truncated),
        "packing/num_dropped": float(len(plan.dropped)),
        "packing/num_oversize": float(plan.num_oversize),
        **optional,
    }


def describe(plan: BatchPlan) -> str:
    """Describe the size, the limits and the balance in one line.

    Example: `64 rows, 4 ranks, 3 microbatches per rank of at most 2,048 tokens (packed), 0.4%
    padding, max-loaded rank 1.02 times the mean work`.
    """
    limits = []
    if plan.spec.max_tokens:
        limits.append(counted(plan.spec.max_tokens, "token"))
    if plan.spec.max_rows:
        limits.append(counted(plan.spec.max_rows, "row"))
    metrics = plan.metrics()
    size = counted(plan.num_rows, "row")
    microbatches = counted(plan.num_microbatches, "microbatch", "microbatches")
    if plan.num_steps != 1:
        size += f", {counted(plan.num_steps, 'optimizer step')}"
    balance = ""
    if plan.spec.num_ranks > 1:
        size += f", {plan.spec.num_ranks} ranks"
        microbatches += " per rank"
        imbalance = metrics["packing/rank_imbalance_flops"]
        balance = f", max-loaded rank {imbalance:.2f} times the mean work"
    if plan.shared is not None:
        balance += f", {metrics['packing/shared_token_share']:.1%} of the row tokens shared"
    if plan.dropped:
        balance += f", {counted(len(plan.dropped), 'row')} dropped"
    return (
        f"{size}, {microbatches} of at most {' and '.join(limits)} ({plan.spec.layout}),"
        f" {metrics['packing/padding_share']:.1%} padding{balance}"
    )


def _imbalance(plan: BatchPlan, work: np.ndarray) -> float:
    """Sum over steps of the max-loaded rank's work over the mean rank's work.

    `work` float64 [n] is the work of each of `rows`.
    """
    # Without rows there is no mean to divide by.
    if not len(work):
        return 1.0
    by_rank = plan.of_context_ranks(work)
    # [number of ranks, number of steps]
    by_step = np.add.reduceat(by_rank, plan.step_offsets[:-1], axis=1)
    max_loaded = by_step.max(0).sum()
    mean = by_step.sum() / len(by_rank)
    return float(max_loaded / mean)
