"""Tiny random models with the architecture of a model or of a type of transformers.

`nemo-like check parity` compares engines and layouts with transformers on them.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.config.schema import ParallelConfig
from nemo_like.models.output_head import auto_class
from nemo_like.models.spec import ModelSpec
from nemo_like.models.vision import VISION_TYPES, ImageSettings, VisionSpec

_HEAD_DIM = 8
_MAX_GROUP = 4
_VOCABULARY = 251
"""A prime: no number of workers divides it, as with many real vocabularies."""
_WINDOW = 8
_ORIGINAL_LENGTH = 16
"""Above which rotary frequencies differ, where they depend on the length of a row."""
_NUM_EXPERTS = 4
_FACTORS: dict[str, Any] = {
    # Soft caps that matter at the size of tiny activations, factors that are not neutral.
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.5,
}
_LATENT = {
    "q_lora_rank": 3,
    "kv_lora_rank": 2,
    "qk_nope_head_dim": 1,
    "qk_rope_head_dim": 2,
    "qk_head_dim": 3,
    "v_head_dim": 1,
}
"""Of latent attention, in units of the head size: the head sizes of keys and values differ."""
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "window_size": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 36,
    "initializer_range": 0.1,
}
"""Of a vision tower: windows are smaller than images, and two layers have deepstack features."""
_LINEAR = {"linear_key_head_dim": 1, "linear_value_head_dim": 1}
"""Of linear attention, in units of the head size."""


def type_config(model_type: str) -> PretrainedConfig:
    """Return the default configuration of a language model of `model_type`.

    Raises ConfigError for a type that transformers does not have, or not as a causal model.
    """
    try:
        config = AutoConfig.for_model(model_type)
        if model_type in VISION_TYPES:
            return config
        config = config.get_text_config()
    except (KeyError, ValueError, StrictDataclassError) as error:
        raise ConfigError(
            f"--model {model_type}: the installed transformers has no model of this type; the types"
            " are the values of model_type in config.json, e.g. llama"
        ) from error
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"--model {model_type}: transformers has no causal language model of this type"
        )
    return config


def save_tiny_copy(
    model_config: PretrainedConfig,
    parallel: ParallelConfig,
    directory: Path,
    seed: int = 0,
    head_dim: int = _HEAD_DIM,
    **sizes: int,
) -> PreTrainedModel:
    """Write a small random model of the same architecture that divides by `parallel`.

    It keeps the grouping of key-value heads, biases, norms, tied embeddings, positions and windows.
    All sizes are multiples of `head_dim`, except those of `sizes`; an engine may limit them.
    Returns the model in float32 with eager attention and without dropout. Raises ConfigError for a
    type that transformers does not build with such sizes.
    """
    torch.manual_seed(seed)
    try:
        is_composite = model_config.model_type in VISION_TYPES
        small = _tiny_composite if is_composite else tiny_config
        config = small(model_config, parallel, head_dim, **sizes)
        model = auto_class(config).from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            for tensor in (*model.parameters(), *_state_buffers(model)):
                # Norms and biases are initialized to constants, with which a mistake in their
                # placement would not change the result.
                if tensor.ndim == 1:
                    tensor.add_(0.1 * torch.randn_like(tensor))
        model.save_pretrained(directory)
        if is_composite:
            vision = VisionSpec.from_config(config)
            ImageSettings.of_sizes(vision).save(directory, vision)
    # Classes of transformers raise errors of any kind for sizes that they do not expect.
    except Exception as error:
        raise ConfigError(
            f"a small model of the type {model_config.model_type} cannot be built"
            f" ({error_text(error)}), so it cannot be compared with transformers: use another type"
        ) from error
    return model.eval()


def _tiny_composite(
    model_config: PretrainedConfig, parallel: ParallelConfig, head_dim: int, **sizes: int
) -> PretrainedConfig:
    """Return the configuration of a model with a vision tower, with both parts as small."""
    config: Any = copy.deepcopy(model_config)
    text: Any = tiny_config(config.text_config, parallel, head_dim, **sizes)
    half = (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads) // 2
    text.rope_parameters["mrope_section"] = [half // 2, half // 4, half - half // 2 - half // 4]
    tower = config.vision_config
    tower_sizes = _TOWER | {"out_hidden_size": text.hidden_size}
    for name, value in tower_sizes.items():
        if hasattr(tower, name):
            setattr(tower, name, value)
    config.text_config = text
    ids = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    for number, name in enumerate(ids):
        setattr(config, name, 3 + number)
    return config


def _state_buffers(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the floating-point buffers that files have, such as the bias of a router."""
    state = model.state_dict()
    return [
        buffer
        for name, buffer in model.named_buffers()
        if name in state and buffer.is_floating_point()
    ]


