"""Mistral, dense."""

from __future__ import annotations

from nemo_like.policy.megatron.families.family import Family


class Mistral(Family):
    """A Llama; where it has a sliding window, every layer has it (`ModelSpec.windows`)."""
