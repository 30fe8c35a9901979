"""Checks of `policy.lora` that need neither the model nor files."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.lora import MAX_VLLM_RANK
from nemo_like.config.schema import RunConfig


def lora_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `policy.lora` that do not depend on the model."""
    lora = config.policy.lora
    if lora.enabled and not lora.target_modules:
        yield Problem(
            ("policy.lora.target_modules",),
            "policy.lora.target_modules is empty, so nothing would be trained: name linear layers,"
            " e.g. [q_proj, v_proj], or set policy.lora.enabled to false",
        )
    if lora.quantization != "none" and not lora.enabled:
        yield Problem(
            ("policy.lora.quantization", "policy.lora.enabled"),
            f"policy.lora.quantization is {lora.quantization}, but policy.lora.enabled is false,"
            " and quantized weights cannot be trained themselves: set policy.lora.enabled to true,"
            " or policy.lora.quantization to none",
        )
    if lora.is_quantized and config.policy.engine == "megatron":
        yield Problem(
            ("policy.lora.quantization", "policy.engine"),
            f"policy.lora.quantization is {lora.quantization}, but policy.engine is megatron, and"
            " the linear layers of Megatron-Core have no 4-bit weights: set policy.engine to"
            " dtensor, or policy.lora.quantization to none",
        )
    if lora.adapter_path is not None and not lora.enabled:
        yield Problem(
            ("policy.lora.adapter_path", "policy.lora.enabled"),
            f"policy.lora.adapter_path is {lora.adapter_path!r}, but policy.lora.enabled is false,"
            " so the adapter would not be used: set policy.lora.enabled to true, or"
            " policy.lora.adapter_path to null",
        )
    yield from _weight_sync(config)


def _weight_sync(config: RunConfig) -> Iterator[Problem]:
    lora = config.policy.lora
    sends_adapters = lora.sends_adapters(config.policy.precision)
    if lora.weight_sync == "adapter" and not lora.enabled:
        yield Problem(
            ("policy.lora.weight_sync", "policy.lora.enabled"),
            "policy.lora.weight_sync is adapter, but policy.lora.enabled is false, so there are no"
            " adapters to send: set policy.lora.enabled to true, or policy.lora.weight_sync to"
            " auto",
        )
    if sends_adapters and lora.is_quantized:
        yield Problem(
            ("policy.lora.weight_sync", "policy.lora.quantization"),
            "policy.lora.weight_sync is adapter, but policy.lora.quantization is"
            f" {lora.quantization}: the generator has the weights of the model files, and the"
            " policy those in 4 bits. Set policy.lora.weight_sync to merged, or"
            " policy.lora.quantization to none",
        )
    is_vllm = config.policy.generation.backend == "vllm"
    if sends_adapters and is_vllm and lora.rank > MAX_VLLM_RANK:
        yield Problem(
            ("policy.lora.rank", "policy.lora.weight_sync"),
            f"policy.lora.rank is {lora.rank}, but policy.lora.weight_sync is adapter, and vLLM has"
            f" adapters up to rank {MAX_VLLM_RANK}: lower policy.lora.rank, or set"
            " policy.lora.weight_sync to merged",
        )
