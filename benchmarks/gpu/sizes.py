"""Sizes of the measurements: `full` for a large GPU, `tiny` to run every part on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_like.models.spec import PRESETS


def _preset(size: str, **changes: Any) -> dict[str, Any]:
    return {**PRESETS[size][1], "max_position_embeddings": 131072, **changes}


_TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}
_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "norm_topk_prob": True,
    "tie_word_embeddings": True,
}
_QWEN3_30B_LAYER: dict[str, Any] = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 40960,
}
"""Qwen3-30B-A3B, one of its 48 layers. The vocabulary is small, so that the layer dominates."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The sizes of all parts."""

    name: str
    models: dict[str, dict[str, Any]]
    """Hugging Face configurations by name."""
    budgets: tuple[int, ...]
    """Tokens per microbatch of the step matrix."""
    main_budget: int
    """Tokens per microbatch of all other measurements."""
    matrix_longest: int
    """Max tokens of a row in the matrix: at most the smallest budget."""
    longest: int
    """Max tokens of a row in all other measurements."""
    mean_length: int
    """Mean tokens of a row before the longest are cut off."""
    min_step_tokens: int
    """Min tokens of an optimizer step."""
    num_steps: int
    """Timed steps; the median is recorded."""
    vocab_size: int
    """Vocabulary of the log-prob check."""
    check_tokens: int
    """Tokens of the log-prob check."""
    moe_tokens: int
    """Tokens of the comparison of MoE layers."""
    transfer_bytes: int
    prompt_tokens: int
    generated_tokens: int
    generation_rows: tuple[int, ...]
    grpo_prompts: int
    grpo_group: int
    grpo_new_tokens: int


FULL = Size(
    name="full",
    models={
        "1b": _preset("1b"),
        "3b": _preset("3b"),
        # The output embedding has the share of the work that it has with all 32 layers.
        "8b-shape": _preset("8b", num_hidden_layers=8, vocab_size=32768),
        "1.5b": _preset("1.5b"),
        "moe-layer": _MOE | _QWEN3_30B_LAYER,
    },
    budgets=(2048, 8192, 16384, 32768),
    main_budget=8192,
    matrix_longest=2048,
    longest=8192,
    mean_length=1024,
    min_step_tokens=65536,
    num_steps=3,
    vocab_size=151936,
    check_tokens=512,
    moe_tokens=8192,
    transfer_bytes=2**30,
    prompt_tokens=128,
    generated_tokens=128,
    generation_rows=(64, 512),
    grpo_prompts=16,
    grpo_group=16,
    grpo_new_tokens=256,
)

TINY = Size(
    name="tiny",
    models={
        "1b": {"model_type": "llama", **_TINY, "tie_word_embeddings": True},
        "3b": {"model_type": "llama", **_TINY, "tie_word_embeddings": True},
        "8b-shape": {"model_type": "llama", **_TINY, "tie_word_embeddings": False},
        "1.5b": {"model_type": "qwen2", **_TINY, "tie_word_embeddings": True},
        "moe-layer": {
            **_MOE,
            **_TINY,
            "num_hidden_layers": 1,
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    },
    budgets=(64, 128),
    main_budget=128,
    matrix_longest=64,
    longest=64,
    mean_length=24,
    min_step_tokens=128,
    num_steps=1,
    vocab_size=1000,
    check_tokens=40,
    moe_tokens=64,
    transfer_bytes=2**16,
    prompt_tokens=8,
    generated_tokens=4,
    generation_rows=(4,),
    grpo_prompts=2,
    grpo_group=2,
    grpo_new_tokens=6,
)

SIZES = {size.name: size for size in (FULL, TINY)}
