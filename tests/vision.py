"""Tiny random vision-language models of transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3VLConfig

IMAGE_TOKEN = 5
VOCABULARY = 67
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "initializer_range": 0.1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
        {"window_size": 16, "fullatt_block_indexes": [1, 3]},
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        {"num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]},
    ),
}
"""Model type -> class, settings of the text and of the tower."""


def tiny_vision_model(model_type: str, *, attention: str = "eager", **vision: Any) -> Any:
    """A random model in float32; every one-dimensional parameter is perturbed."""
    torch.manual_seed(0)
    config_class, text, tower = FAMILIES[model_type]
    config = config_class(
        text_config=_TEXT | text,
        vision_config=_VISION | tower | vision,
        image_token_id=IMAGE_TOKEN,
        video_token_id=6,
        vision_start_token_id=3,
        vision_end_token_id=4,
        tie_word_embeddings=False,
    )
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()
