"""The sharded checkpoint of the DTensor engine: safetensors for tensors, JSON for the rest, nothing is unpickled.

    <directory>/rank_00000.safetensors   rows of every weight and of Adam's two moments that rank 0 holds
    <directory>/rank_00001.safetensors   ...
    <directory>/manifest.json            world size, optimizer step, full shapes; written last, by rank 0

FSDP2 cuts dim 0 of each parameter in equal blocks, so a file's row range follows from the world size in the manifest,
and another number of ranks reads just the rows it needs. Restoring is exact to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.config.errors import ConfigError

MANIFEST = "manifest.json"
_FORMAT = 1
_MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    num_optimizer_steps: int,
    rank: int,
    world_size: int,
    barrier: Callable[[], None],
) -> None:
    """Write this rank's file; rank 0 writes the manifest once every rank has written. Called by all ranks."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = _local(parameter)
        for moment in _MOMENTS:
            if parameter in optimizer.state:
                tensors[f"{moment}/{name}"] = _local(optimizer.state[parameter][moment])
    save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, _rank_file(directory, rank))
    barrier()
    if rank == 0:
        manifest = {
            "format": _FORMAT,
            "world_size": world_size,
            "num_optimizer_steps": num_optimizer_steps,
            "has_moments": len(optimizer.state) > 0,
            "shapes": {name: list(parameter.shape) for name, parameter in parameters.items()},
        }
        (directory / MANIFEST).write_text(json.dumps(manifest, indent=1))
    barrier()


def load(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    world_size: int,
) -> int:
    """Restore in place what `save` wrote, with any number of ranks; returns the optimizer steps taken.

    Raises ValueError for a folder that is no such checkpoint or one of another model.
    """
    manifest = _read_manifest(directory, parameters)
    optimizer.state.clear()
    with ExitStack() as stack:
        files = [
            stack.enter_context(safe_open(_rank_file(directory, saved_rank), framework="pt"))
            for saved_rank in range(manifest["world_size"])
        ]
        for name, parameter in parameters.items():
            rows = row_range(parameter.shape[0], world_size, rank)
            _restore(files, f"weight/{name}", parameter, rows)
            if manifest["has_moments"]:
                # A step counter of its own for each parameter: a shared tensor would be advanced once per parameter.
                state = {"step": torch.tensor(float(manifest["num_optimizer_steps"]), device=parameter.device)}
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(parameter, requires_grad=False)
                    _restore(files, f"{moment}/{name}", state[moment], rows)
                optimizer.state[parameter] = state
    return manifest["num_optimizer_steps"]


def row_range(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Rows [start, stop) of dim 0 that FSDP2 gives `rank`. Example: 5 rows on 3 ranks are (0, 2), (2, 4), (4, 5)."""
    block = -(-num_rows // world_size)
    return min(rank * block, num_rows), min((rank + 1) * block, num_rows)


def _restore(files: list[Any], key: str, target: Tensor, rows: tuple[int, int]) -> None:
    """Copy rows [start, stop) of the full tensor, wherever the files hold them, into this rank's part of `target`."""
    local = _local(target)
    start, stop = rows
    assert local.shape[0] == stop - start, f"{key}: FSDP holds {local.shape[0]} rows where {rows} was expected"
    for saved_rank, file in enumerate(files):
        saved_start, saved_stop = row_range(target.shape[0], len(files), saved_rank)
        first, last = max(start, saved_start), min(stop, saved_stop)
        if first < last:
            local[first - start : last - start].copy_(file.get_slice(key)[first - saved_start : last - saved_start])


def _read_manifest(directory: Path, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{path} does not exist, so {directory} holds no complete policy checkpoint")
    manifest = json.loads(path.read_text())
    if manifest["format"] != _FORMAT:
        raise ValueError(f"{path} has format {manifest['format']}; this version reads format {_FORMAT}")
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    different = sorted(name for name in shapes.keys() | manifest["shapes"] if shapes.get(name) != manifest["shapes"].get(name))
    if different:
        name = different[0]
        raise ConfigError(
            f"{directory} is a checkpoint of another model: {len(different)} weights differ, first {name}, saved as "
            f"{manifest['shapes'].get(name)} and now {shapes.get(name)}; check policy.model_name"
        )
    return manifest


def _rank_file(directory: Path, rank: int) -> str:
    return str(directory / f"rank_{rank:05d}.safetensors")


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
