"""Checkpoints of the Megatron engine: the blocks that a rank writes, and reading in place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import nn

from nemo_like.policy.checkpoint.sharded import Block
from nemo_like.policy.checkpoint.sharded_reader import (
    EMA,
    MOMENTS,
    WEIGHT,
    adam_states,
    open_checkpoint,
)
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.megatron.optimizer import ShardedAdamW, read_kind
from nemo_like.policy.megatron.param_map import ParamMap, Shape
from nemo_like.policy.megatron.parameters import ReadBlock, assemble_rows
from nemo_like.policy.optim import WeightEma


def load(
    directory: Path,
    parameters: Mapping[str, nn.Parameter],
    param_map: ParamMap,
    optimizer: ShardedAdamW | None,
    shapes: Mapping[str, Shape],
    frozen: Collection[str],
    ema: WeightEma | None,
) -> int:
    """Restore in place a checkpoint of any engine and layout; returns its optimizer steps.

    `optimizer` is None for a frozen engine, and `frozen` names the weights that it does not update.
    Raises CheckpointError for a directory that is no such
    checkpoint, ConfigError for one of another model.
    """
    with open_checkpoint(directory) as reader:
        reader.check_model(shapes)

        def read_weight(name: str, offset: Shape, shape: Shape) -> torch.Tensor:
            """Read a block [*shape] of the weight `name` at `offset`, float32 on the CPU."""
            return reader.read(f"{WEIGHT}/{name}", offset, shape)

        fill_weights(parameters, param_map, read_weight, optimizer)
        if optimizer is not None:
            trained = [name for name in shapes if name not in frozen]
            reader.check_states(adam_states(trained, reader.has_moments))
            num_steps = reader.num_optimizer_steps if reader.has_moments else None
            optimizer.restore(num_steps, reader.read)
            if ema is not None:
                # Averages that the checkpoint does not have begin with the weights.
                kind = EMA if EMA in reader.states else WEIGHT
                for name in ema.shards:
                    values = optimizer.read_shard(name, partial(read_kind, reader.read, kind))
                    assert values is not None, "this rank updates the shard"
                    ema.shards[name].copy_(values)
        return reader.num_optimizer_steps


@torch.no_grad()
def fill_weights(
    parameters: Mapping[str, nn.Parameter],
    param_map: ParamMap,
    read: ReadBlock,
    optimizer: ShardedAdamW | None,
) -> None:
    """Fill this rank's weights, and the optimizer's float32 masters, from blocks of `read`."""
    for name, parameter in parameters.items():
        full = assemble_rows(param_map[name], read)
        parameter.copy_(full.view(parameter.shape))
        if optimizer is not None:
            # From the float32 values, not from the parameter, which may be bfloat16.
            optimizer.set_weight(name, full)


def frozen_blocks(
    parameters: Mapping[str, nn.Parameter],
    param_map: ParamMap,
    groups: Groups,
    shapes: Mapping[str, Shape],
) -> Iterator[Block]:
    """Yield this rank's blocks of the weights of a frozen engine.

    `shapes` are the full shapes of the weights by Hugging Face name.
    """
    for index, (name, spec) in enumerate(param_map.items()):
        replicas = groups.expert_dp if spec.is_expert else groups.dp_cp
        is_writer = replicas.rank() == index % replicas.size()
        if not spec.is_owner or not is_writer:
            continue
        full = parameters[name].detach().view(spec.shape)
        for hf_slice in spec.slices:
            yield Block(
                f"{WEIGHT}/{hf_slice.name}",
                shapes[hf_slice.name],
                hf_slice.offset,
                full[hf_slice.local_index],
            )


def trained_blocks(
    param_map: ParamMap, optimizer: ShardedAdamW, shapes: Mapping[str, Shape], ema: WeightEma | None
) -> Iterator[Block]:
    """Yield this rank's blocks of weights and moments; see `frozen_blocks`. Every rank iterates."""
    kinds = [WEIGHT, *MOMENTS] if optimizer.has_moments else [WEIGHT]
    if ema is not None:
        kinds.append(EMA)
    for index, (name, spec) in enumerate(param_map.items()):
        if not spec.is_owner:
            # Another tp rank or pipeline stage has the same values and writes them.
            continue
        for kind in kinds:
            # The replicas write in turn, so that each of them writes about the same share.
            if kind == EMA and ema is not None:
                full = optimizer.gather_values(name, ema.shards.get(name), writer=index)
            else:
                full = optimizer.gather_state(name, kind, writer=index)
            if full is None:
                continue
            for hf_slice in spec.slices:
                yield Block(
                    f"{kind}/{hf_slice.name}",
                    shapes[hf_slice.name],
                    hf_slice.offset,
                    full[hf_slice.local_index],
                )
