"""Checkpoints of the DTensor engine: the blocks that a rank writes, and reading in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_like.policy.checkpoint import sharded as sharded_checkpoint
from nemo_like.policy.checkpoint.sharded import Block, PendingSave
from nemo_like.policy.checkpoint.sharded_reader import (
    MOMENTS,
    WEIGHT,
    CheckpointReader,
    open_checkpoint,
)
from nemo_like.policy.checkpoint.staging import HostBuffers
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard


def save(
    directory: Path,
    parameters: Sequence[ShardedParameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    rank: int,
    num_optimizer_steps: int,
    barrier: Callable[[], None],
    buffers: HostBuffers,
    in_background: bool,
) -> PendingSave:
    """Write the blocks that this rank owns; see `sharded.save`. Every rank calls.

    Without an optimizer the checkpoint has the weights only.
    """
    return sharded_checkpoint.save(
        directory,
        _blocks(parameters, optimizer),
        rank=rank,
        num_optimizer_steps=num_optimizer_steps,
        barrier=barrier,
        buffers=buffers,
        in_background=in_background,
        has_moments=optimizer is not None and len(optimizer.state) > 0,
        shapes=_shapes(parameters),
    )


def load(
    directory: Path,
    parameters: Sequence[ShardedParameter],
    optimizer: torch.optim.Optimizer | None,
) -> int:
    """Restore in place a checkpoint of any engine and layout; returns its optimizer steps.

    Raises CheckpointError for a directory that is no such checkpoint, ConfigError for one of
    another model.
    """
    if optimizer is not None:
        # A checkpoint without moments restarts Adam.
        optimizer.state.clear()
    with open_checkpoint(directory) as reader:
        reader.check_model(_shapes(parameters))
        for sharded in parameters:
            _read_into(sharded.parameter, reader, WEIGHT, sharded)
            if optimizer is not None and reader.has_moments:
                optimizer.state[sharded.parameter] = _read_state(reader, sharded)
        return reader.num_optimizer_steps


def _read_state(reader: CheckpointReader, sharded: ShardedParameter) -> dict[str, Tensor]:
    """Read AdamW's state of a parameter.

    `step` is a float32 scalar; the moments have the same shape and sharding as the parameter.
    """
    parameter = sharded.parameter
    # One step counter per parameter: a shared tensor would be advanced once per parameter.
    step = torch.tensor(float(reader.num_optimizer_steps), device=parameter.device)
    state = {"step": step}
    for moment in MOMENTS:
        state[moment] = torch.zeros_like(parameter, requires_grad=False)
        _read_into(
            state[moment],
            reader,
            moment,
            sharded,
        )
    return state


def _read_into(
    target: Tensor,
    reader: CheckpointReader,
    kind: str,
    sharded: ShardedParameter,
) -> None:
    """Copy this rank's shard of `kind` (weight or moment) into `target`.

    `target` has the same shape and sharding as the parameter.
    """
    offset, shape = sharded.block()
    local_shard(target).copy_(reader.read(f"{kind}/{sharded.name}", offset, shape))


def _blocks(
    parameters: Sequence[ShardedParameter], optimizer: torch.optim.Optimizer | None
) -> Iterator[Block]:
    """Yield this rank's blocks of weights and, after the first step, of both moments."""
    for sharded in parameters:
        if not sharded.is_owner:
            # Another tp rank has the same values and writes them.
            continue
        offset, _ = sharded.block()
        tensors: dict[str, Tensor] = {WEIGHT: sharded.parameter}
        state = None if optimizer is None else optimizer.state.get(sharded.parameter)
        if state:
            for moment in MOMENTS:
                tensors[moment] = state[moment]
        for kind, tensor in tensors.items():
            name = f"{kind}/{sharded.name}"
            yield Block(
                name,
                sharded.spec.full_shape,
                offset,
                local_shard(tensor),
            )


def _shapes(parameters: Sequence[ShardedParameter]) -> dict[str, tuple[int, ...]]:
    return {sharded.name: sharded.spec.full_shape for sharded in parameters}
