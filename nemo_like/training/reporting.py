"""What a run reports: its header, warnings, step lines, and the metrics of throughput and plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.agents.statuses import Status
from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.needs import RunNeeds
from nemo_like.config.parallel import num_policy_workers
from nemo_like.config.schema import ClusterConfig, DataConfig, PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.images import RowImage
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.rows import Rows
from nemo_like.integer_math import nearest_multiples
from nemo_like.metrics import Mean, Metrics, Timers
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.prediction.placement import frozen_share
from nemo_like.training.model_files import adapter_line
from nemo_like.training.model_warnings import encoder_warnings, history_warnings, model_warnings
from nemo_like.training.run_data import training_name

_LARGE_SHARE = 0.1
"""Share of the initial weights in an average above which a run warns."""

_ALL = slice(None)
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
    shared: np.ndarray | None = None
    """Leading tokens of each row that another row computes, int64 [B]; None: rows are complete."""

    @classmethod
    def of(cls, plan: BatchPlan, *, num_logprob_passes: int = 0, num_epochs: int = 1) -> StepWork:
        """Return the work on the rows of a plan, in its order, after truncation."""
        assert plan.num_trained is not None, "the rows of a step have a token mask"
        return cls(
            lengths=plan.lengths,
            num_trained=plan.num_trained,
            num_logprob_passes=num_logprob_passes,
            num_epochs=num_epochs,
            shared=plan.shared,
        )

    def forward_flops(self, cost: CostModel, rows: np.ndarray | slice = _ALL) -> float:
        """Return the forward FLOPs of the tokens that are computed, of all rows or of some."""
        shared = None if self.shared is None else self.shared[rows]
        return float(cost.of(self.lengths[rows], self.num_trained[rows], shared).sum())


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
    output projection of tokens with loss only, in log-prob passes too. Leading tokens that rows
    share count once per microbatch; a log-prob pass and further epochs count as the first training
    pass, although their microbatches may share more or less. MFU = ((3 x `num_epochs` +
    `num_logprob_passes`) x forward FLOPs + `teacher_flops`) / (seconds of all passes x workers x
    `peak_flops`). With `has_frozen_weights` (adapters) the gradients of weights are
    not computed, so the products with weights count twice instead of three times. Rates of tokens
    count the rows of a step once, with the tokens that they share.
    """
    forward_flops = work.forward_flops(cost)
    num_tokens = float(work.lengths.sum())
    train_s = timers.seconds("train")
    step_s = timers.seconds("step")
    # The training pass computes the logits of the teachers, so neither of both times is enough.
    compute_s = train_s + timers.seconds("logprobs") + timers.seconds("teacher")
    trained_flops = FLOPS_PER_TRAINED_UNIT * forward_flops
    if has_frozen_weights:
        computed = work.lengths if work.shared is None else work.lengths - work.shared
        trained_flops -= float(cost.products(computed, work.num_trained).sum())
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


def full_length_metrics(work: StepWork, config: PolicyConfig) -> Metrics:
    """Return the share of rows with the max length, where longer rows are truncated to it."""
    if config.oversize_rows != "truncate" or len(work.lengths) == 0:
        return {}
    num_full = float((work.lengths >= config.max_total_sequence_length).sum())
    return {"data/full_length_share": Mean(num_full, float(len(work.lengths)))}


def image_metrics(images: Sequence[Sequence[RowImage]]) -> Metrics:
    """Count the images of the rows of a step; nothing without any.

    An image of several rows is one unique image. A microbatch computes it once.
    """
    found = [image for row in images for image in row]
    if not found:
        return {}
    unique = {(image.image, image.grid) for image in found}
    counts = {
        "num_images": len(found),
        "num_image_tokens": sum(image.num_tokens for image in found),
        "num_patches": sum(math.prod(image.grid) for image in found),
        "num_unique_patches": sum(math.prod(grid) for _, grid in unique),
    }
    return {f"data/{name}": Mean(float(count)) for name, count in counts.items()}


TRAINED = "num_trained_tokens"
"""Counter of the trained tokens of a run."""


def new_counters() -> dict[str, float]:
    """Return the counters of a new run, which are logged as `progress/<name>`."""
    return {"num_tokens": 0.0, "num_rows": 0.0, TRAINED: 0.0}


