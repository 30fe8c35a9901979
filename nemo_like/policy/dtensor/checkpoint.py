"""The DTensor engine's side of the sharded checkpoint: which blocks a rank writes, and reading its
own back in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nemo_like.files import FileRecord
from nemo_like.policy.checkpoint import sharded as sharded_checkpoint
from nemo_like.policy.checkpoint.sharded import MOMENTS, WEIGHT, Block, CheckpointReader
from nemo_like.policy.dtensor.parameters import Weight, local


def save(
    directory: Path,
    weights: Sequence[Weight],
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    num_optimizer_steps: int,
    barrier: Callable[[], None],
) -> dict[str, FileRecord]:
    """Write the blocks that this rank owns. Called by every rank; returns this rank's files."""
    return sharded_checkpoint.save(
        directory,
        _blocks(weights, optimizer),
        rank=rank,
        num_optimizer_steps=num_optimizer_steps,
        barrier=barrier,
        has_moments=len(optimizer.state) > 0,
        shapes=_shapes(weights),
    )


def load(directory: Path, weights: Sequence[Weight], optimizer: torch.optim.Optimizer) -> int:
    """Restore in place what any engine saved in any layout; returns the optimizer steps taken.

    Raises ValueError for a folder that is no such checkpoint or one of another model.
    """
    optimizer.state.clear()
    with sharded_checkpoint.open_checkpoint(directory) as reader:
        reader.check_model(_shapes(weights))
        for weight in weights:
            _restore(reader, WEIGHT, weight, weight.parameter)
            if reader.has_moments:
                # A step counter of its own for each parameter: a shared tensor would be advanced
                # once per parameter.
                state = {
                    "step": torch.tensor(
                        float(reader.num_optimizer_steps), device=weight.parameter.device
                    )
                }
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(weight.parameter, requires_grad=False)
                    _restore(reader, moment, weight, state[moment])
                optimizer.state[weight.parameter] = state
        return reader.num_optimizer_steps


def _blocks(weights: Sequence[Weight], optimizer: torch.optim.Optimizer) -> Iterator[Block]:
    for weight in weights:
        if weight.is_counted_here:
            offset, _ = weight.block()
            state = optimizer.state.get(weight.parameter, {})
            for kind, tensor in (
                (WEIGHT, weight.parameter),
                *((moment, state[moment]) for moment in MOMENTS if state),
            ):
                yield Block(f"{kind}/{weight.name}", weight.cut.full_shape, offset, local(tensor))


def _restore(reader: CheckpointReader, kind: str, weight: Weight, target: Tensor) -> None:
    offset, shape = weight.block()
    local(target).copy_(reader.read(f"{kind}/{weight.name}", offset, shape))


def _shapes(weights: Sequence[Weight]) -> dict[str, tuple[int, ...]]:
    return {weight.name: weight.cut.full_shape for weight in weights}
