"""Steps of LoRA, other optimizers, averages, reward models and distillation on one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.gpu.cells import require_modules
from benchmarks.gpu.policies import Options, PolicyHolder, policy_config
from benchmarks.gpu.rows import random_rows
from benchmarks.gpu.training_steps import StepCase, throughput, time_calls
from nemo_like.algorithms.preferences.loss import BradleyTerryLoss
from nemo_like.config.schema import AdapterConfig, EmaConfig, OptimizerConfig
from nemo_like.losses.likelihood import DistillationLoss, Divergence
from nemo_like.policy.heads.targets import TargetSettings

_LORA: Options = {"policy.lora": AdapterConfig(enabled=True)}
_RATE = 1e-6

OPTIONS: Mapping[str, Options] = {
    "LoRA rank 16": _LORA,
    "LoRA rank 16, full checkpointing": {**_LORA, "policy.activation_checkpointing": "full"},
    "Muon": {"policy.optimizer": OptimizerConfig(name="muon", lr=_RATE)},
    "AdamW 8 bits": {"policy.optimizer": OptimizerConfig(name="adamw_8bit", lr=_RATE)},
    "EMA": {"policy.ema": EmaConfig(enabled=True)},
    "embeddings frozen": {"policy.freeze": ("model.embed_tokens.*",)},
}
"""Settings of a step that trains on the tokens of its rows."""

TARGETS: Mapping[str, TargetSettings] = {
    "distillation, reverse KL": TargetSettings(),
    "distillation, JSD": TargetSettings(divergence=Divergence(kind="jsd")),
    "distillation, reverse KL of 64 tokens": TargetSettings(top_k=64),
}
"""The teacher has the size of the student."""


def check_packages(options: Options) -> None:
    """Raise SkipCell if an option needs a package that is missing."""
    optimizer = options.get("policy.optimizer")
    if optimizer is not None and optimizer.name == "adamw_8bit":
        require_modules("torchao")


def shown_options(options: Options) -> Iterator[tuple[str, str]]:
    """Yield key and text of each option, as a record has them."""
    for key, value in options.items():
        yield key, str(value)


def time_distillation(
    case: StepCase, holder: PolicyHolder, device: str, settings: TargetSettings
) -> dict[str, Any]:
    """Return the median seconds of the teacher's pass and of the step that trains on it."""
    policy = holder.get(_config(case), arguments={"teachers": [str(case.folder)]})
    batch = random_rows(case.lengths, policy.model.vocab_size)
    sharded = policy.shard(batch, policy.plan(batch["length"]))
    targets = policy.compute_targets(sharded, settings)
    metrics: dict[str, Any] = {}

    def teach() -> None:
        nonlocal targets
        targets = policy.compute_targets(sharded, settings)

    def train() -> None:
        nonlocal metrics
        metrics = policy.train(sharded, None, DistillationLoss(), targets)[0]

    teacher = time_calls(teach, device, case.num_steps, 1)
    student = time_calls(train, device, case.num_steps, 1)
    seconds = teacher["median_s"] + student["median_s"]
    return throughput(case.folder, case.lengths, seconds, device) | {
        "step_s": seconds,
        "teacher_s": teacher["median_s"],
        "train_s": student["median_s"],
        "divergence": float(metrics["policy/divergence"].value),
        **_peak(metrics),
    }


def time_scores(case: StepCase, holder: PolicyHolder, device: str) -> dict[str, Any]:
    """Return the median seconds of a step of a reward model, and of a pass that scores the rows."""
    policy = holder.get(_config(case), arguments={"head": "scores"})
    num_pairs = len(case.lengths) // 2
    lengths = case.lengths[: 2 * num_pairs]
    batch = random_rows(lengths, policy.model.vocab_size)
    batch["pair"] = np.repeat(np.arange(num_pairs, dtype=np.int64), 2)
    batch["is_chosen"] = np.tile([True, False], num_pairs)
    sharded = policy.shard(batch, policy.plan(lengths, groups=batch["pair"]))
    metrics: dict[str, Any] = {}

    def train() -> None:
        nonlocal metrics
        metrics = policy.train(sharded, None, BradleyTerryLoss())[0]

    training = time_calls(train, device, case.num_steps, 1)
    scoring = time_calls(lambda: policy.compute_scores(sharded), device, case.num_steps, 1)
    return throughput(case.folder, lengths, training["median_s"], device) | {
        "step_s": training["median_s"],
        "score_pass_s": scoring["median_s"],
        "score_tokens_per_s": float(lengths.sum()) / scoring["median_s"],
        "loss": float(metrics["policy/loss"].value),
        **_peak(metrics),
    }


def _config(case: StepCase) -> Any:
    return policy_config(
        case.folder,
        budget=case.budget,
        num_rows=len(case.lengths),
        longest=case.longest,
        options=case.options,
    )


def _peak(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the peak memory of a step; nothing on the CPU."""
    peak = metrics.get("policy/peak_memory_gb")
    return {} if peak is None else {"peak_gb": round(float(peak.value), 2)}
