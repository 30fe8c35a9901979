"""Checks that the Megatron engine supports a model. Imports no Megatron, so that a configuration is
checked without it.
"""

from __future__ import annotations

from nemo_like.config.errors import ConfigError
from nemo_like.models.spec import ModelSpec

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not depend on the lengths of a microbatch's rows."""


def check_model_spec(spec: ModelSpec, model_name: str) -> None:
    """Raise ConfigError for a model that this engine computes differently from transformers."""
    wrong = []
    if spec.model_type not in MODEL_TYPES:
        supported = ", ".join(MODEL_TYPES)
        wrong.append(f"model_type {spec.model_type} (supported: {supported})")
    elif spec.rope_type not in ROPE_TYPES:
        supported = ", ".join(ROPE_TYPES)
        wrong.append(f"rope_type {spec.rope_type} (supported: {supported})")
    if spec.has_output_bias:
        wrong.append("attention_bias true")
    if spec.has_mlp_bias:
        wrong.append("mlp_bias true")
    if spec.attention_dropout:
        wrong.append(f"attention_dropout {spec.attention_dropout:g}")
    if spec.activation != "silu":
        wrong.append(f"hidden_act {spec.activation}")
    moe = spec.moe
    if moe is not None and moe.normalizes_weights and moe.num_active_experts == 1:
        # Every router weight is 1 then, so the router receives no gradient.
        wrong.append("norm_topk_prob with num_experts_per_tok 1")
    if wrong:
        raise ConfigError(
            f"policy.model_name={model_name} has {' and '.join(wrong)}, which"
            " policy.engine=megatron does not support; use policy.engine=dtensor, or another model"
        )
