"""Weights as a Hugging Face model directory, with at most one file's tensors in memory: of an engine, or of a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from nemo_like.config.paths import is_local
from nemo_like.config.schema import PolicyConfig
from nemo_like.files import finish_library_file, reporting_write_errors, write_bytes, write_json

_MAX_FILE_BYTES = 4 << 30


class Weights(Protocol):
    """What is written: an `Engine`, or a checkpoint."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]: ...


def write_hf(
    weights: Weights, model_config: PretrainedConfig, config: PolicyConfig, directory: Path, *, is_writer: bool = True
) -> None:
    """Weights in compute precision, configuration, generation configuration and tokenizer. Every rank calls, one writes.

    Tied weights are written once, under the name of the input embedding, as transformers does.
    """
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    shapes = weights.weight_shapes()
    files = split_by_bytes(shapes, dtype.itemsize, _MAX_FILE_BYTES)
    if is_writer:
        with reporting_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        _write_configuration(model_config, config, dtype, directory)
    for index, names in enumerate(files):
        tensors = {}
        for name, tensor in weights.full_weights(names):
            if is_writer:
                tensors[name] = tensor.to("cpu", dtype).contiguous()
        if is_writer:
            path = directory / _file_name(index, len(files))
            with reporting_write_errors(path):
                save_file(tensors, path, metadata={"format": "pt"})
            finish_library_file(path)
    if is_writer and len(files) > 1:
        _write_index(files, shapes, dtype.itemsize, directory)


def split_by_bytes(shapes: Mapping[str, Sequence[int]], itemsize: int, max_bytes: int) -> list[list[str]]:
    """Names in order, in groups of at most `max_bytes`; a larger tensor is a group of its own.

    Example: 10, 20 and 40 bytes with at most 30 give two groups, of two names and of one.
    """
    groups: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = prod(shape) * itemsize
        if not groups or size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(name)
        room -= size
    return groups


def _write_configuration(model_config: PretrainedConfig, config: PolicyConfig, dtype: torch.dtype, directory: Path) -> None:
    model_config = copy.deepcopy(model_config)
    model_config.dtype = dtype
    model_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_config.model_type]]
    with reporting_write_errors(directory):
        model_config.save_pretrained(directory)
    # As it was: transformers refuses to write some generation configurations that it reads.
    generation_config = cached_file(
        config.model_name,
        GENERATION_CONFIG_NAME,
        local_files_only=is_local(config.model_name),
        _raise_exceptions_for_missing_entries=False,
    )
    if generation_config is not None:
        write_bytes(directory / GENERATION_CONFIG_NAME, Path(generation_config).read_bytes())
    name = config.tokenizer_name or config.model_name
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, local_files_only=is_local(name))
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text()
    with reporting_write_errors(directory):
        tokenizer.save_pretrained(directory)


def _write_index(files: Sequence[Sequence[str]], shapes: Mapping[str, Sequence[int]], itemsize: int, directory: Path) -> None:
    index = {
        "metadata": {"total_size": sum(prod(shape) for shape in shapes.values()) * itemsize},
        "weight_map": {name: _file_name(number, len(files)) for number, names in enumerate(files) for name in names},
    }
    write_json(directory / "model.safetensors.index.json", index)


def _file_name(index: int, num_files: int) -> str:
    return "model.safetensors" if num_files == 1 else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
