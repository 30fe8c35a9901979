"""Whether policy and generator fit together on the GPUs that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nemo_like.config.schema import RunConfig
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.adapter_sizes import num_adapter_params
from nemo_like.prediction.memory import CONTEXT_BYTES, GIB, SAFETY_SHARE, MemoryModel
from nemo_like.prediction.placement import placement_of

OffloadMode = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class OffloadDecision:
    """Whether policy and generator move to host memory while the other runs, and why."""

    offloads: bool
    reason: str


def decide_offload(
    mode: OffloadMode, *, policy_bytes: float, generator_bytes: float, device_bytes: float
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


def policy_peak_bytes(
    config: RunConfig, spec: ModelSpec, max_tokens: int, teachers: Sequence[ModelSpec] = ()
) -> float:
    """Return the predicted peak of a policy worker with microbatches of `max_tokens`."""
    return MemoryModel(spec, placement_of(config, teachers)).peak(max_tokens)


def generator_peak_bytes(config: RunConfig, spec: ModelSpec, device_bytes: float) -> float:
    """Return the predicted peak of a generation worker on a GPU of `device_bytes`.

    vLLM takes its configured share of the GPU. The Hugging Face generator has the weights, LoRA
    adapters that are not merged into them, the KV cache of a batch of rows of the maximum length (a
    layer's cache twice while it grows), and the logits of one step in float32, twice for sampling.
    """
    generation = config.policy.generation
    if generation.backend == "vllm":
        return generation.vllm.gpu_memory_utilization * device_bytes
    num_value_bytes = 2 if config.policy.precision == "bfloat16" else 4
    kv_values = 2 * spec.num_kv_heads * spec.head_dim
    if spec.latent is not None:
        kv_values = spec.latent.kv_rank + spec.latent.rope_dim
    num_rows = generation.hf.batch_size
    num_positions = num_rows * config.policy.max_total_sequence_length
    cache = (spec.num_layers + 1) * kv_values * num_value_bytes * num_positions
    logits = 2 * 4 * num_rows * spec.vocab_size
    num_params = spec.num_params
    lora = config.policy.lora
    if lora.sends_adapters(config.policy.precision):
        num_params += num_adapter_params(spec, lora)
    return float(num_params * num_value_bytes + cache + logits)
