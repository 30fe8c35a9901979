"""Mixtral: Mistral with mixture-of-experts layers."""

from __future__ import annotations

from nemo_like.policy.megatron.families.experts import ExpertLayers


class Mixtral(ExpertLayers):
    """A Llama whose layers all have experts. The jitter of its router is left out, as elsewhere
    outside of pre-training.
    """
