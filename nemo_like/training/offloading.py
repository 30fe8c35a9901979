"""The decision of `cluster.offload`: whether policy and generator take turns on their GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nemo_like.config.parallel import is_colocated, policy_layout
from nemo_like.config.schema import RunConfig
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import microbatch_budget
from nemo_like.policy.policy import Policy
from nemo_like.prediction.memory import CONTEXT_BYTES, GIB, SAFETY_SHARE, MemoryModel
from nemo_like.prediction.placement import policy_placement
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.rollout_workers import any_shares_gpus


@dataclass(frozen=True)
class OffloadDecision:
    """Whether policy and generator move to host memory while the other runs, and why."""

    offloads: bool
    reason: str


def run_offload_decision(config: RunConfig, policy: Policy) -> OffloadDecision:
    """Return whether policy and generator of a run take turns on their devices.

    They do not if they share no device: the memory of a CPU holds both.
    """
    if not is_colocated(config):
        return OffloadDecision(False, "policy and generator share no GPU")
    device_bytes = policy.device_info.memory_bytes
    if device_bytes is None:
        return OffloadDecision(False, "the workers have no GPU")
    if any_shares_gpus(config) and config.cluster.offload == "auto":
        return OffloadDecision(True, "a reward model shares their GPUs")
    return decide_offload(
        config.cluster.offload,
        policy_bytes=policy_peak_bytes(config, policy.model),
        generator_bytes=generation_backend(config).peak_bytes(config, policy.model, device_bytes),
        device_bytes=device_bytes,
    )


def decide_offload(
    mode: Literal["auto", "always", "never"],
    *,
    policy_bytes: float,
    generator_bytes: float,
    device_bytes: float,
) -> OffloadDecision:
    """Return the decision of `cluster.offload` for one GPU.

    With `auto` nothing is offloaded if the predicted peaks of policy and generator together fit in
    `device_bytes`, less a CUDA context per process and the safety margin of `prediction.memory`.
    The peaks add up although only one of the two computes at a time, because torch's allocator
    keeps the memory of activations.
    """
    if mode != "auto":
        return OffloadDecision(mode == "always", f"cluster.offload is {mode}")
    usable = max(0.0, (device_bytes - 2 * CONTEXT_BYTES) * (1.0 - SAFETY_SHARE))
    needed = policy_bytes + generator_bytes
    text = (
        f"predicted peaks of policy {policy_bytes / GIB:.1f} GiB and generator"
        f" {generator_bytes / GIB:.1f} GiB; {usable / GIB:.1f} GiB of a GPU's"
        f" {device_bytes / GIB:.1f} GiB are usable"
    )
    return OffloadDecision(needed > usable, text)


def policy_peak_bytes(config: RunConfig, spec: ModelSpec) -> float:
    """Return the predicted peak of a policy worker with its largest training microbatch."""
    teachers = [
        ModelSpec.from_config(load_model_config(name), name) for name in config.teacher_names
    ]
    placement = policy_placement(
        config.policy,
        policy_layout(config),
        needs_reference=config.needs_reference,
        teachers=tuple(teachers),
        keeps_teacher_embeddings=config.keeps_teacher_embeddings,
    )
    max_tokens, max_rows = microbatch_budget(config.policy, "train")
    if max_tokens is None:
        assert max_rows is not None, "a budget limits tokens or rows"
        max_tokens = max_rows * config.policy.max_total_sequence_length
    return MemoryModel(spec, placement).peak(max_tokens)
