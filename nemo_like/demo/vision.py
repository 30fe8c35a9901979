"""The task of `nemo-like demo --vision`: handwritten digits to read, and sums of two of them.

The images are the 1,797 digits of scikit-learn's package data, 8x8 pixels, of which the last 397
are for validation. A digit is one image token. Reading is `<image><image>?` with the answer `35`,
a sum is `<image>+<image>=` with the answer `8`; an answer may spell the sum out: `3+5=8`.

Three in four of the supervised sums have a random answer instead, so the model that SFT leaves can
read digits and add numbers, and mostly guesses sums. GRPO rewards the right sum.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from nemo_like.config.errors import ConfigError
from nemo_like.demo.task import build_tokenizer, write_rows
from nemo_like.models.vision import PROCESSOR_FILE

NUM_SFT_ROWS = 9_600
NUM_GRPO_ROWS = 1_600
NUM_VALIDATION_ROWS = 200
NUM_TRAINING_IMAGES = 1_400
SPELLED_SHARE = 0.25
"""Share of the supervised sums of images that are spelled out."""

_SIDE = 8
_DARKEST = 16
_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<assistant>' + message['content'] + eos_token }}"
    "{% else %}{{ '<user>' }}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def build_vision_demo(
    directory: Path,
    seed: int,
    *,
    num_sft_rows: int = NUM_SFT_ROWS,
    num_grpo_rows: int = NUM_GRPO_ROWS,
) -> None:
    """Write the untrained model and the data, the same for the same seed.

    `model/` is a Hugging Face directory with tokenizer and image processor, `images/` has the
    digits, `sft_train.jsonl` and `grpo_train.jsonl` the training rows; `digits.jsonl` and
    `sums.jsonl` are for validation. Raises ConfigError if scikit-learn is not installed.
    """
    digits, labels = _digits()
    (directory / "images").mkdir(parents=True, exist_ok=True)
    for number, digit in enumerate(digits):
        Image.fromarray(digit).save(directory / "images" / f"{number}.png")
    rng = np.random.default_rng(seed)
    training = range(NUM_TRAINING_IMAGES)
    held_out = range(NUM_TRAINING_IMAGES, len(labels))
    write_rows(directory / "sft_train.jsonl", _supervised_rows(rng, labels, num_sft_rows))
    sums = [_sum(rng, labels, training) for _ in range(num_grpo_rows)]
    write_rows(directory / "grpo_train.jsonl", sums)
    count = range(NUM_VALIDATION_ROWS)
    readings = [_reading(rng, labels, held_out) for _ in count]
    write_rows(directory / "digits.jsonl", [_answered(row, row["answer"]) for row in readings])
    write_rows(directory / "sums.jsonl", [_sum(rng, labels, held_out) for _ in count])
    tokenizer = _tokenizer()
    tokenizer.save_pretrained(directory / "model")
    _model(seed, tokenizer).save_pretrained(directory / "model")
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": _SIDE // 2,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": _SIDE**2,
        "max_pixels": _SIDE**2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (directory / "model" / PROCESSOR_FILE).write_text(json.dumps(processor), encoding="utf-8")


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, uint8 [N, 8, 8], and their digits, int64 [N], in random order."""
    # The package itself, with its own dependencies, is not imported.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the demo with images reads handwritten digits of scikit-learn, which is not"
            " installed: pip install scikit-learn"
        )
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt", encoding="ascii") as file:
        table = np.array(list(csv.reader(file)), dtype=np.float64).astype(np.int64)
    table = np.random.default_rng(0).permutation(table)
    images = table[:, :-1].reshape(-1, _SIDE, _SIDE) * 255 // _DARKEST
    return images.astype(np.uint8), table[:, -1]


def _supervised_rows(
    rng: np.random.Generator, labels: np.ndarray, num_rows: int
) -> Iterator[dict[str, Any]]:
    """Yield rows: 35 % digits to read, 35 % sums of numbers, 30 % sums of images."""
    images = range(NUM_TRAINING_IMAGES)
    for share in rng.random(num_rows):
        left, right = rng.integers(0, 10, 2).tolist()
        if share < 0.35:
            row = _reading(rng, labels, images)
            answer = row["answer"]
        elif share < 0.7:
            row = {"messages": [{"role": "user", "content": f"{left}+{right}="}]}
            answer = f"{left}+{right}={left + right}"
        else:
            row = _sum(rng, labels, images)
            # Spelled out, or a guess.
            is_spelled = rng.random() < SPELLED_SHARE
            answer = row["spelled"] if is_spelled else str(left + right)
        yield _answered(row, answer)


def _answered(row: dict[str, Any], answer: str) -> dict[str, Any]:
    return {**row, "messages": [*row["messages"], {"role": "assistant", "content": answer}]}


def _reading(rng: np.random.Generator, labels: np.ndarray, images: range) -> dict[str, Any]:
    """Return a prompt with one to three of `images`."""
    picks = rng.choice(images, rng.integers(1, 4))
    answer = "".join(map(str, labels[picks]))
    return _row(picks, "<image>" * len(picks) + "?", answer)


def _sum(rng: np.random.Generator, labels: np.ndarray, images: range) -> dict[str, Any]:
    picks = rng.choice(images, 2)
    left, right = labels[picks].tolist()
    row = _row(picks, "<image>+<image>=", str(left + right))
    return row | {"spelled": f"{left}+{right}={left + right}"}


def _row(picks: np.ndarray, prompt: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": prompt}],
        "images": [f"images/{pick}.png" for pick in picks],
        "answer": answer,
    }


def _tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per character and the tokens of images."""
    tokenizer = build_tokenizer("0123456789+=?")
    tokenizer.add_tokens(list(_IMAGE_TOKENS), special_tokens=True)
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def _model(seed: int, tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Build a Qwen3-VL of 0.6 million parameters with weights drawn from `seed`."""
    hidden = 96
    vocabulary = tokenizer.get_vocab()
    ids = {token: vocabulary[token] for token in _IMAGE_TOKENS}
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 4, 4],
            "mrope_interleaved": True,
        },
    }
    tower = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "patch_size": _SIDE // 2,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [1],
    }
    config = Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    # The caller's random numbers must not depend on the demo.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3VLForConditionalGeneration(config)
