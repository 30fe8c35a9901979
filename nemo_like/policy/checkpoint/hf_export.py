"""Export of an engine or a checkpoint as a Hugging Face model directory.

At most one file's tensors are in memory at a time.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import GENERATION_CONFIG_NAME

from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.chat_template import ChatTemplate
from nemo_like.distributed import activity
from nemo_like.models.output_head import meta_model
from nemo_like.models.pretrained import is_composite, load_model_config, load_tokenizer
from nemo_like.models.spec import ModelSpec
from nemo_like.models.weight_files import HEADS
from nemo_like.policy.checkpoint.hf_metadata import write_config, write_tokenizer
from nemo_like.policy.checkpoint.hf_reader import StoredTensor, open_model
from nemo_like.policy.optim import NonFiniteError, all_within
from nemo_like.run.files import finish_library_file, reporting_write_errors, write_json

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 4 << 30


class Weights(Protocol):
    """Source of the weights: an `Engine`, or a checkpoint."""

    def weight_shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def full_weights(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its weight, [*shape] as in `weight_shapes` on the writer.

        Elsewhere a tensor may be smaller or empty.
        """
        ...


def write_hf(
    weights: Weights,
    model_config: PretrainedConfig,
    config: PolicyConfig,
    directory: Path,
    *,
    is_writer: bool = True,
) -> None:
    """Write weights in compute precision, configuration and tokenizer; every rank calls.

    Names and shapes are as `save_pretrained` writes them. They differ from those in memory for
    MoE layers: a model in memory stacks the experts, files have one tensor per expert
    (`mlp.experts.0.gate_proj.weight`), which vLLM and other readers expect. Tied weights are
    written once, under the name of the input embedding. A composite model, of which the language
    model alone was trained, is written with its other parts. Raises NonFiniteError on the writer
    for a weight that is not finite in compute precision.
    """
    dtype = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    shapes = weights.weight_shapes()
    files = split_by_bytes(shapes, dtype.itemsize, MAX_FILE_BYTES)
    if is_writer:
        with reporting_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        _write_configuration(model_config, config, dtype, directory)
    # On the meta device; transformers derives the format of files from it.
    skeleton = meta_model(model_config) if is_writer else None
    kept: list[StoredTensor] = []
    if skeleton is not None:
        if is_composite(load_model_config(config.model_name)):
            # With the prefix of the language model, which transformers would leave out.
            conversions: Any = get_model_conversion_mapping(skeleton, add_legacy=False)
            skeleton._weight_conversions = conversions
        kept = _unloaded(skeleton, config.model_name)
    kept_files = split_by_bytes({each.key: each.shape for each in kept}, 8, MAX_FILE_BYTES)
    last_bytes = sum(prod(shapes[name]) for name in files[-1]) * dtype.itemsize
    # Small models stay in one file.
    is_joined = last_bytes + 8 * sum(prod(each.shape) for each in kept) <= MAX_FILE_BYTES
    num_files = len(files) + (0 if is_joined else len(kept_files))
    stored: list[dict[str, int]] = []
    for index, names in enumerate(files):
        tensors = {}
        # Every rank iterates to the end: gathering a weight is a collective.
        for name, tensor in weights.full_weights(names):
            activity.note(f"exporting {name}")
            if is_writer:
                tensors[name] = _checked(name, tensor.to("cpu", dtype).contiguous(), directory)
        if skeleton is not None:
            if index == 0:
                tensors |= _buffers(skeleton, config.model_name)
            tensors = _to_stored_format(skeleton, tensors)
            if is_joined and index == len(files) - 1:
                tensors |= _read_all(kept)
            stored.append({name: tensor.nbytes for name, tensor in tensors.items()})
            _write_file(directory / _file_name(index, num_files), tensors)
    for keys in () if is_joined else kept_files:
        tensors = _read_all([each for each in kept if each.key in keys])
        _write_file(directory / _file_name(len(stored), num_files), tensors)
        stored.append({name: tensor.nbytes for name, tensor in tensors.items()})
    if is_writer and num_files > 1:
        _write_index(stored, directory)


def _unloaded(skeleton: PreTrainedModel, model_name: str) -> list[StoredTensor]:
    """Return the tensors in the files of the trained model that its class does not load.

    Layers for multi-token prediction are such, which config.json announces to other tools, and the
    other parts of a composite model. Left out are frequencies of rotary embeddings, which are
    computed, and the output embedding of a language model that became a reward model.
    """
    with open_model(model_name, skeleton) as files:
        found = files.unloaded(skeleton)
    left_out = ["rotary_emb.inv_freq"]
    if not hasattr(skeleton, "lm_head"):
        left_out += HEADS
    kept = [each for each in found if not each.key.endswith(tuple(left_out))]
    if kept:
        logger.warning(
            "%s of %s, such as %s, are exported as they were: transformers does not load them, so"
            " training does not change them. Such parts, for example layers for multi-token"
            " prediction or a vision tower, then fit the trained model less well",
            counted(len(kept), "tensor"),
            model_name,
            kept[0].key,
        )
    return kept


def _read_all(stored: Sequence[StoredTensor]) -> dict[str, Tensor]:
    """Return the tensors [*shape] as they are stored, by their names in the files."""
    tensors = {}
    for each in stored:
        with safe_open(each.path, framework="pt") as file:
            tensors[each.key] = file.get_tensor(each.key)
    return tensors


def _buffers(skeleton: PreTrainedModel, model_name: str) -> dict[str, Tensor]:
    """Return the buffers in the files of the trained model, such as biases of a router.

    They are not trained, so engines and checkpoints do not have them.
    """
    weights = {name for name, _ in skeleton.named_parameters(remove_duplicate=False)}
    shapes = {
        name: tuple(buffer.shape)
        for name, buffer in skeleton.state_dict().items()
        if name not in weights
    }
    if not shapes:
        return {}
    with open_model(model_name, skeleton) as files:
        return {
            name: files.read(name, (0,) * len(shape), shape)
            for name, shape in shapes.items()
            if name in files
        }