def check_trained(policy: PolicyConfig, needs: RunNeeds, counters: Mapping[str, float]) -> None:
    """Raise ConfigError if no step of a run has trained a token.

    Checkpoints of earlier versions have no such counter.
    """
    if counters.get(TRAINED) != 0:
        return
    cause = (
        "the rows have no token with loss within policy.max_total_sequence_length"
        f" {policy.max_total_sequence_length}, to which policy.oversize_rows={policy.oversize_rows}"
        " cuts them: raise it, or set policy.oversize_rows to error or drop"
    )
    if needs.rollouts is not None:
        cause = (
            "all completions were left out: check reward.on_error, environment.on_error,"
            " grpo.overlong.filter and grpo.dynamic_sampling"
        )
        if needs.rollouts.environment.is_program:
            cause = (
                "no episode has a call to train: check that the program calls the model at its"
                " OPENAI_BASE_URL, and policy.max_total_sequence_length if episodes end as"
                " limit_tokens (nemo-like show has their statuses); then reward.on_error,"
                " environment.on_error and grpo.dynamic_sampling"
            )
    raise ConfigError(f"no step of this run has trained a token, so nothing is exported; {cause}")


def plan_metrics(plan: BatchPlan) -> Metrics:
    """Return the metrics of the step's packing and balance."""
    return {name: Mean(value) for name, value in plan.metrics().items()}


_STEP_COLUMNS = (
    ("policy/loss", "loss {:.4f}"),
    ("rewards/accuracies", "accuracy {:.0%}"),
    ("rewards/margins", "margin {:.3g}"),
    ("rm/accuracy", "accuracy {:.0%}"),
    ("rm/margin", "margin {:.3g}"),
    ("reward/mean", "reward {:.3f}"),
    ("reward/frac_groups_zero_std", "equal rewards {:.0%}"),
    ("generation/truncated_share", "truncated {:.0%}"),
    ("generation/completion_length_mean", "length {:.0f}"),
    # Only one of them is logged, and none without a KL term.
    ("policy/reference_kl_k1", "kl {:.2g}"),
    ("policy/reference_kl_k2", "kl {:.2g}"),
    ("policy/reference_kl_k3", "kl {:.2g}"),
    ("policy/grad_norm", "grad norm {:.3g}"),
    ("policy/lr", "lr {:.3g}"),
    ("packing/utilization", "packed {:.0%}"),
    ("performance/tokens_per_s", "{:,.0f} tokens/s"),
    ("timing/step_s", "{:.1f} s"),
)
"""(metric, format) of the step line. A job shows the metrics that it logs."""


def header_lines(
    policy: PolicyConfig,
    cluster: ClusterConfig,
    needs: RunNeeds,
    model: ModelSpec,
    num_examples: int,
    num_steps: int | None,
) -> Iterator[str]:
    """Yield the lines that describe a run before its workers start.

    `num_examples` counts the training files; `num_steps` is None if it is not known.
    """
    sizes = f"{model.num_params:,} parameters"
    if policy.freeze:
        share = 1 - frozen_share(model, policy.freeze)
        sizes += f", {share:.1%} of them trained (policy.freeze)"
    elif policy.adapter is None:
        sizes += ", all trained"
    yield f"model: {policy.model_name}, {sizes}"
    adapters = adapter_line(policy, needs, model)
    if adapters is not None:
        yield adapters
    yield device_line(cluster, policy.precision)
    length = "" if num_steps is None else f", {counted(num_steps, 'step')}"
    if needs.batch.is_fixed:
        length += f"; {needs.batch.lines[0]}"
    yield f"data: {counted(num_examples, needs.batch.example)}{length}"


def device_line(cluster: ClusterConfig, precision: str) -> str:
    """Describe the devices of the policy. Example: `device: CPU, 2 workers, float32`."""
    num_workers = num_policy_workers(cluster)
    device = f"CPU, {counted(num_workers, 'worker')}"
    if cluster.gpus_per_node:
        device = counted(num_workers, "GPU")
    if cluster.num_nodes > 1:
        device += f" on {cluster.num_nodes} nodes"
    return f"device: {device}, {precision}"


def no_gpu_text(cluster: ClusterConfig) -> str:
    """Return what to change if the GPUs of a config are not there."""
    return (
        f"cluster.gpus_per_node is {cluster.gpus_per_node}, but this machine has no GPU that torch"
        " can use; set cluster.gpus_per_node=0 to run on the CPU, or use cluster.backend=ray with"
        " nodes that have GPUs"
    )


def step_line(kind: str, step: int, num_steps: int | None, metrics: Mapping[str, float]) -> str:
    """Return the lines of a step of the job `kind`, without those that it has no metrics for.

    Example: `step 3/100  loss 1.2345  grad norm 2.1  lr 1e-05  1,200 tokens/s  4.1 s` and
    `step 3/100  validation: loss 1.1, perplexity 3`.
    """
    start = f"step {step}" if num_steps is None else f"step {step}/{num_steps}"
    parts = []
    for name, form in _STEP_COLUMNS:
        # The loss of GRPO is about 0 in every step, because the mean advantage is.
        if name in metrics and (kind, name) != ("grpo", "policy/loss"):
            rewards = _rewards_shown(metrics) if name == "reward/mean" else ""
            parts.append(form.format(metrics[name]) + rewards + _ends_shown(name, metrics))
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