def tiny_config(
    model_config: PretrainedConfig,
    parallel: ParallelConfig,
    head_dim: int = _HEAD_DIM,
    **other_sizes: int,
) -> PretrainedConfig:
    """Return `model_config` with few and narrow layers; what is not a size does not change."""
    config: Any = copy.deepcopy(model_config)
    num_heads = config.num_attention_heads
    num_old_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    group = min(num_heads // num_old_kv_heads, _MAX_GROUP)
    # Two key-value heads per tensor-parallel rank, so that a wrong order of heads is visible.
    num_kv_heads = 2 * parallel.tensor
    layers = max(2, parallel.pipeline * parallel.virtual_pipeline)
    max_positions = getattr(config, "max_position_embeddings", 4096)
    sizes: dict[str, Any] = {
        "hidden_size": group * num_kv_heads * head_dim,
        "intermediate_size": 3 * head_dim * parallel.tensor,
        "num_attention_heads": group * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": min(max_positions, 4096),
        # The predicted distributions are then far from uniform, so that a mistake is visible.
        "initializer_range": 0.1,
        # The ids of the real vocabulary are outside of the small one.
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        # Different from hidden size / heads, so that code which confuses the two fails.
        "head_dim": 2 * head_dim,
        "sliding_window": _WINDOW if _has_short_window(config) else 4096,
        "no_rope_layers": [layer % 2 for layer in range(layers)],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        **_FACTORS,
        **{name: head_dim * number for name, number in (_LATENT | _LINEAR).items()},
        **_moe_sizes(config, parallel, head_dim),
        **other_sizes,
    }
    kinds = ("layer_types", "mlp_layer_types")
    for name in kinds:
        if getattr(config, name, None) is not None:
            sizes[name] = _kinds(list(getattr(config, name)), layers)
    if getattr(config, "layer_types", None) is not None:
        # Windows start in the middle, so that there are layers with and without one.
        max_window_layers = getattr(config, "max_window_layers", layers)
        sizes["max_window_layers"] = min(max_window_layers, layers // 2)
    can_be_null = ("pad_token_id", "bos_token_id", "eos_token_id")
    for name, value in sizes.items():
        # Only what the architecture has: transformers would save any other attribute as well.
        own_name = config.attribute_map.get(name, name)
        is_computed = isinstance(getattr(type(config), own_name, None), property)
        has_value = getattr(config, name, None) is not None
        if (has_value or name in can_be_null) and not is_computed:
            try:
                setattr(config, name, value)
            except StrictDataclassError:
                # The type requires an id.
                setattr(config, name, 0)
    _set_missing(config, head_dim)
    _shorten_rope(config, model_config)
    return config


def _set_missing(config: Any, head_dim: int) -> None:
    """Set sizes without which the classes of some types cannot be built, although they are null."""
    missing: dict[str, Any] = {
        "head_dim": head_dim,
        "num_key_value_heads": config.num_attention_heads,
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "n_routed_experts": _NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }
    for name, value in missing.items():
        if getattr(config, name, value) is None:
            setattr(config, name, value)


def _has_short_window(config: Any) -> bool:
    """Return False for a window as long as the longest row, such as Phi-3.5's."""
    window = getattr(config, "sliding_window", None) or 0
    return window < getattr(config, "max_position_embeddings", 4096)


def _shorten_rope(config: Any, model_config: Any) -> None:
    """Set the lengths and factors of rotary frequencies that depend on the length of a row.

    The original length is then short enough for rows on both sides of it, and there are as many
    factors as `config` has frequencies; `model_config` describes the real model.
    """
    original = ModelSpec.from_config(model_config).rope_threshold
    if original is None:
        return
    factor = max(model_config.max_position_embeddings // original, 1)
    config.max_position_embeddings = factor * _ORIGINAL_LENGTH
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = _ORIGINAL_LENGTH
    rope = config.rope_parameters
    by_kind = [value for value in rope.values() if isinstance(value, dict)]
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    for each in by_kind or [rope]:
        if "original_max_position_embeddings" in each:
            each["original_max_position_embeddings"] = _ORIGINAL_LENGTH
        num_frequencies = int(head_dim * each.get("partial_rotary_factor", 1.0)) // 2
        for name in ("short_factor", "long_factor"):
            if name in each:
                factors = each[name]
                step = len(factors) / num_frequencies
                each[name] = [factors[int(index * step)] for index in range(num_frequencies)]


def _moe_sizes(config: Any, parallel: ParallelConfig, head_dim: int) -> dict[str, Any]:
    """Return the sizes of MoE layers: two experts per expert-parallel rank, at least four.

    One layer is dense if the model has dense layers. Empty for a dense model.
    """
    num_experts = max(_NUM_EXPERTS, 2 * parallel.expert)
    sizes = {
        "moe_intermediate_size": 2 * head_dim,
        "shared_expert_intermediate_size": 2 * head_dim,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "decoder_sparse_step": min(getattr(config, "decoder_sparse_step", 1), 2),
        "mlp_only_layers": [0] if getattr(config, "mlp_only_layers", None) else [],
    }
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        sizes[name] = num_experts
    num_active = getattr(config, "num_experts_per_tok", None)
    if num_active:
        sizes["num_experts_per_tok"] = min(num_active, num_experts // 2)
    return sizes


def _kinds(layer_types: list[str], num_layers: int) -> list[str]:
    """Return the kind of each of `num_layers` layers, the given kinds spread evenly over them."""
    kinds = list(dict.fromkeys(layer_types))
    return [kinds[layer * len(kinds) // num_layers] for layer in range(num_layers)]
