"""Random models as Hugging Face folders, created on the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from benchmarks.gpu.cells import free_memory


def model_folder(root: Path, name: str, settings: Mapping[str, Any], device: str) -> Path:
    """Return the folder of a random bfloat16 model in `root`; it is written on the first call.

    `settings` is its configuration with `model_type`. The weights are drawn on `device`.
    """
    folder = root / name
    # The configuration of the tokenizer is written last.
    if not (folder / "tokenizer_config.json").exists():
        torch.manual_seed(0)
        model = new_model(settings, torch.bfloat16, device)
        model.save_pretrained(folder)
        write_tokenizer(folder)
        del model
        free_memory()
    return folder


def new_model(settings: Mapping[str, Any], dtype: torch.dtype, device: str) -> Any:
    """Return a randomly initialized causal LM on `device`."""
    with torch.device(device):
        return AutoModelForCausalLM.from_config(_config(settings), dtype=dtype)


def write_reproducible_model(folder: Path, settings: Mapping[str, Any], seed: int) -> None:
    """Write a float32 model whose weights are the same with every version of torch and NumPy."""
    model = new_model(settings, torch.float32, "cpu")
    # The stream of RandomState is frozen, unlike the streams of torch and of newer generators.
    generator = np.random.RandomState(seed)
    with torch.no_grad():
        for weight in model.parameters():
            values = generator.standard_normal(tuple(weight.shape)).astype(np.float32)
            is_scale = weight.ndim == 1
            # Logits far from uniform, so that a mistake is visible.
            drawn = torch.from_numpy(values)
            weight.copy_(1 + 0.1 * drawn if is_scale else 0.2 * drawn)
    model.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of a few words; token ids above them decode to nothing."""
    words = {"<pad>": 0, "<eos>": 1}
    words |= {f"w{index}": index for index in range(2, 64)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)


def _config(settings: Mapping[str, Any]) -> Any:
    values = dict(settings)
    return AutoConfig.for_model(values.pop("model_type"), **values)
