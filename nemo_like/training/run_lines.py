"""What a run prints about itself: its header, and one line per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from nemo_like.config.parallel import num_policy_workers
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import counted
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import frozen_share
from nemo_like.training.checks import lora_line

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
