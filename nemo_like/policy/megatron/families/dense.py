"""Dense families that differ from Llama: Qwen2 (and Qwen2.5) and Qwen3."""

from __future__ import annotations

from typing import Any

from nemo_like.policy.megatron.families.family import Family
from nemo_like.policy.megatron.param_map import ModelSharding, RankParams


class Qwen2(Family):
    """A Llama with biases of the query, key and value projections."""

    def config(self, sharding: ModelSharding) -> dict[str, Any]:
        """See `Family.config`."""
        return {"add_qkv_bias": True}

    def add_attention(self, params: RankParams, attention: str, hf_attention: str) -> None:
        """See `Family.add_attention`."""
        super().add_attention(params, attention, hf_attention)
        params.add_qkv(f"{attention}.linear_qkv", hf_attention, "bias")


class Qwen3(Family):
    """A Llama that normalizes queries and keys per head (QK-norm)."""

    def config(self, sharding: ModelSharding) -> dict[str, Any]:
        """See `Family.config`."""
        return {"qk_layernorm": True}

    def add_attention(self, params: RankParams, attention: str, hf_attention: str) -> None:
        """See `Family.add_attention`."""
        super().add_attention(params, attention, hf_attention)
        # One weight for all heads.
        shape = (params.spec.head_dim,)
        for name in ("q", "k"):
            params.add_replicated(
                f"{attention}.{name}_layernorm.weight", f"{hf_attention}.{name}_norm.weight", shape
            )
