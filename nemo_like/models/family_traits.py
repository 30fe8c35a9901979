"""Properties of all models of one `model_type` that their configurations do not name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FamilyTraits:
    """The defaults are Llama's."""

    num_mlp_matrices: int = 3
    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    has_window_in_every_layer: bool = False
    """`max_window_layers` is ignored: a sliding window applies to every layer."""
    normalizes_weights: bool = False
    """See `MoeSpec` of `nemo_like.models.spec`."""


_UNGATED = FamilyTraits(num_mlp_matrices=2)
TRAITS = {
    "apertus": _UNGATED,
    "arcee": _UNGATED,
    "bloom": _UNGATED,
    "codegen": _UNGATED,
    "deepseek_v3": FamilyTraits(normalizes_weights=True),
    "falcon": _UNGATED,
    "gpt2": _UNGATED,
    "gpt_bigcode": _UNGATED,
    "gpt_neo": _UNGATED,
    "gpt_neox": _UNGATED,
    "gpt_oss": FamilyTraits(normalizes_weights=True),
    "gptj": _UNGATED,
    "mixtral": FamilyTraits(normalizes_weights=True),
    "mpt": _UNGATED,
    "nanochat": _UNGATED,
    "nemotron": _UNGATED,
    "opt": _UNGATED,
    "persimmon": _UNGATED,
    "phi": _UNGATED,
    "qwen2": FamilyTraits(has_qkv_bias=True),
    "qwen3": FamilyTraits(has_qk_norm=True),
    "qwen3_moe": FamilyTraits(has_qk_norm=True, has_window_in_every_layer=True),
    "stablelm_epoch": _UNGATED,
    "starcoder2": _UNGATED,
}
"""By `model_type`; families without an entry have the defaults, as Llama does."""
