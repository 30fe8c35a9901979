"""Initial values of LoRA adapters: random ones, or those of an adapter in the format of PEFT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.lora import LoraConfig
from nemo_like.config.model_directory import require_model_directory
from nemo_like.models.peft_adapter import ADAPTER_WEIGHTS, PREFIX
from nemo_like.models.spec import SCORE_WEIGHT
from nemo_like.models.weight_headers import read_shapes
from nemo_like.policy.checkpoint.adapter import initial_matrix
from nemo_like.policy.checkpoint.tensor_files import TensorFiles, check_values

_KEY = "policy.lora.adapter_path"
Shape = tuple[int, ...]
ReadBlock = Callable[[str, Shape, Shape], Tensor]
"""`read(name, offset, shape)` returns a block of the matrix `name`, float32 [*shape] on the CPU."""


@contextmanager
def open_initial(lora: LoraConfig, shapes: Mapping[str, Shape], seed: int) -> Iterator[ReadBlock]:
    """Open the values with which the training of adapters starts.

    `shapes` are the full shapes of the matrices of all ranks by name. Without
    `policy.lora.adapter_path` the values are those of `initial_matrix`. Raises ConfigError for an
    adapter of other layers or shapes.
    """
    if lora.adapter_path is None:
        yield partial(_random_block, shapes, seed)
        return
    require_model_directory(_KEY, lora.adapter_path)
    path = Path(lora.adapter_path) / ADAPTER_WEIGHTS
    _check_shapes(path, shapes)
    files = TensorFiles()
    try:
        yield partial(_stored_block, files, path)
    finally:
        files.close()


def stored_head(lora: LoraConfig, hidden_size: int) -> dict[str, Tensor]:
    """Return the score head of the adapter with which training starts, float32 [1, D] by name.

    It is empty without `policy.lora.adapter_path`, and for an adapter without a score head, such
    as that of a language model. Raises ConfigError for a head of another shape.
    """
    if lora.adapter_path is None:
        return {}
    path = Path(lora.adapter_path) / ADAPTER_WEIGHTS
    shape = (1, hidden_size)
    stored = _read_shapes(path).get(PREFIX + SCORE_WEIGHT)
    if stored is None:
        return {}
    if stored != shape:
        raise ConfigError(
            f"{_KEY}: {shown_path(path)} has {PREFIX}{SCORE_WEIGHT} as {stored}, and a reward model"
            f" needs {shape}; give the adapter of a model with one label and this hidden size"
        )
    files = TensorFiles()
    try:
        return {SCORE_WEIGHT: _stored_block(files, path, SCORE_WEIGHT, (0, 0), shape)}
    finally:
        files.close()


def _check_shapes(path: Path, shapes: Mapping[str, Shape]) -> None:
    """Raise ConfigError unless the file has exactly the matrices of `shapes`, and at most a score
    head besides.
    """
    stored = _read_shapes(path)
    stored.pop(PREFIX + SCORE_WEIGHT, None)
    expected = {PREFIX + name: tuple(shape) for name, shape in shapes.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) == stored.get(name):
            continue
        raise ConfigError(
            f"{_KEY}: {shown_path(path)} has {name} as {stored.get(name)}, and the model needs"
            f" {expected.get(name)}; check policy.model_name, policy.lora.rank and"
            " policy.lora.target_modules"
        )


def _read_shapes(path: Path) -> dict[str, Shape]:
    """Return the shapes of the tensors of the file. Raises ConfigError for a damaged one."""
    try:
        return read_shapes(path)
    except ValueError as error:
        raise ConfigError(f"{_KEY}: {shown_path(path)} {error}") from error


def _random_block(
    shapes: Mapping[str, Shape], seed: int, name: str, offset: Shape, shape: Shape
) -> Tensor:
    """Return a block [*shape] of the initial values of a matrix, float32 on the CPU."""
    num_rows, num_columns = shapes[name]
    full = initial_matrix(name, (num_rows, num_columns), seed)
    return full.narrow(0, offset[0], shape[0]).narrow(1, offset[1], shape[1])


def _stored_block(files: TensorFiles, path: Path, name: str, offset: Shape, shape: Shape) -> Tensor:
    """Read a block [*shape] of a matrix of the adapter, as float32 on the CPU."""
    block = torch.empty(shape, dtype=torch.float32)
    index = []
    for start, length in zip(offset, shape, strict=True):
        index.append(slice(start, start + length))
    files.read_into(block, path, PREFIX + name, index)
    check_values(block, path, PREFIX + name)
    return block
