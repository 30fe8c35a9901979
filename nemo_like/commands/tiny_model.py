"""A model small enough to be checked in seconds, with every trait of a real one that parallelism
touches.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_like.config.schema import ParallelConfig

_HEAD_DIM = 8
_MAX_GROUP = 4
_VOCABULARY = 251
"""A prime: no number of workers divides it, as with many real vocabularies."""
_WINDOW = 8


def save_tiny_copy(
    model_config: PretrainedConfig, parallel: ParallelConfig, directory: Path, seed: int = 0
) -> PreTrainedModel:
    """Write a small random model of the same architecture that divides by `parallel`.

    It keeps the grouping of key-value heads, biases, norms, tied embeddings, positions and windows.
    Returns the model in float32 with eager attention.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_config, parallel)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms and biases are initialized to constants, with which a mistake in their
            # placement would not change the result.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def tiny_config(model_config: PretrainedConfig, parallel: ParallelConfig) -> PretrainedConfig:
    """Return `model_config` with few and narrow layers; what is not a size does not change."""
    config: Any = copy.deepcopy(model_config)
    num_heads = config.num_attention_heads
    num_old_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    group = min(num_heads // num_old_kv_heads, _MAX_GROUP)
    # Two key-value heads per tensor-parallel rank, so that a wrong order of heads is visible.
    num_kv_heads = 2 * parallel.tensor
    layers = max(2, parallel.pipeline)
    max_positions = getattr(config, "max_position_embeddings", 4096)
    sizes: dict[str, Any] = {
        "hidden_size": group * num_kv_heads * _HEAD_DIM,
        "intermediate_size": 24 * parallel.tensor,
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
    }
    if getattr(config, "head_dim", None) is not None:
        # Different from hidden size / heads, so that code which confuses the two fails.
        sizes["head_dim"] = 2 * _HEAD_DIM
    if getattr(config, "sliding_window", None) is not None:
        sizes["sliding_window"] = _WINDOW
    if getattr(config, "layer_types", None) is not None:
        sizes["layer_types"] = _kinds(list(config.layer_types), layers)
        # Windows start in the middle, so that there are layers with and without one.
        max_window_layers = getattr(config, "max_window_layers", layers)
        sizes["max_window_layers"] = min(max_window_layers, layers // 2)
    if getattr(config, "num_experts", None):
        sizes |= _moe_sizes(config, parallel)
    for name, value in sizes.items():
        # Only what the architecture knows: transformers would save any other attribute as well.
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _moe_sizes(config: Any, parallel: ParallelConfig) -> dict[str, Any]:
    """Return the sizes of MoE layers: two experts per expert-parallel rank, at least four.

    One layer is dense if the model has dense layers.
    """
    num_experts = max(4, 2 * parallel.expert)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": min(config.num_experts_per_tok, num_experts // 2),
        "moe_intermediate_size": 2 * _HEAD_DIM,
        "decoder_sparse_step": min(getattr(config, "decoder_sparse_step", 1), 2),
        "mlp_only_layers": [0] if getattr(config, "mlp_only_layers", None) else [],
    }


def _kinds(layer_types: list[str], num_layers: int) -> list[str]:
    """Return the kind of each of `num_layers` layers, the given kinds spread evenly over them."""
    kinds = list(dict.fromkeys(layer_types))
    return [kinds[layer * len(kinds) // num_layers] for layer in range(num_layers)]
