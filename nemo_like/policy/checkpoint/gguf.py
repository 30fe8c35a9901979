"""Conversion of a GGUF file to a Hugging Face model directory, so that it can be trained."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.run.files import (
    WriteError,
    finish_library_file,
    reporting_write_errors,
    system_error_number,
)


def convert_gguf(source: Path, target: Path) -> Path:
    """Dequantise `source` to float32 safetensors, tokenizer and chat template in `target`.

    Raises ConfigError if `source` is no GGUF file, if `target` exists or cannot be written, or if
    the `gguf` package is missing.
    """
    if not source.is_file() or source.suffix != ".gguf":
        raise ConfigError(f"{source} is not a .gguf file; give the path of one")
    if target.exists():
        raise ConfigError(f"{target} exists already; choose another --out or remove it first")
    # transformers imports the package by name and would fail late, with an unclear message.
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise ConfigError(
            "reading GGUF needs the package gguf: pip install 'nemo-like[gguf]'"
        ) from error
    # Here and not at the top, so that `--help` and the checks above need no torch.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _reading_once(gguf):
        model = AutoModelForCausalLM.from_pretrained(
            str(source.parent), gguf_file=source.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    # The weights are plain float32 now. With the remains of the quantisation saving would fail.
    if hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")
    setattr(model, "hf_quantizer", None)  # noqa: B010  (in the stub, attributes of a module are modules)
    unfinished = target.with_name(target.name + ".tmp")
    try:
        with reporting_write_errors(target):
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
            for path in unfinished.glob("*.safetensors"):
                finish_library_file(path)
            unfinished.rename(target)
    except WriteError as error:
        number = system_error_number(error)
        cause = str(error) if number is None else os.strerror(number)
        raise ConfigError(f"--out {target} cannot be written: {cause}") from error
    return target


@contextmanager
def _reading_once(gguf: Any) -> Iterator[None]:
    """Have transformers parse the file once.

    It does so for the config, the weights and the tokenizer, seconds each for a large vocabulary,
    and builds the map of tensor names once per module.
    """
    names = ("GGUFReader", "get_tensor_name_map")
    originals = {name: getattr(gguf, name) for name in names}
    try:
        for name, original in originals.items():
            setattr(gguf, name, cache(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(gguf, name, original)
