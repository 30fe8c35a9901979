"""LoRA adapters of a model: which layers can have one, and the names of its matrices."""

from __future__ import annotations

from typing import NamedTuple

from nemo_like.models.spec import ModelSpec


class AdapterNames(NamedTuple):
    """Names of the matrices of one adapter, as parameters of the model."""

    a: str
    b: str


def adapter_names(weight_name: str) -> AdapterNames:
    """Return the names of A and B of a layer's weight.

    Example: `layers.0.q_proj.weight` has `layers.0.q_proj.lora_A.weight` and `...lora_B.weight`.
    """
    layer = weight_name.removesuffix(".weight")
    return AdapterNames(f"{layer}.lora_A.weight", f"{layer}.lora_B.weight")


def is_adapter(name: str) -> bool:
    """Return True for the name of a matrix of an adapter."""
    return name.endswith((".lora_A.weight", ".lora_B.weight"))


def can_have_adapter(layer: str, spec: ModelSpec) -> bool:
    """Return True if the linear layer of this name, inside a decoder layer, can have an adapter.

    In an MoE model these are the projections of attention only. PEFT maps the names of
    feed-forward layers of such a model to its experts, so adapters of its dense layers could not
    be loaded.
    """
    return spec.moe is None or ".self_attn." in layer
