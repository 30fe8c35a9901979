"""The decision of `cluster.offload` for a run."""

from __future__ import annotations

from nemo_like.config.parallel import is_colocated
from nemo_like.config.schema import RunConfig
from nemo_like.models.pretrained import load_model_config
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import microbatch_budget
from nemo_like.policy.policy import Policy
from nemo_like.prediction.offload import (
    OffloadDecision,
    decide_offload,
    generator_peak_bytes,
    policy_peak_bytes,
)
from nemo_like.training.rollout_workers import any_shares_gpus


def run_offload_decision(config: RunConfig, policy: Policy) -> OffloadDecision:
    """Return whether policy and generator of a run take turns on their devices.

    They do not where they share none: the memory of a CPU holds both.
    """
    if not is_colocated(config):
        return OffloadDecision(False, "policy and generator share no GPU")
    device_bytes = policy.device_info.memory_bytes
    if device_bytes is None:
        return OffloadDecision(False, "the workers have no GPU")
    if any_shares_gpus(config) and config.cluster.offload == "auto":
        return OffloadDecision(True, "a reward model shares their GPUs")
    teachers = []
    for name in config.teacher_names:
        model_config = load_model_config(name)
        teachers.append(ModelSpec.from_config(model_config, name))
    max_tokens = _max_microbatch_tokens(config)
    return decide_offload(
        config.cluster.offload,
        policy_bytes=policy_peak_bytes(config, policy.model, max_tokens, teachers),
        generator_bytes=generator_peak_bytes(config, policy.model, device_bytes),
        device_bytes=device_bytes,
    )


def _max_microbatch_tokens(config: RunConfig) -> int:
    """Return the tokens of the largest microbatch that is trained."""
    max_tokens, max_rows = microbatch_budget(config.policy, "train")
    if max_tokens is not None:
        return max_tokens
    assert max_rows is not None, "a budget limits tokens or rows"
    return max_rows * config.policy.max_total_sequence_length
