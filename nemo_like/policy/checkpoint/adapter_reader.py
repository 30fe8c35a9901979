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
from nemo_like.config.paths import require_model_directory
from nemo_like.models.peft_adapter import ADAPTER_WEIGHTS, PREFIX
from nemo_like.models.weight_headers import read_shapes
from nemo_like.policy.checkpoint.adapter import initial_matrix
from nemo_like.policy.checkpoint.tensor_files import TensorFiles

Shape = tuple[int, ...]
ReadBlock = Callable[[str, Shape, Shape], Tensor]
"""`read(name, offset, shape)` returns a block of the matrix `name`, float32 [*shape] on the CPU."""


@contextmanager
def open_initial(
    lora: LoraConfig,
    shapes: Mapping[str, Shape],
    seed: int,
) -> Iterator[ReadBlock]:
    """Open the values with which the training of adapters starts.

    `shapes` are the full shapes of the matrices of all ranks by name. Without
    `policy.lora.adapter_path` the values are those of `initial_matrix`. Raises ConfigError for an
    adapter of other layers or shapes.
    """
    if lora.adapter_path is None:
        yield partial(_random_block, shapes, seed)
        return
    require_model_directory("policy.lora.adapter_path", lora.adapter_path)
    path = Path(lora.adapter_path) / ADAPTER_WEIGHTS
    _check_shapes(path, shapes)
    files = TensorFiles()
    try:
        yield partial(_stored_block, files, path)
    finally:
        files.close()


def _check_shapes(path: Path, shapes: Mapping[str, Shape]) -> None:
    """Raise ConfigError unless the file has exactly the matrices of `shapes`."""
    key = "policy.lora.adapter_path"
    try:
        stored = read_shapes(path)
    except ValueError as error:
        raise ConfigError(f"{key}: {shown_path(path)} {error}") from error
    expected = {PREFIX + name: tuple(shape) for name, shape in shapes.items()}
    for name in sorted(expected.keys() | stored.keys()):
        if expected.get(name) == stored.get(name):
            continue
        raise ConfigError(
            f"{key}: {shown_path(path)} has {name} as {stored.get(name)}, and the model needs"
            f" {expected.get(name)}; check policy.model_name, policy.lora.rank and"
            " policy.lora.target_modules"
        )


def _random_block(
    shapes: Mapping[str, Shape],
    seed: int,
    name: str,
    offset: Shape,
    shape: Shape,
) -> Tensor:
    """Return a block [*shape] of the initial values of a matrix, float32 on the CPU."""
    num_rows, num_columns = shapes[name]
    full = initial_matrix(name, (num_rows, num_columns), seed)
    return full.narrow(0, offset[0], shape[0]).narrow(1, offset[1], shape[1])


def _stored_block(
    files: TensorFiles,
    path: Path,
    name: str,
    offset: Shape,
    shape: Shape,
) -> Tensor:
    """Read a block [*shape] of a matrix of the adapter, as float32 on the CPU."""
    block = torch.empty(shape, dtype=torch.float32)
    index = []
    for start, length in zip(offset, shape, strict=True):
        index.append(slice(start, start + length))
    files.read_into(block, path, PREFIX + name, index)
    return block
