"""Checkpoints of the DTensor engine: the blocks that a rank writes, and reading in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_like.policy.checkpoint import sharded as sharded_checkpoint
from nemo_like.policy.checkpoint.sharded import Block, HostBuffers, PendingSave
from nemo_like.policy.checkpoint.sharded_reader import (
    EMA,
    WEIGHT,
    CheckpointReader,
    open_checkpoint,
)
from nemo_like.policy.dtensor.optimizer import ShardedOptimizer
from nemo_like.policy.dtensor.parameters import ShardedParameter, local_shard
from nemo_like.policy.optim import WeightEma


def save(
    directory: Path,
    parameters: Sequence[ShardedParameter],
    optimizer: ShardedOptimizer | None,
    ema: WeightEma | None,
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
    has_moments = optimizer is not None and optimizer.has_moments
    states = dict(optimizer.states()) if optimizer is not None and has_moments else {}
    if ema is not None:
        states[EMA] = list(ema.shards)
    return sharded_checkpoint.save(
        directory,
        _blocks(parameters, optimizer, ema),
        rank=rank,
        num_optimizer_steps=num_optimizer_steps,
        barrier=barrier,
        buffers=buffers,
        in_background=in_background,
        has_moments=has_moments,
        shapes=_shapes(parameters),
        states=states,
    )


def load(
    directory: Path,
    parameters: Sequence[ShardedParameter],
    optimizer: ShardedOptimizer | None,
    ema: WeightEma | None,
) -> int:
    """Restore in place a checkpoint of any engine and layout; returns its optimizer steps.

    Raises CheckpointError for a directory that is no such checkpoint, ConfigError for one of
    another model.
    """
    if optimizer is not None:
        # A checkpoint without moments restarts the optimizer.
        optimizer.reset()
    with open_checkpoint(directory) as reader:
        reader.check_model(_shapes(parameters))
        if optimizer is not None and reader.has_moments:
            reader.check_states(optimizer.states())
        for sharded in parameters:
            _read_into(sharded.parameter, reader, WEIGHT, sharded)
            if ema is not None and sharded.name in ema.shards:
                # An average that the checkpoint does not have begins with the weight.
                kind = EMA if sharded.name in reader.states.get(EMA, ()) else WEIGHT
                _read_into(ema.shards[sharded.name], reader, kind, sharded)
            if optimizer is None or not reader.has_moments:
                continue
            kinds = optimizer.kinds(sharded)
            if kinds:
                state = _read_state(reader, sharded, kinds)
                optimizer.restore(sharded, state, reader.num_optimizer_steps)
        return reader.num_optimizer_steps


def _read_state(
    reader: CheckpointReader, sharded: ShardedParameter, kinds: Sequence[str]
) -> dict[str, Tensor]:
    """Read the optimizer state of a parameter, in the shape and sharding of the parameter."""
    state = {}
    for kind in kinds:
        state[kind] = torch.zeros_like(sharded.parameter, requires_grad=False)
        _read_into(state[kind], reader, kind, sharded)
    return state


def _read_into(
    target: Tensor, reader: CheckpointReader, kind: str, sharded: ShardedParameter
) -> None:
    """Copy this rank's shard of `kind` (weight or moment) into `target`.

    `target` has the same shape and sharding as the parameter, or is a shard of the same kind.
    """
    offset, shape = sharded.block()
    local_shard(target).copy_(reader.read(f"{kind}/{sharded.name}", offset, shape))


def _blocks(
    parameters: Sequence[ShardedParameter],
    optimizer: ShardedOptimizer | None,
    ema: WeightEma | None,
) -> Iterator[Block]:
    """Yield this rank's blocks of weights, averages and, after a step, of the optimizer state."""
    for sharded in parameters:
        if not sharded.is_owner:
            # Another tp rank has the same values and writes them.
            continue
        offset, _ = sharded.block()
        tensors: dict[str, Tensor] = {WEIGHT: sharded.parameter}
        if optimizer is not None:
            tensors |= optimizer.state(sharded)
        if ema is not None and sharded.name in ema.shards:
            tensors[EMA] = ema.shards[sharded.name]
        for kind, tensor in tensors.items():
            name = f"{kind}/{sharded.name}"
            yield Block(name, sharded.spec.full_shape, offset, local_shard(tensor))


def _shapes(parameters: Sequence[ShardedParameter]) -> dict[str, tuple[int, ...]]:
    return {sharded.name: sharded.spec.full_shape for sharded in parameters}
