"""Safetensors files of a Hugging Face model, from which any block can be read without the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from nemo_like.config.errors import ConfigError
from nemo_like.policy.checkpoint.tensor_files import TensorFiles, check_values

Shape = tuple[int, ...]

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


class StoredTensor(NamedTuple):
    """A tensor of a weight file."""

    path: Path
    shape: Shape
    dtype: str
    """Name in the safetensors format, such as "BF16"."""


class ModelFiles:
    """Weight files of one model.

    Most files have one tensor per expert of an MoE layer, while the model in memory stacks them.
    This class presents them stacked. A file of the model without its output embedding may leave out
    the prefix `model.`.
    """

    def __init__(self, model_name: str, tensors: Mapping[str, StoredTensor]) -> None:
        self.model_name = model_name
        self._tensors = tensors
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
            for part in _expert_tensors(name, expert):
                part_shape = self._tensors[part].shape
                parts.append(self._read(part, (0,) * len(part_shape), part_shape))
            experts.append(torch.cat(parts))
        return torch.stack(experts)[:, *_slices(offset, shape)[1:]]

    def read_into(self, target: Tensor, name: str, offset: Shape) -> None:
        """Copy the block at `offset` into `target` [*shape of the block], in its precision.

        Unlike `read` this needs no memory for the block, unless experts are stored one by one.
        Raises ConfigError for values that are not finite.
        """
        if self._key(name) in self._tensors:
            self._fill(target, name, offset)
        else:
            target.copy_(self.read(name, offset, tuple(target.shape)))

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
        path = self._tensors[key].path
        self._files.read_into(target, path, key, _slices(offset, tuple(target.shape)))
        check_values(target, path, key)

    def _check_tensor(self, name: str, expected: Shape) -> None:
        stored = self._tensors[self._key(name)]
        if stored.shape != expected:
            raise ConfigError(
                f"the files of policy.model_name={self.model_name} have {name} in shape"
                f" {list(stored.shape)}; its config.json requires {list(expected)}"
            )
        if stored.dtype not in _DTYPES:
            raise ConfigError(
                f"the files of policy.model_name={self.model_name} have {name} as {stored.dtype}, a"
                " quantized format; use the model in bfloat16 or float32"
            )

    def _stored_tensors(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of the stored tensors that make up the weight `name`."""
        if self._key(name) in self._tensors or _STACKED_EXPERTS.fullmatch(name) is None:
            yield name, shape
            return
        for expert in range(shape[0]):
            parts = _expert_tensors(name, expert)
            # gate and up are separate tensors with half of the stacked rows each.
            for part in parts:
                yield part, (shape[1] // len(parts), *shape[2:])


@contextmanager
def open_model(model_name: str) -> Iterator[ModelFiles]:
    """Open the files of `policy.model_name`, a directory.

    Raises ConfigError if a file is missing.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(model_name):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                header = file.get_slice(name)
                tensors[name] = StoredTensor(path, tuple(header.get_shape()), header.get_dtype())
    files = ModelFiles(model_name, tensors)
    try:
        yield files
    finally:
        files.close()


def _slices(offset: Shape, shape: Shape) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))


def _expert_tensors(name: str, expert: int) -> list[str]:
    """Names of the tensors of one expert, in the order of their rows in the stacked tensor."""
    match = _STACKED_EXPERTS.fullmatch(name)
    assert match is not None, f"{name} is no stack of experts"
    experts, kind = match.groups()
    return [f"{experts}.{expert}.{part}_proj.weight" for part in kind.split("_")]


def _weight_files(model_name: str) -> list[Path]:
    directory = Path(model_name)
    single = directory / SAFE_WEIGHTS_NAME
    if single.is_file():
        return [single]
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    if not index.is_file():
        raise ConfigError(
            f"policy.model_name={model_name} has neither {SAFE_WEIGHTS_NAME} nor"
            f" {SAFE_WEIGHTS_INDEX_NAME};"
            " only safetensors files are read: save the model as such"
        )
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    paths = []
    for name in names:
        path = directory / name
        if not path.is_file():
            raise ConfigError(
                f"policy.model_name={model_name} lacks {name}, which its"
                f" {SAFE_WEIGHTS_INDEX_NAME} names"
            )
        paths.append(path)
    return paths
