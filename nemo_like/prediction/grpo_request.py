"""Inputs of the prediction of a GRPO step: lengths, split of devices, rates, measured times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.plan import PlanSpec
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import Placement
from nemo_like.prediction.rollout_time import Batching
from nemo_like.prediction.step_time import ACHIEVED_FLOPS

Phase = Literal["rollout", "reward_model", "logprobs", "train", "weight_sync"]
PHASES: tuple[Phase, ...] = ("rollout", "reward_model", "logprobs", "train", "weight_sync")
MAX_ROLLOUTS = 4
"""Rollouts that are simulated; the times are means over them."""


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """Rates that one device achieves."""

    name: str
    flops: float
    """FLOP/s of training and of prompts."""
    memory_bytes_per_s: float
    """Reading of weights and KV cache in decoding."""
    link_bytes_per_s: float
    """Transfer of new weights to the replicas, one copy for all."""
    decode_overhead_s: float
    """Constant time of a decode step."""


GPU_RATES = DeviceRates(
    name="GPU of an H100 node",
    flops=ACHIEVED_FLOPS,
    memory_bytes_per_s=2e12,
    link_bytes_per_s=20e9,
    decode_overhead_s=3e-3,
)
CPU_RATES = DeviceRates(
    name="CPU worker",
    flops=50e9,
    memory_bytes_per_s=10e9,
    link_bytes_per_s=1e9,
    decode_overhead_s=1e-3,
)


@dataclass(frozen=True, eq=False)
class RolloutLengths:
    """Tokens of the rows of one rollout, prompt-major, int64 [B] each."""

    prompts: np.ndarray
    completions: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """Tokens of prompt and completion together, int64 [B]."""
        return self.prompts + self.completions


@dataclass(frozen=True, kw_only=True)
class Split:
    """Workers of the policy and of generation; colocated ones share their devices."""

    policy: int
    generation: int
    is_colocated: bool

    @property
    def num_devices(self) -> int:
        return self.policy if self.is_colocated else self.policy + self.generation

    def __str__(self) -> str:
        if self.is_colocated:
            return f"{self.policy} shared"
        return f"{self.policy} + {self.generation}"


@dataclass(frozen=True, kw_only=True)
class ScoringModel:
    """A reward model that scores every completion of a rollout."""

    name: str
    cost: CostModel
    max_tokens: int
    """Token limit of its microbatches."""
    num_workers: int
    """Workers of its own; 0: those of the policy."""


@dataclass(frozen=True, kw_only=True)
class GrpoStepRequest:
    """A GRPO run to predict."""

    rollouts: tuple[RolloutLengths, ...]
    source: str
    """Where the lengths are from."""
    group_size: int
    model: ModelSpec
    placement: Placement
    spec: PlanSpec
    """How the policy forms microbatches; the number of ranks is that of each split."""
    split: Split
    """The split of the config."""
    batching: Batching
    workers_per_replica: int = 1
    num_logprob_passes: int = 0
    """Forward passes before training: of the policy, and of the reference."""
    num_epochs: int = 1
    """Passes over the rows of a rollout."""
    rates: DeviceRates = GPU_RATES
    reward_models: tuple[ScoringModel, ...] = ()


@dataclass(frozen=True, kw_only=True)
class MeasuredTimes:
    """Mean seconds of the phases of a past run."""

    seconds: Mapping[Phase, float]
    """Phases without a measurement are missing."""
    reward_s: float
    num_steps: int
    source: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors that turn predicted into measured seconds."""

    factors: Mapping[Phase, float] = field(default_factory=dict)
    reward_s: float = 0.0
    source: str = ""
    """Empty for none."""

    def factor(self, phase: Phase) -> float:
        """Return the factor of a phase; forward passes that were not measured take training's."""
        if phase in ("logprobs", "reward_model") and phase not in self.factors:
            return self.factors.get("train", 1.0)
        return self.factors.get(phase, 1.0)


def assumptions(request: GrpoStepRequest, calibration: Calibration) -> list[str]:
    """Return what the predicted times are computed from, one sentence or more each."""
    rates = request.rates
    batching = request.batching
    rows = np.concatenate([rollout.completions for rollout in request.rollouts])
    admission = "continuous batching"
    if batching.is_static:
        admission = "static batches, which wait for their longest row"
    prefix = "once per group and replica" if batching.shares_prefix else "once per row"
    num_simulated = min(len(request.rollouts), MAX_ROLLOUTS)
    rollouts = "1 rollout" if num_simulated == 1 else f"the mean of {num_simulated} rollouts"
    lora = request.placement.lora
    sent = "weights"
    if lora is not None and lora.sends_adapters(request.placement.precision):
        sent = "LoRA adapters"
    lines = [
        (
            f"GRPO step: {rollouts}; completions of {request.source}, mean"
            f" {rows.mean():,.0f} tokens, longest {rows.max():,}."
        ),
        (
            f"rates of one device ({rates.name}): {rates.flops / 1e12:g} TFLOP/s in training and"
            f" prompts, {rates.memory_bytes_per_s / 1e9:g} GB/s of memory in decoding,"
            f" {rates.link_bytes_per_s / 1e9:g} GB/s for new weights,"
            f" {rates.decode_overhead_s * 1e3:g} ms per decode step."
        ),
        (
            f"rollout: {admission}, up to {batching.max_running} rows per replica of"
            f" {request.workers_per_replica} device(s); a decode step is the larger of reading"
            " weights and KV cache and of computing, plus the constant; prompts are computed"
            f" {prefix}. The KV cache is assumed to fit."
        ),
        (
            f"log-probs: {request.num_logprob_passes} forward pass(es) before training. Training:"
            f" {request.num_epochs} pass(es) of forward and backward of the plan, recomputation"
            " included; the optimizer's own time is not."
        ),
        (
            f"weight synchronization: one copy of the {sent} over the link, whatever the number of"
            " replicas is. Synchronous: the sum of all phases. Staleness 1: the slower of rollout"
            " with rewards and of log-probs with training, plus the synchronization; it needs"
            " separate devices."
        ),
    ]
    if request.reward_models:
        names = ", ".join(model.name for model in request.reward_models)
        lines.append(
            f"reward models ({names}): one forward pass over the rows of a rollout, with as many"
            " tokens as the policy has, after the rollout and before training in both columns of a"
            " step; encoding and moves between host and device are not included."
        )
    if calibration.source:
        factors = ", ".join(
            f"{phase} x {calibration.factors[phase]:.3g}"
            for phase in PHASES
            if phase in calibration.factors
        )
        lines.append(
            f"calibrated with {calibration.source}: predicted times are multiplied so that the"
            f" run's own split has its measured means ({factors}), and rewards take the measured"
            f" {calibration.reward_s:.3g} s. Other splits keep these factors."
        )
    else:
        lines.append(
            "nothing was measured: the ratio of phases is more reliable than the seconds, and"
            " reward functions are not included. --metrics of a past run calibrates the rates."
        )
    return lines
