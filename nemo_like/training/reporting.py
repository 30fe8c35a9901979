"""What a run reports: its header, one line per step, and the metrics of throughput and plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nemo_like.config.parallel import num_policy_workers
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import counted
from nemo_like.data.columns import num_trained_tokens
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.metrics import Mean, Metrics, Timers
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import Purpose
from nemo_like.policy.policy import Policy
from nemo_like.prediction.placement import frozen_share
from nemo_like.training.model_files import lora_line

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


_OPTIMIZER = (
    ("policy/grad_norm", "grad norm {:.3g}"),
    ("policy/lr", "lr {:.3g}"),
    ("packing/utilization", "packed {:.0%}"),
)
_GENERATION = (
    ("generation/truncated_share", "truncated {:.0%}"),
    ("generation/completion_length_mean", "length {:.0f}"),
)
_STEP_COLUMNS = {
    "sft": (("policy/loss", "loss {:.4f}"), *_OPTIMIZER),
    "grpo": (
        ("reward/mean", "reward {:.3f}"),
        ("reward/frac_groups_zero_std", "equal rewards {:.0%}"),
        *_GENERATION,
        # Only one of them is logged, and none without a KL term.
        ("policy/reference_kl_k1", "kl {:.2g}"),
        ("policy/reference_kl_k2", "kl {:.2g}"),
        ("policy/reference_kl_k3", "kl {:.2g}"),
        ("policy/grad_norm", "grad norm {:.3g}"),
    ),
    "dpo": (
        ("policy/loss", "loss {:.4f}"),
        ("rewards/accuracies", "accuracy {:.0%}"),
        ("rewards/margins", "margin {:.3g}"),
        *_OPTIMIZER,
    ),
    "rm": (
        ("policy/loss", "loss {:.4f}"),
        ("rm/accuracy", "accuracy {:.0%}"),
        ("rm/margin", "margin {:.3g}"),
        *_OPTIMIZER,
    ),
    "distill": (
        ("policy/loss", "loss {:.4f}"),
        ("reward/mean", "reward {:.3f}"),
        *_GENERATION,
        *_OPTIMIZER,
    ),
}
"""(metric, format) of the step line of each job. The loss of GRPO is not in it: its value is
about 0 in every step, because the mean advantage is."""
_TIME = (("performance/tokens_per_s", "{:,.0f} tokens/s"), ("timing/step_s", "{:.1f} s"))


def header_lines(
    config: RunConfig, directory: Path, model: ModelSpec, num_rows: int, num_steps: int | None
) -> Iterator[str]:
    """Yield the lines that describe a run before its workers start.

    `num_rows` are the examples of the training files; `num_steps` is None if it is not known.
    """
    yield f"{config.kind} run in {directory}"
    sizes = f"{model.num_params:,} parameters"
    if config.policy.freeze:
        share = 1 - frozen_share(model, config.policy.freeze)
        sizes += f", {share:.1%} of them trained (policy.freeze)"
    elif not config.policy.lora.enabled:
        sizes += ", all trained"
    yield f"model: {config.policy.model_name}, {sizes}"
    if config.policy.lora.enabled:
        yield lora_line(config.policy.lora, model)
    cluster = config.cluster
    num_workers = num_policy_workers(cluster)
    device = f"CPU, {counted(num_workers, 'worker')}"
    if cluster.gpus_per_node:
        device = counted(num_workers, "GPU")
    if cluster.num_nodes > 1:
        device += f" on {cluster.num_nodes} nodes"
    yield f"device: {device}, {config.policy.precision}"
    length = "" if num_steps is None else f", {counted(num_steps, 'step')}"
    if config.has_fixed_batches:
        length += f"; {config.batch_lines()[0]}"
    yield f"data: {counted(num_rows, config.example)}{length}"


def step_line(kind: str, step: int, num_steps: int | None, metrics: Mapping[str, float]) -> str:
    """Return the lines of a step of the job `kind`, without those that it has no metrics for.

    Example: `step 3/100  loss 1.2345  grad norm 2.1  lr 1e-05  1,200 tokens/s  4.1 s` and
    `step 3/100  validation: loss 1.1, perplexity 3`.
    """
    start = f"step {step}" if num_steps is None else f"step {step}/{num_steps}"
    parts = []
    # An algorithm without an entry shows its loss.
    for name, form in (*_STEP_COLUMNS.get(kind, _STEP_COLUMNS["sft"]), *_TIME):
        if name in metrics:
            rewards = _rewards_shown(metrics) if name == "reward/mean" else ""
            parts.append(form.format(metrics[name]) + rewards)
    lines = ["  ".join([start, *parts])] if parts else []
    # Validation metrics depend on the sets and the rewards, so they are not listed by name.
    prefix = "validation/"
    validation = [
        f"{name.removeprefix(prefix)} {value:.4g}"
        for name, value in metrics.items()
        if name.startswith(prefix)
    ]
    if validation:
        lines.append(f"{start}  validation: {', '.join(validation)}")
    return "\n".join(lines)


def _rewards_shown(metrics: Mapping[str, float]) -> str:
    """Return the mean of each reward if there are several: ` (answer 0.500, format 1.000)`."""
    means = []
    for name, value in metrics.items():
        reward = name.removeprefix("reward/").removesuffix("_mean")
        # Penalties have no standard deviation.
        if name == f"reward/{reward}_mean" and f"reward/{reward}_std" in metrics:
            means.append(f"{reward} {value:.3f}")
    return f" ({', '.join(means)})" if len(means) > 1 else ""
