"""Tokens per second and model FLOPs utilization (MFU) of a step, and the metrics of its plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_like.data.columns import num_trained_tokens
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.metrics import Mean, Metrics, Timers
from nemo_like.policy.batching import Purpose
from nemo_like.policy.policy import Policy

FLOPS_PER_TRAINED_UNIT = 3
"""Forward and backward in units of one forward: the backward computes two gradients per product.

Recomputation is not counted; with it the metric would be the hardware FLOPs utilization.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepWork:
    """The rows of a step, and the passes over them."""

    lengths: np.ndarray
    """Tokens of each row, prompt and completion, int64 [B]."""
    num_trained: np.ndarray
    """Tokens of each row with loss, int64 [B]."""
    num_logprob_passes: int = 0
    """Forward passes of the policy or its reference besides training."""
    num_epochs: int = 1
    """Passes of training over the rows."""
    teacher_flops: float = 0.0
    """Forward FLOPs of the teachers on their rows."""

    @classmethod
    def of(cls, plan: BatchPlan, *, num_logprob_passes: int = 0, num_epochs: int = 1) -> StepWork:
        """Return the work on the rows of a plan, in its order, after truncation."""
        assert plan.num_trained is not None, "the rows of a step have a token mask"
        return cls(
            lengths=plan.lengths,
            num_trained=plan.num_trained,
            num_logprob_passes=num_logprob_passes,
            num_epochs=num_epochs,
        )


def throughput_metrics(
    work: StepWork,
    cost: CostModel,
    timers: Timers,
    *,
    peak_flops: float,
    num_workers: int,
    has_frozen_weights: bool = False,
) -> Metrics:
    """Return the rates of one step over all its rows.

    `cost.of` gives the forward FLOPs of a row: causal attention over its own tokens only, and the
    output projection of tokens with loss only, in log-prob passes too. MFU = ((3 x `num_epochs` +
    `num_logprob_passes`) x forward FLOPs + `teacher_flops`) / (seconds of all passes x workers x
    `peak_flops`). With `has_frozen_weights` (LoRA) the gradients of weights are
    not computed, so the products with weights count twice instead of three times. Rates of tokens
    count the rows of a step once.
    """
    forward_flops = float(cost.of(work.lengths, work.num_trained).sum())
    num_tokens = float(work.lengths.sum())
    train_s = timers.seconds("train")
    step_s = timers.seconds("step")
    # The training pass computes the logits of the teachers, so neither of both times is enough.
    compute_s = train_s + timers.seconds("logprobs") + timers.seconds("teacher")
    trained_flops = FLOPS_PER_TRAINED_UNIT * forward_flops
    if has_frozen_weights:
        trained_flops -= float(cost.products(work.lengths, work.num_trained).sum())
    flops = trained_flops * work.num_epochs + forward_flops * work.num_logprob_passes
    flops += work.teacher_flops
    # A timer that did not run gives 0 s, and then the rate is 0 instead of a division by zero.
    tokens_per_s = num_tokens / step_s if step_s else 0.0
    train_tokens_per_s = num_tokens / train_s if train_s else 0.0
    flops_per_s_per_worker = flops / compute_s / num_workers if compute_s else 0.0
    return {
        "performance/tokens_per_s": Mean(tokens_per_s),
        "performance/tokens_per_s_per_worker": Mean(tokens_per_s / num_workers),
        "performance/train_tokens_per_s": Mean(train_tokens_per_s),
        "performance/train_tflops_per_s_per_worker": Mean(flops_per_s_per_worker / 1e12),
        "performance/train_mfu": Mean(flops_per_s_per_worker / peak_flops),
    }


def plan_rows(policy: Policy, batch: BatchedDataDict, purpose: Purpose = "train") -> BatchPlan:
    """Plan the rows of a batch by their lengths and trained tokens; see `Policy.plan`.

    Rows with an equal id in the column `pair`, if there is one, share a microbatch.
    """
    return policy.plan(batch["length"], purpose, batch.get("pair"), num_trained_tokens(batch))


def plan_metrics(plan: BatchPlan) -> Metrics:
    """Return the metrics of the step's packing and balance."""
    return {name: Mean(value) for name, value in plan.metrics().items()}
