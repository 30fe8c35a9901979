"""Weights as a Hugging Face model directory, with at most one file's tensors in memory: of an
engine, or of a checkpoint.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.hub import cached_file

from nemo_like.config.paths import is_local
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.chat_template import ChatTemplate
from nemo_like.distributed import activity
from nemo_like.files import finish_library_file, reporting_write_errors, write_json
from nemo_like.policy.optim import NonFiniteError, all_within

_MAX_FILE_BYTES = 4 << 30


class Weights(Protocol):
    """What is written: an `Engine`, or a checkpoint."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]: ...


def write_hf(
    weights: Weights,
    model_config: PretrainedConfig,
    config: PolicyConfig,
    directory: Path,
    *,
    is_writer: bool = True,
) -> None:
    """Weights in compute precision, configuration, generation configuration and tokenizer. Every
    rank calls, one writes.

    Names and shapes are those that `save_pretrained` writes, also where the model in memory has
    others: the experts of a mixture are one stacked tensor there and one tensor each
    (`mlp.experts.0.gate_proj.weight`) in files, which vLLM and other readers expect. Tied weights
    are written once, under the name of the input embedding. Raises NonFiniteError on the writer for
    a weight that is not finite in compute precision.
    """
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    shapes = weights.weight_shapes()
    files = split_by_bytes(shapes, dtype.itemsize, _MAX_FILE_BYTES)
    if is_writer:
        with reporting_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        _write_configuration(model_config, config, dtype, directory)
    skeleton = _skeleton(model_config) if is_writer else None
    stored: list[list[str]] = []
    for index, names in enumerate(files):
        tensors = {}
        for name, tensor in weights.full_weights(names):
            activity.note(f"exporting {name}")
            if is_writer:
                tensors[name] = tensor.to("cpu", dtype).contiguous()
                if not all_within([tensors[name]]):
                    raise NonFiniteError(
                        f"weight {name} contains NaN or infinity as {dtype}, so the model is not"
                        f" written to {directory}"
                    )
        if skeleton is not None:
            tensors = _as_stored(skeleton, tensors)
            stored.append(list(tensors))
            path = directory / _file_name(index, len(files))
            activity.note(f"writing {path.name}")
            with reporting_write_errors(path):
                save_file(tensors, path, metadata={"format": "pt"})
            finish_library_file(path)
    if is_writer and len(files) > 1:
        _write_index(stored, shapes, dtype.itemsize, directory)


def _skeleton(model_config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights; transformers derives from it how its files are
    written.
    """
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(model_config)


def _as_stored(skeleton: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under the names and in the shapes of files, each with memory of its own as
    safetensors requires.
    """
    converted = revert_weight_conversion(skeleton, tensors)
    for name in [name for name in converted if name not in tensors]:
        converted[name] = converted[name].clone(memory_format=torch.contiguous_format)
    return converted


def split_by_bytes(
    shapes: Mapping[str, Sequence[int]], itemsize: int, max_bytes: int
) -> list[list[str]]:
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


def _write_configuration(
    model_config: PretrainedConfig, config: PolicyConfig, dtype: torch.dtype, directory: Path
) -> None:
    model_config = copy.deepcopy(model_config)
    model_config.dtype = dtype
    model_config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_config.model_type]]
    with reporting_write_errors(directory):
        model_config.save_pretrained(directory)
    name = config.tokenizer_name or config.model_name
    tokenizer = AutoTokenizer.from_pretrained(
        name, trust_remote_code=False, local_files_only=is_local(name)
    )
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    with reporting_write_errors(directory):
        tokenizer.save_pretrained(directory)
    end_ids = (tokenizer.eos_token_id, *ChatTemplate(tokenizer).end_token_ids)
    _write_generation_config(model_config, config.model_name, end_ids, directory)


def _write_generation_config(
    model_config: PretrainedConfig, model_name: str, end_ids: Sequence[int | None], directory: Path
) -> None:
    """The generation configuration of `model_name`, in which every token of `end_ids` ends a
    completion.

    Edited as JSON: transformers refuses to write some generation configurations that it reads.
    """
    source = cached_file(
        model_name,
        GENERATION_CONFIG_NAME,
        local_files_only=is_local(model_name),
        _raise_exceptions_for_missing_entries=False,
    )
    if source is None:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        values = {name: getattr(model_config, name, None) for name in names}
        content = {name: value for name, value in values.items() if value is not None}
    else:
        content = json.loads(Path(source).read_text(encoding="utf-8"))
    declared = content.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    every = list(dict.fromkeys(token_id for token_id in (*ids, *end_ids) if token_id is not None))
    if every:
        content["eos_token_id"] = every[0] if len(every) == 1 else every
    write_json(directory / GENERATION_CONFIG_NAME, content)


def _write_index(
    files: Sequence[Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    itemsize: int,
    directory: Path,
) -> None:
    index = {
        "metadata": {"total_size": sum(prod(shape) for shape in shapes.values()) * itemsize},
        "weight_map": {
            name: _file_name(number, len(files))
            for number, names in enumerate(files)
            for name in names
        },
    }
    write_json(directory / "model.safetensors.index.json", index)


def _file_name(index: int, num_files: int) -> str:
    return (
        "model.safetensors"
        if num_files == 1
        else f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
    )
