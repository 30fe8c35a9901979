"""Safetensors files of a Hugging Face model, from which any block can be read without the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from nemo_like.config.errors import ConfigError
from nemo_like.config.paths import is_local

Shape = tuple[int, ...]

_STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")


class ModelFiles:
    """Open weight files of one model.

    Most files have one tensor per expert of an MoE layer, while the model in memory stacks them.
    This class presents them stacked.
    """

    def __init__(self, model_name: str, files: Mapping[str, Any]) -> None:
        """`files` maps each tensor name to the open file that has it."""
        self.model_name = model_name
        self._files = files

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise ConfigError unless every weight exists with its shape."""
        for name, shape in shapes.items():
            for stored, expected in self._stored_tensors(name, shape):
                self._check_tensor(stored, expected)

    def read(
        self,
        name: str,
        offset: Shape,
        shape: Shape,
    ) -> Tensor:
        """Read a block [*shape] at `offset`, on the CPU and in the files' dtype."""
        block = tuple(
            slice(start, start + length) for start, length in zip(offset, shape, strict=True)
        )
        if name in self._files:
            # A slice reads only the bytes of the block.
            return self._files[name].get_slice(name)[block]
        # One tensor per expert: each expert of the block is read in full.
        experts = []
        for expert in range(offset[0], offset[0] + shape[0]):
            parts = [self._files[part].get_tensor(part) for part in _expert_tensors(name, expert)]
            experts.append(torch.cat(parts))
        return torch.stack(experts)[:, *block[1:]]

    def _check_tensor(self, name: str, expected: Shape) -> None:
        if name not in self._files:
            state = f"have no {name}"
        else:
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found == expected:
                return
            state = f"have {name} in shape {list(found)}"
        raise ConfigError(
            f"the files of policy.model_name={self.model_name} {state}; its config.json"
            f" requires {list(expected)}"
        )

    def _stored_tensors(self, name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of the stored tensors that make up the weight `name`."""
        if name in self._files or _STACKED_EXPERTS.fullmatch(name) is None:
            yield name, shape
            return
        for expert in range(shape[0]):
            parts = _expert_tensors(name, expert)
            # gate and up are separate tensors with half of the stacked rows each.
            for part in parts:
                yield part, (shape[1] // len(parts), *shape[2:])


@contextmanager
def open_model(model_name: str) -> Iterator[ModelFiles]:
    """Open the files of `policy.model_name`, a directory or a cached hub name.

    Raises ConfigError if a file is missing.
    """
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _weight_files(model_name):
            # Memory-mapped: opening reads only the header.
            file = stack.enter_context(safe_open(path, framework="pt"))
            files |= dict.fromkeys(file.keys(), file)
        yield ModelFiles(model_name, files)


def _expert_tensors(name: str, expert: int) -> list[str]:
    """Names of the tensors of one expert, in the order of their rows in the stacked tensor."""
    match = _STACKED_EXPERTS.fullmatch(name)
    assert match is not None, f"{name} is no stack of experts"
    experts, kind = match.groups()
    return [f"{experts}.{expert}.{part}_proj.weight" for part in kind.split("_")]


def _weight_files(model_name: str) -> list[Path]:
    single = _cached(model_name, SAFE_WEIGHTS_NAME)
    if single is not None:
        return [single]
    index = _cached(model_name, SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise ConfigError(
            f"policy.model_name={model_name} has neither {SAFE_WEIGHTS_NAME} nor"
            f" {SAFE_WEIGHTS_INDEX_NAME};"
            " policy.engine=megatron reads only safetensors files: save the model as such"
        )
    names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    paths = []
    for name in names:
        path = _cached(model_name, name)
        if path is None:
            raise ConfigError(
                f"policy.model_name={model_name} lacks {name}, which its"
                f" {SAFE_WEIGHTS_INDEX_NAME} names"
            )
        paths.append(path)
    return paths


def _cached(model_name: str, file_name: str) -> Path | None:
    found = cached_file(
        model_name,
        file_name,
        # A name that is a directory never reaches the network.
        local_files_only=is_local(model_name),
        _raise_exceptions_for_missing_entries=False,
    )
    return None if found is None else Path(found)