def _checked(name: str, tensor: Tensor, directory: Path) -> Tensor:
    """Return `tensor` [*shape] itself. Raises NonFiniteError if an element is not finite."""
    if not all_within([tensor]):
        raise NonFiniteError(
            f"weight {name} contains NaN or infinity as {tensor.dtype}, so the model is not"
            f" written to {directory}"
        )
    return tensor


def _write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write `tensors`, [*shape] each, as one safetensors file."""
    activity.note(f"writing {path.name}")
    with reporting_write_errors(path):
        save_file(tensors, path, metadata={"format": "pt"})
    finish_library_file(path)


def _to_stored_format(skeleton: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert `tensors` to the names and shapes of files.

    Example: the stacked `down_proj` [E, D, F] of E experts becomes E tensors [D, F].
    """
    converted = revert_weight_conversion(skeleton, tensors)
    for name in list(converted):
        if name not in tensors:
            # A slice of a stacked tensor; safetensors refuses tensors that share memory.
            converted[name] = converted[name].clone(memory_format=torch.contiguous_format)
    return converted


def split_by_bytes(
    shapes: Mapping[str, Sequence[int]], itemsize: int, max_bytes: int
) -> list[list[str]]:
    """Split names, in order, into groups of at most `max_bytes`; a larger tensor is its own group.

    Example: tensors of 10, 20 and 40 bytes with a limit of 30 give groups of two names and of one.
    """
    groups: list[list[str]] = []
    free_bytes = 0
    for name, shape in shapes.items():
        size = prod(shape) * itemsize
        if not groups or size > free_bytes:
            groups.append([])
            free_bytes = max_bytes
        groups[-1].append(name)
        free_bytes -= size
    return groups


def _write_configuration(
    model_config: PretrainedConfig, config: PolicyConfig, dtype: torch.dtype, directory: Path
) -> None:
    source = load_model_config(config.model_name)
    has_other_parts = is_composite(source)
    # Of a composite model an engine has the configuration of the language model. Otherwise a copy,
    # because the engine goes on using its configuration.
    model_config = source if has_other_parts else copy.deepcopy(model_config)
    model_config.dtype = model_config.get_text_config().dtype = dtype
    is_causal = ModelSpec.from_config(model_config).head == "vocabulary"
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if not is_causal:
        names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if not has_other_parts:
        model_config.architectures = [names[model_config.model_type]]
    name = config.tokenizer_name or config.model_name
    tokenizer = load_tokenizer(name)
    if config.chat_template is not None:
        tokenizer.chat_template = Path(config.chat_template).read_text(encoding="utf-8")
    if not is_causal:
        model_config.pad_token_id = padding_token_id(tokenizer)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model_config.pad_token_id)
    pad_token = None if is_causal else str(tokenizer.pad_token)
    # Left by another tool: a quantized model cannot be trained.
    vars(model_config).pop("quantization_config", None)
    with reporting_write_errors(directory):
        write_config(model_config, Path(config.model_name), directory)
        write_tokenizer(
            tokenizer,
            Path(name),
            directory,
            replaces_template=config.chat_template is not None,
            pad_token=pad_token,
        )
    if is_causal:
        end_ids: list[Any] = [tokenizer.eos_token_id, *ChatTemplate(tokenizer).end_token_ids]
        _write_generation_config(model_config, config.model_name, end_ids, directory)


def padding_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token of a reward model: a special token that ends no row.

    transformers scores the last token that is not the padding token, so a row that ends with it
    would get the score of the token before. Raises ConfigError if the tokenizer has no such token.
    """
    end_ids = (tokenizer.eos_token_id, *ChatTemplate(tokenizer).end_token_ids)
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, *tokenizer.all_special_ids)
    for token_id in known:
        if isinstance(token_id, int) and token_id not in end_ids:
            return token_id
    raise ConfigError(
        "the tokenizer of the reward model has no special token that ends no row, and padding needs"
        " one: set pad_token in its tokenizer_config.json"
    )


def _write_generation_config(
    model_config: PretrainedConfig, model_name: str, end_ids: Sequence[int | None], directory: Path
) -> None:
    """Write the generation configuration of `model_name` with `end_ids` as additional end tokens.

    It is edited as JSON, because transformers refuses to write some configurations that it reads.
    """
    source = Path(model_name) / GENERATION_CONFIG_NAME
    if not source.is_file():
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        values = {name: getattr(model_config, name, None) for name in names}
        content = {name: value for name, value in values.items() if value is not None}
    else:
        content = json.loads(source.read_text(encoding="utf-8"))
    declared = content.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    # A dict keeps the order and removes duplicates.
    all_ids = list(dict.fromkeys(each for each in (*ids, *end_ids) if each is not None))
    if all_ids:
        content["eos_token_id"] = all_ids[0] if len(all_ids) == 1 else all_ids
    write_json(directory / GENERATION_CONFIG_NAME, content)


def _write_index(files: Sequence[Mapping[str, int]], directory: Path) -> None:
    """Write the index of a model in several files; each of `files` is tensor -> bytes."""
    weight_map = {}
    for number, sizes in enumerate(files):
        for name in sizes:
            weight_map[name] = _file_name(number, len(files))
    total_size = sum(sum(sizes.values()) for sizes in files)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)


def _file_name(index: int, num_files: int) -> str:
    if num_files == 1:
        return "model.safetensors"
    return f"model-{index + 1:05d}-of-{num_files:05d}.safetensors"
