"""Llama 2 and 3, and models with their configuration, such as SmolLM2."""

from __future__ import annotations

from nemo_like.policy.megatron.families.family import Family


class Llama(Family):
    """The decoder that `Family` describes."""
