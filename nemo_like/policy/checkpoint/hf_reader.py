"""Reading of weights in the format of Hugging Face: safetensors files and GGUF files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.integer_math import block_index
from nemo_like.models.weight_files import INDEX_NAME, WEIGHTS_NAME, Shape, weight_paths
from nemo_like.policy.optim import LARGEST, all_within
from nemo_like.run.files import (
    WriteError,
    finish_library_file,
    reporting_write_errors,
    system_error_number,
)

_MAX_MAPPED_BYTES = 2**25
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I16": 2}

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STACKING = (MergeModulelist, Concatenate)
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


class TensorFiles:
    """Open files. Pages that were read stay mapped, and count as memory of the process, until the
    files are closed; so they are closed, and opened again, before more than `max_mapped_bytes` are
    mapped.
    """

    def __init__(self, max_mapped_bytes: int = _MAX_MAPPED_BYTES) -> None:
        self._max_mapped_bytes = max_mapped_bytes
        self._num_mapped_bytes = 0
        self._files: dict[Path, Any] = {}

    def read_into(self, target: Tensor, path: Path, key: str, index: Sequence[slice]) -> None:
        """Copy the part `index` of the tensor `key` into `target` [*shape of the part].

        `index` has one slice with start and stop per dim. The values are converted to the precision
        and device of `target`.
        """
        stored = self._file(path).get_slice(key)
        row_bytes = _ITEM_BYTES.get(stored.get_dtype(), 8) * math.prod(stored.get_shape()[1:])
        del stored  # it would keep the file mapped
        if not index:
            target.copy_(self._file(path).get_tensor(key))
            return
        rows, *columns = index
        num_rows = max(1, self._max_mapped_bytes // max(1, row_bytes))
        for start in range(rows.start, rows.stop, num_rows):
            stop = min(start + num_rows, rows.stop)
            self._add_mapped((stop - start) * row_bytes)
            values = self._file(path).get_slice(key)[(slice(start, stop), *columns)]
            target[start - rows.start : stop - rows.start].copy_(values)
            del values  # a view of the mapped file

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        self._files = {}
        self._num_mapped_bytes = 0

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            # Memory-mapped: opening reads only the header.
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path]

    def _add_mapped(self, num_bytes: int) -> None:
        """Close the files if `num_bytes` more would exceed the limit."""
        # Complete rows, because a column slice maps the pages between its parts as well.
        if self._num_mapped_bytes + num_bytes > self._max_mapped_bytes:
            self.close()
        self._num_mapped_bytes += num_bytes


def check_values(tensor: Tensor, path: Path, key: str) -> None:
    """Raise ConfigError for NaN, infinity and values above `LARGEST` in a part of a weight.

    A model with such a weight would fail later, with a message about something else.
    """
    if tensor.is_floating_point() and not all_within([tensor], LARGEST):
        raise ConfigError(
            f"{shown_path(path)}: {key} has values that are NaN, infinite or larger than"
            f" {LARGEST:.2g}; download or save the model again, or use another one"
        )


class StoredTensor(NamedTuple):
    """A tensor of a weight file."""

    path: Path
    key: str
    """Name in the file."""
    shape: Shape
    dtype: str
    """Name in the safetensors format, such as "BF16"."""


class ModelFiles:
    """Weight files of one model.

    Most files have one tensor per expert of an MoE layer, while the model in memory stacks them.
    This class presents them stacked. A file of the model without its output embedding may leave out
    the prefix `model.`.
    """

    def __init__(
        self,
        model_name: str,
        tensors: Mapping[str, StoredTensor],
        stacks: Mapping[str, Sequence[str]],
    ) -> None:
        """`stacks` has for stacked weights the templates of `_expert_templates`."""
        self.model_name = model_name
        self._tensors = tensors
        self._stacks = stacks
        self._files = TensorFiles()

    def __contains__(self, name: str) -> bool:
        """Return True if the weight `name` is stored, stacked or expert by expert."""
        stored, _ = next(self._stored_tensors(name, (1, 1)))
        return self._key(stored) in self._tensors

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ConfigError unless every weight exists with its shape, in floating point."""
        missing = []
        for name, shape in shapes.items():
            for stored, expected in self._stored_tensors(name, shape):
                if self._key(stored) not in self._tensors:
                    missing.append(stored)
                else:
                    self._check_tensor(stored, expected)
        if missing:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            raise ConfigError(
                f"the files of policy.model_name={self.model_name} have no {missing[0]}{others},"
                " which its config.json requires"
            )

    def read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Read a block [*shape] at `offset`, on the CPU and in the files' dtype.

        Only the block is read, and of an MoE layer with one tensor per expert each expert. Raises
        ConfigError for values that are not finite.
        """
        if self._key(name) in self._tensors:
            return self._read(name, offset, shape)
        experts = []
        for expert in range(offset[0], offset[0] + shape[0]):
            parts = []
            for part in self._expert_tensors(name, expert):
                part_shape = self._tensors[part].shape
                parts.append(self._read(part, (0,) * len(part_shape), part_shape))
            experts.append(torch.cat(parts))
        return torch.stack(experts)[:, *block_index(offset, shape)[1:]]

    def read_into(self, target: Tensor, name: str, offset: Shape) -> None:
        """Copy the block at `offset` into `target` [*shape of the block], in its precision.

        Unlike `read` this needs no memory for the block, unless experts are stored one by one.
        Raises ConfigError for values that are not finite.
        """
        if self._key(name) in self._tensors:
            self._fill(target, name, offset)
        else:
            target.copy_(self.read(name, offset, tuple(target.shape)))

    def unloaded(self, model: PreTrainedModel) -> list[StoredTensor]:
        """Return the tensors that are neither parameters nor buffers of `model`."""
        weights = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        loaded = set()
        for name, weight in weights:
            for stored, _ in self._stored_tensors(name, tuple(weight.shape)):
                loaded.add(self._key(stored))
        return [tensor for key, tensor in self._tensors.items() if key not in loaded]

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _key(self, name: str) -> str:
        """Return the name of a weight in the files."""
        short = name.removeprefix("model.")
        return short if name not in self._tensors and short in self._tensors else name

    def _read(self, name: str, offset: Shape, shape: Shape) -> Tensor:
        """Read a block [*shape] of a stored tensor."""
        block = torch.empty(shape, dtype=_DTYPES[self._tensors[self._key(name)].dtype])
        self._fill(block, name, offset)
        return block

    def _fill(self, target: Tensor, name: str, offset: Shape) -> None:
        """Copy the block at `offset` of a stored tensor into `target` [*shape of the block]."""
        key = self._key(name)
        stored = self._tensors[key]
        index = block_index(offset, tuple(target.shape))
        self._files.read_into(target, stored.path, stored.key, index)
        check_values(target, stored.path, stored.key)

    def _check_tensor(self, name: str, expected: Shape) -> None:
        stored = self._tensors[self._key(name)]
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"the files of policy.model_name={self.model_name} have {name} as {stored.dtype}, a"
                " quantized format; use the model in bfloat16 or float32"
            )
        if stored.shape != expected:
            raise ConfigError(
                f"the files of policy.model_name={self.model_name} have {name} in shape"
                f" {list(stored.shape)}; its config.json requires {list(expected)}"
            )

    def _stored_tensors(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of the stored tensors that make up the weight `name`."""
        if self._key(name) in self._tensors or not self._expert_tensors(name, 0):
            yield name, shape
            return
        for expert in range(shape[0]):
            parts = self._expert_tensors(name, expert)
            # gate and up are separate tensors with half of the stacked rows each.
            for part in parts:
                yield part, (shape[1] // len(parts), *shape[2:])

    def _expert_tensors(self, name: str, expert: int) -> list[str]:
        """Names of the tensors of one expert, in the order of their rows in the stacked tensor."""
        templates = self._stacks.get(name) or _expert_templates(name)
        return [template.format(expert) for template in templates]


@contextmanager
def open_model(model_name: str, model: PreTrainedModel | None = None) -> Iterator[ModelFiles]:
    """Open the files of `policy.model_name`, a directory.

    With a `model`, which may be on the meta device, weights have its names: transformers renames
    weights of some types when it loads them. Raises ConfigError if a file is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(model_name):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                header = file.get_slice(name)
                shape = tuple(header.get_shape())
                tensors[name] = StoredTensor(path, name, shape, header.get_dtype())
    stacks: dict[str, Sequence[str]] = {}
    if model is not None:
        tensors, stacks = _renamed(model_name, model, tensors)
        _add_tied_names(model, tensors)
    files = ModelFiles(model_name, tensors, stacks)
    try:
        yield files
    finally:
        files.close()


def _renamed(
    model_name: str, model: PreTrainedModel, tensors: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], dict[str, Sequence[str]]]:
    """Return `tensors` by the names in `model`, and the templates of the weights that it stacks.

    Raises ConfigError for weights that transformers computes from several others.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    renamed = {}
    stacks: dict[str, Sequence[str]] = {}
    for name in sorted(tensors):
        before, _ = rename_source_key(name, renamings, [])
        after, pattern = rename_source_key(before, [], converters)
        if pattern is None:
            renamed[after] = tensors[name]
            continue
        converter = next(each for each in converters if pattern in each.source_patterns)
        if not all(isinstance(each, _STACKING) for each in converter.operations):
            raise ConfigError(
                f"policy.model_name={model_name}: transformers computes {after} from {name} in a"
                " way that is not supported; save the model with transformers 5 and use the copy"
            )
        # The layer of experts, e.g. "model.layers.0.mlp" of "model.layers.0.mlp.experts.3.w1".
        begin = after[: after.index(converter.target_patterns[0])]
        parts = converter.source_patterns
        stacks[after] = [begin + part.replace("*", "{}").replace("\\", "") for part in parts]
        renamed[before] = tensors[name]
    return renamed, stacks


def _add_tied_names(model: PreTrainedModel, tensors: dict[str, StoredTensor]) -> None:
    """Add to `tensors` all names of each tied weight, which files have under any of them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for tied in names.values():
        stored = next((tensors[name] for name in tied if name in tensors), None)
        if len(tied) > 1 and stored is not None:
            for name in tied:
                tensors.setdefault(name, stored)


def _expert_templates(name: str) -> list[str]:
    """Return the names of the tensors of an expert, with {} for its number, of a stacked weight.

    Empty for another weight. Example: of `mlp.experts.gate_up_proj` they are
    `mlp.experts.{}.gate_proj.weight` and `mlp.experts.{}.up_proj.weight`.
    """
    match = _STACKED_EXPERTS.fullmatch(name)
    if match is None:
        return []
    experts, kind = match.groups()
    return [f"{experts}.{{}}.{part}_proj.weight" for part in kind.split("_")]


def _weight_files(model_name: str) -> list[Path]:
    """Return the weight files of a model. Raises ConfigError if one is missing."""
    try:
        paths = weight_paths(Path(model_name))
    except ValueError as error:
        raise ConfigError(f"policy.model_name={model_name}: its {INDEX_NAME} {error}") from error
    if not paths:
        raise ConfigError(
            f"policy.model_name={model_name} has neither {WEIGHTS_NAME} nor {INDEX_NAME};"
            " only safetensors files are read: save the model as such"
        )
    for path in paths:
        if not path.is_file():
            raise ConfigError(
                f"policy.model_name={model_name} lacks {path.name}, which its {INDEX_NAME} names"
            )
    return paths


def convert_gguf(source: Path, target: Path) -> Path:
    """Dequantise `source` to float32 safetensors, tokenizer and chat template in `target`.

    Raises ConfigError if `source` is not a GGUF file, if `target` exists or cannot be written, or
    if the `gguf` package is missing.
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
