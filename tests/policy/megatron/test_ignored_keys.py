"""Keys of config.json that a model of transformers ignores change nothing in the Megatron engine.

transformers keeps keys of other types in a configuration. Whether a model reads one is found by its
logits: with the same random weights they are equal to the bit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families import FAMILIES

LENGTH = 40
_SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_WINDOW: dict[str, Any] = {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
BASES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "q_lora_rank": None,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **_EXPERTS,
    },
    "gpt_oss": {"sliding_window": 5, "num_local_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "mistral": {"sliding_window": 5},
    "mixtral": {"sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": _WINDOW,
    "qwen3": _WINDOW,
    "qwen3_moe": {"sliding_window": 5, "use_sliding_window": True, "num_experts": 4, **_EXPERTS},
}
KEYS: list[tuple[str, Any]] = [
    ("sliding_window", 3),
    ("use_sliding_window", True),
    ("use_sliding_window", False),
    ("max_window_layers", 2),
    ("sliding_window_pattern", 2),
    ("attention_chunk_size", 5),
    ("layer_types", ["full_attention", "sliding_attention"] * 2),
    ("norm_topk_prob", True),
    ("norm_topk_prob", False),
    ("num_experts", 8),
    ("num_local_experts", 8),
    ("n_routed_experts", 16),
    ("num_experts_per_tok", 3),
    ("moe_intermediate_size", 40),
    ("shared_expert_intermediate_size", 24),
    ("n_shared_experts", 2),
    ("first_k_dense_replace", 2),
    ("decoder_sparse_step", 2),
    ("moe_layer_freq", 2),
    ("mlp_only_layers", [1]),
    ("n_group", 4),
    ("topk_group", 2),
    ("routed_scaling_factor", 3.0),
    ("swiglu_alpha", 1.0),
    ("swiglu_limit", 3.0),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("hidden_act", "gelu"),
    ("activation_function", "gelu"),
    ("rms_norm_eps", 0.5),
    ("layer_norm_epsilon", 0.5),
    ("logit_scale", 0.5),
    ("logits_scaling", 2.0),
    ("lm_head_multiplier", 2.0),
    ("final_logit_softcapping", 1.0),
    ("logits_soft_cap", 1.0),
    ("kv_lora_rank", 8),
    ("q_lora_rank", 8),
    ("rope_interleave", False),
    ("n_inner", 64),
    ("ffn_dim", 64),
    ("num_kv_heads", 1),
]
"""Every key that changes what `ModelSpec` has of the computation of some model."""
_NOT_COMPUTED = {"attention_dropout": 0.0, "name": ""}


def build(family: str, **keys: Any) -> tuple[PretrainedConfig, Tensor]:
    """Return the configuration, and the logits of a model with random weights."""
    config = AutoConfig.for_model(family, **{**_SIZES, **BASES[family], **keys})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        return config, model(torch.arange(LENGTH)[None], use_cache=False).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key_matters_only_if_transformers_reads_it(family: str) -> None:
    base_config, base = build(family)
    expected = replace(ModelSpec.from_config(base_config), **_NOT_COMPUTED)
    assert not FAMILIES[family].problems(expected)
    wrong = []
    for key, value in KEYS:
        config, logits = build(family, **{key: value})
        found = replace(ModelSpec.from_config(config), **_NOT_COMPUTED)
        is_read = not torch.equal(logits, base)
        is_refused = bool(FAMILIES[family].problems(found))
        if is_read == (found == expected) and not is_refused:
            wrong.append((key, value, "read by transformers" if is_read else "ignored"))
    assert not wrong
