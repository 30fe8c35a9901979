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
    num_attentions: int = 1
    """Products of scores and values per layer, over the same queries and keys."""
    has_query_gate: bool = False
    """The projection of queries has a gate of the output of each head as well."""
    has_shared_mlp: bool = False
    """MoE layers have a dense feed-forward block beside the experts."""


_UNGATED = FamilyTraits(num_mlp_matrices=2)
_QUERY_GATE = FamilyTraits(has_query_gate=True)
TRAITS = {
    "apertus": _UNGATED,
    "arcee": _UNGATED,
    "bloom": _UNGATED,
    "codegen": _UNGATED,
    "deepseek_v3": FamilyTraits(normalizes_weights=True),
    "diffllama": FamilyTraits(num_attentions=2),
    "falcon": _UNGATED,
    "gpt2": _UNGATED,
    "gpt_bigcode": _UNGATED,
    "gpt_neo": _UNGATED,
    "gpt_neox": _UNGATED,
    "gpt_oss": FamilyTraits(normalizes_weights=True),
    "gptj": _UNGATED,
    "hunyuan_v1_moe": FamilyTraits(has_shared_mlp=True, normalizes_weights=True),
    "mixtral": FamilyTraits(normalizes_weights=True),
    "mpt": _UNGATED,
    "nanochat": _UNGATED,
    "nemotron": _UNGATED,
    "opt": _UNGATED,
    "persimmon": _UNGATED,
    "phi": _UNGATED,
    "qwen2": FamilyTraits(has_qkv_bias=True),
    "qwen3": FamilyTraits(has_qk_norm=True),
    "qwen3_5_moe_text": _QUERY_GATE,
    "qwen3_5_text": _QUERY_GATE,
    "qwen3_moe": FamilyTraits(has_qk_norm=True, has_window_in_every_layer=True),
    "qwen3_next": _QUERY_GATE,
    "stablelm_epoch": _UNGATED,
    "starcoder2": _UNGATED,
}
"""By `model_type`; families without an entry have the defaults, as Llama does."""

SAME_LAYERS = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Types of language models in composites -> the type with the same layers."""

_COUNTED = """
    apertus arcee aria_text axk1 bitnet cohere cohere2 cohere2_moe cwm deepseek_v3 diffllama dots1
    ernie4_5 ernie4_5_moe exaone4 flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite
    gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared hunyuan_v1_dense
    hunyuan_v1_moe hyperclovax jamba llama mellum minicpm3 minimax_m2 minimax_m3_vl_text ministral
    ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe persimmon
    phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
    seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""
COUNTED_TYPES = frozenset(_COUNTED.split())
"""Types whose FLOPs and parameters a test compares with the counts of torch."""
