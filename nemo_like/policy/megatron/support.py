"""Which Hugging Face models the Megatron engine computes. Imports no Megatron, so a configuration
is checked without it.
"""

from __future__ import annotations

from typing import Any

from nemo_like.config.errors import ConfigError

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Those whose frequencies do not depend on how long the rows of a microbatch are."""


def check_model_config(model_config: Any, model_name: str) -> None:
    """Raise ConfigError for a model this engine would not compute as transformers does."""
    rope_type = (getattr(model_config, "rope_parameters", None) or {}).get("rope_type", "default")
    wrong = []
    if model_config.model_type not in MODEL_TYPES:
        wrong.append(f"model_type {model_config.model_type} (it has {', '.join(MODEL_TYPES)})")
    elif rope_type not in ROPE_TYPES:
        wrong.append(f"rope_type {rope_type} (it has {', '.join(ROPE_TYPES)})")
    for key in ("attention_bias", "mlp_bias", "attention_dropout"):
        if getattr(model_config, key, None):
            wrong.append(f"{key} {getattr(model_config, key)}")
    if getattr(model_config, "hidden_act", "silu") != "silu":
        wrong.append(f"hidden_act {model_config.hidden_act}")
    if getattr(model_config, "norm_topk_prob", False) and model_config.num_experts_per_tok == 1:
        wrong.append(
            "norm_topk_prob with num_experts_per_tok 1"
        )  # every router weight is 1, and the router learns nothing
    if wrong:
        raise ConfigError(
            f"policy.model_name={model_name} has {' and '.join(wrong)}, which"
            f" policy.engine=megatron does not compute; "
            "use policy.engine=dtensor, or another model"
        )


def layer_windows(model_config: Any) -> list[int | None]:
    """Of each layer, how many positions a token sees, itself included; None is all of its past."""
    # Qwen3-MoE names no kinds of layers: its window, where it has one, is that of all.
    kind = "sliding_attention" if model_config.model_type == "qwen3_moe" else "full_attention"
    types = getattr(model_config, "layer_types", None) or [kind] * model_config.num_hidden_layers
    window = getattr(model_config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in types]