def _ends_shown(name: str, metrics: Mapping[str, float]) -> str:
    """Return how episodes have ended, behind the metrics of the reward; empty without programs."""
    if name != "reward/mean" or "episodes/started" not in metrics:
        return ""
    counts = {each.value: metrics[f"episodes/num_{each.value}"] for each in Status}
    counts["replaced"] = metrics["episodes/replaced"]
    parts = [f"{count:.0f} {status}" for status, count in counts.items() if count]
    return f"  episodes {', '.join(parts)}"


def start_line(phases: Mapping[str, float]) -> str:
    """Return the line about the phases of a start, `timing/start_<phase>_s`."""
    described = []
    for name, seconds in phases.items():
        phase = name.partition("start_")[2].removesuffix("_s")
        described.append(f"{phase.replace('_', ' ')} {seconds:.1f} s")
    return f"start: {', '.join(described)}"


def step_note(metrics: Mapping[str, float]) -> str:
    """Return the reward or the loss of a step, and its speed, for the progress bar.

    Example: `reward 0.530, 1,200 tokens/s`.
    """
    names = ["reward/mean" if "reward/mean" in metrics else "policy/loss"]
    names.append("performance/tokens_per_s")
    forms = dict(_STEP_COLUMNS)
    return ", ".join(forms[name].format(metrics[name]) for name in names if name in metrics)


def _rewards_shown(metrics: Mapping[str, float]) -> str:
    """Return the mean of each reward if there are several: ` (answer 0.500, format 1.000)`."""
    means = []
    for name, value in metrics.items():
        reward = name.removeprefix("reward/").removesuffix("_mean")
        # Penalties have no standard deviation.
        if name == f"reward/{reward}_mean" and f"reward/{reward}_std" in metrics:
            means.append(f"{reward} {value:.3f}")
    return f" ({', '.join(means)})" if len(means) > 1 else ""


def config_warnings(policy: PolicyConfig, needs: RunNeeds, layout: ParallelLayout) -> Iterator[str]:
    """Yield warnings about keys that are legal and probably not intended."""
    batch_size = policy.train_global_batch_size
    replicas = layout.dp
    if needs.batch.is_fixed and batch_size % replicas:
        noun = "workers" if layout.replica_size == 1 else "model replicas"
        sizes = nearest_multiples(batch_size, replicas)
        yield (
            f"policy.train_global_batch_size {batch_size} does not divide by the {replicas} {noun},"
            f" so some have more rows than others in every step; {sizes} would divide"
        )


def rows_warnings(data: DataConfig, needs: RunNeeds, rows: Rows) -> Iterator[str]:
    """Yield the warnings that follow from the training rows."""
    key, batch_size = needs.batch.key, needs.batch.num_examples
    num_rows = len(rows)
    if needs.batch.is_fixed and num_rows < batch_size:
        yield (
            f"{training_name(data)} has {counted(num_rows, 'row')}, fewer than one"
            f" batch ({key} {batch_size}); set {key} to at most {num_rows}, or add rows"
        )


def start_warnings(
    policy: PolicyConfig,
    needs: RunNeeds,
    layout: ParallelLayout,
    encoder: ChatEncoder,
    num_steps: int | None,
) -> Iterator[str]:
    """Yield the warnings of a run before its first step; `num_steps` is None if it is not known."""
    yield from config_warnings(policy, needs, layout)
    yield from model_warnings(policy, needs_reference=needs.reference)
    yield from encoder_warnings(policy, encoder)
    if needs.rollouts is not None:
        yield from history_warnings(needs.rollouts.environment, encoder)
    if num_steps is not None:
        yield from step_warnings(policy, num_steps)
    if needs.rollouts is None:
        yield from encoder.sft_warnings()


def step_warnings(policy: PolicyConfig, num_steps: int) -> Iterator[str]:
    """Warn of lengths that do not fit to a run of `num_steps` optimizer steps."""
    warmup = policy.scheduler.warmup_steps
    # The schedule is legal: the learning rate just never reaches its maximum.
    if warmup > num_steps:
        yield (
            f"policy.scheduler.warmup_steps is {warmup}, but the run has"
            f" {counted(num_steps, 'optimizer step')}, so the learning rate ends at"
            f" {num_steps / warmup:.0%} of policy.optimizer.lr; set it to {num_steps} or less"
        )
    ema = policy.ema
    if ema.enabled:
        share = ema.decay**num_steps
        if share > _LARGE_SHARE:
            decay = 1 - 10 / num_steps
            yield (
                f"policy.ema.decay is {ema.decay}, and the run has"
                f" {counted(num_steps, 'optimizer step')}, so {share:.0%} of the averaged weights"
                f" come from its beginning; set it to {max(decay, 0):.3g} or less"
            )
