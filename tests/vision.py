"""Tiny random vision-language models of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)

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


def _wide(model_type: str, head_dim: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the text and of the tower for heads of `head_dim`, a multiple of 8."""
    _, text, tower = FAMILIES[model_type]
    if head_dim == _TEXT["head_dim"]:
        return text, tower
    rope = text["rope_parameters"]
    section = [each * head_dim // _TEXT["head_dim"] for each in rope["mrope_section"]]
    width = _TEXT["num_attention_heads"] * head_dim
    sizes = {"head_dim": head_dim, "hidden_size": width}
    tower_sizes = {"hidden_size": 2 * head_dim, "out_hidden_size": width}
    return sizes | {"rope_parameters": rope | {"mrope_section": section}}, tower | tower_sizes


@contextmanager
def true_float64() -> Iterator[None]:
    """Have code that names float32 compute in float64: norms, rotary embeddings, log-probs."""
    default = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for name in ("float32", "float"):
            patch.setattr(torch, name, torch.float64)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def tiny_vision_model(
    model_type: str,
    *,
    attention: str = "eager",
    vocab_size: int = VOCABULARY,
    head_dim: int = 8,
    **vision: Any,
) -> Any:
    """A random model in float32; every one-dimensional parameter is perturbed."""
    torch.manual_seed(0)
    config_class = FAMILIES[model_type][0]
    text, tower = _wide(model_type, head_dim)
    config = config_class(
        text_config=_TEXT | text | {"vocab_size": vocab_size},
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


_SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
"""In the order of the ids of `tiny_vision_model`."""
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Qwen2.5-VL."""


def tiny_vision_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the special tokens of the models."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=263, special_tokens=list(_SPECIAL), initial_alphabet=alphabet
    )
    core.train_from_iterator(["a"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=list(_SPECIAL[1:]),
    )


def save_tiny_vision_model(model_type: str, directory: Path, *, head_dim: int = 8) -> Any:
    """Write a model with tokenizer and image processor; an image token is 8x8 pixels."""
    tokenizer = tiny_vision_tokenizer()
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == IMAGE_TOKEN
    model = tiny_vision_model(model_type, vocab_size=len(tokenizer), head_dim=head_dim)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 64,
        "max_pixels": 4096,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


def picture_inputs(model_dir: Path, paths: Sequence[Path]) -> tuple[dict[str, Any], list[int]]:
    """Arguments of transformers for pictures, and the image tokens of each; none without any."""
    if not paths:
        return {}, []
    processor = AutoImageProcessor.from_pretrained(model_dir, use_fast=False)
    pictures = [Image.open(path).convert("RGB") for path in paths]
    options = dict(processor(images=pictures, return_tensors="pt"))
    return options, (options["image_grid_thw"].prod(1) // 4).tolist()


def expanded_ids(tokenizer: Any, text: str, counts: list[int]) -> list[int]:
    """Ids of a text with all tokens of its images, whose numbers are taken from `counts`."""
    ids: list[int] = []
    for token in tokenizer(text).input_ids:
        ids += [token] * (counts.pop(0) if token == IMAGE_TOKEN else 1)
    return ids


def logits_of(model: Any, ids: Sequence[int], options: dict[str, Any]) -> torch.Tensor:
    """Logits [L, V] of one row by transformers, with the `options` of its pictures."""
    tokens = torch.tensor([list(ids)])
    types = {"mm_token_type_ids": (tokens == IMAGE_TOKEN).int()} if options else {}
    return model(input_ids=tokens, **options, **types).logits[0]


@contextmanager
def trained_patches() -> Iterator[list[int]]:
    """The patches of each forward pass of a tower that is trained, in this process."""
    found: list[int] = []

    def count(module: torch.nn.Module, arguments: Any, output: Any) -> None:
        if type(module).__name__.endswith("VisionModel") and torch.is_grad_enabled():
            found.append(len(arguments[0]))

    hook = torch.nn.modules.module.register_module_forward_hook(count)
    try:
        yield found
    finally:
        hook.remove()
