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
    model_config: PretrainedConfig,
    parallel: ParallelConfig,
    directory: Path,
    seed: int = 0,
) -> PreTrainedModel:
    """Write a random model of the same architecture (heads shared as far, biases, norms, ties,
    positions, windows) that divides by `parallel`, and return it in float32 with eager
    attention.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_config, parallel)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if (
                parameter.ndim == 1
            ):  # norms and biases start at constants; what is done to them should show
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    return model


def tiny_config(model_config: PretrainedConfig, parallel: ParallelConfig) -> PretrainedConfig:
    """`model_config` with few and narrow layers; everything that is not a size stays."""
    config: Any = copy.deepcopy(model_config)
    heads, kv_heads = (
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
    )
    group = min(heads // kv_heads, _MAX_GROUP)
    num_kv_heads = 2 * parallel.tensor
    layers = max(2, parallel.pipeline)
    sizes: dict[str, Any] = {
        "hidden_size": group * num_kv_heads * _HEAD_DIM,
        "intermediate_size": 24 * parallel.tensor,
        "num_attention_heads": group * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": _VOCABULARY,
        "max_position_embeddings": min(getattr(config, "max_position_embeddings", 4096), 4096),
        "initializer_range": 0.1,  # distributions far from uniform, so that a mistake shows
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if getattr(config, "head_dim", None) is not None:
        sizes["head_dim"] = 2 * _HEAD_DIM  # not hidden size / heads, which some models confuse
    if getattr(config, "sliding_window", None) is not None:
        sizes["sliding_window"] = _WINDOW
    if getattr(config, "layer_types", None) is not None:
        sizes["layer_types"] = _kinds(list(config.layer_types), layers)
        sizes["max_window_layers"] = min(getattr(config, "max_window_layers", layers), layers // 2)
    if getattr(config, "num_experts", None):
        sizes |= _mixture_sizes(config, parallel)
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    return config


def _mixture_sizes(config: Any, parallel: ParallelConfig) -> dict[str, Any]:
    """Few experts, two for each worker that shares them, and a dense layer where the model has
    some.
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
    """As many of the given kinds as there are layers for, the ones that occur first and last among
    them.
    """
    kinds = list(dict.fromkeys(layer_types))
    return [
        kinds[min(layer * len(kinds) // num_layers, len(kinds) - 1)] for layer in range(num_layers)
    ]
