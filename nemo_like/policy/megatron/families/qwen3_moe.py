"""Qwen3-MoE: Qwen3 with mixture-of-experts layers, some or all."""

from __future__ import annotations

from nemo_like.policy.megatron.families.dense import Qwen3
from nemo_like.policy.megatron.families.experts import ExpertLayers


class Qwen3Moe(ExpertLayers, Qwen3):
    """A Qwen3 with experts; `ModelSpec.moe` has everything in which its models differ."""
