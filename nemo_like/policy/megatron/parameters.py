"""Tensors between Hugging Face names and Megatron-Core parameters, one parameter at a time.

Memory is therefore bounded by the largest parameter, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nemo_like.distributed import activity
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.checkpoint.sharded import Block
from nemo_like.policy.checkpoint.sharded_reader import WEIGHT
from nemo_like.policy.megatron.groups import Groups
from nemo_like.policy.megatron.param_map import (
    HFSlice,
    ModelSharding,
    ParamMap,
    ParamSpec,
    Shape,
    parallel_coords,
)

ReadBlock = Callable[[str, Shape, Shape], Tensor]
"""(Hugging Face name, offset, shape) -> that block, on the CPU."""


def assemble_rows(
    spec: ParamSpec, read: ReadBlock, start: int = 0, stop: int | None = None
) -> Tensor:
    """Read rows [start, stop) of a rank's parameter: float32 [stop - start, ...] on the CPU.

    The other dims come from the spec. Padding of the vocabulary is 0.
    """
    activity.note(f"reading weights of shape {tuple(spec.shape)}")
    if stop is None:
        stop = spec.shape[0]
    # Zeros, because rows of vocabulary padding have no slice.
    rows = torch.zeros(stop - start, *spec.shape[1:])
    for hf_slice in spec.slices:
        part = hf_slice.rows(start, stop)
        if part.numel == 0:
            continue
        first_row = part.local_offset[0] - start
        target = rows.narrow(0, first_row, part.shape[0])
        values = read(part.name, part.offset, part.shape)
        target.copy_(values)
    return rows


class _ShardOwner(NamedTuple):
    """A parameter with slices of some Hugging Face tensor, and the ranks that have it."""

    stage: int
    group_rank: int
    """The tp rank; of an expert the ep rank."""
    is_expert: bool
    parameter: str
    slices: tuple[HFSlice, ...]

    @property
    def numel(self) -> int:
        return sum(hf_slice.numel for hf_slice in self.slices)


class FullWeightGatherer:
    """Gathers full tensors under Hugging Face names on rank 0 from the ranks' parameters."""

    def __init__(
        self,
        param_map: Callable[[ModelSharding, int, int, int], ParamMap],
        sharding: ModelSharding,
        parallel_layout: ParallelLayout,
        rank: int,
        device: torch.device,
    ) -> None:
        """`param_map` returns the map of the rank at a stage, tp rank and ep rank."""
        self._parallel_layout = parallel_layout
        self._rank = rank
        self._device = device
        self._stage, self._tp_rank, self._ep_rank = parallel_coords(parallel_layout, rank)
        self._owners: dict[str, list[_ShardOwner]] = {}
        # Every rank knows the parameters of all ranks, so that senders and rank 0 agree without
        # communication.
        for stage in range(sharding.pp):
            for tp_rank in range(sharding.tp):
                for parameter, spec in param_map(sharding, stage, tp_rank, 0).items():
                    if not spec.is_expert:
                        self._register(stage, tp_rank, parameter, spec)
            # An expert is not sharded over tp, so tp rank 0 stands for all of them.
            for ep_rank in range(sharding.ep):
                for parameter, spec in param_map(sharding, stage, 0, ep_rank).items():
                    if spec.is_expert:
                        self._register(stage, ep_rank, parameter, spec)

    @property
    def names(self) -> frozenset[str]:
        """Hugging Face names of all weights that the ranks have."""
        return frozenset(self._owners)

    def gather(
        self,
        names: Sequence[str],
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        local: Callable[[str], Tensor],
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with its full tensor on rank 0 and an empty one elsewhere.

        Every rank iterates to the end. `local(parameter)` is this rank's parameter (or its
        gradient) in the shape of its spec. All ranks that replicate a parameter call it at the same
        time, so it may use collectives among them.
        """
        for name in names:
            shape = shapes[name] if self._rank == 0 else 0
            full = torch.empty(shape, dtype=dtype, device=self._device)
            for owner in self._owners[name]:
                self._gather_shard(owner, full, local)
            yield name, full

    def _gather_shard(
        self, owner: _ShardOwner, full: Tensor, local: Callable[[str], Tensor]
    ) -> None:
        """Copy the slices of `owner` into `full` [*shape] on rank 0; elsewhere `full` is [0]."""
        sender = self._sender(owner)
        values = None
        if self._has_parameter(owner):
            # All replicas call `local`, which may be a collective; only the sender uses the result.
            parameter = local(owner.parameter)
            if self._rank == sender:
                # One message per parameter instead of one per slice.
                flat_slices = []
                for hf_slice in owner.slices:
                    values = parameter[hf_slice.local_index]
                    flat_slices.append(values.reshape(-1))
                values = torch.cat(flat_slices).to(full.dtype)
        if sender != 0 and self._rank == sender:
            assert values is not None
            dist.send(values, dst=0)
        elif sender != 0 and self._rank == 0:
            values = torch.empty(owner.numel, dtype=full.dtype, device=full.device)
            dist.recv(values, src=sender)
        if self._rank == 0:
            assert values is not None
            sizes = [hf_slice.numel for hf_slice in owner.slices]
            parts = values.split(sizes)
            for hf_slice, part in zip(owner.slices, parts, strict=True):
                full[hf_slice.hf_index] = part.view(hf_slice.shape)

    def _sender(self, owner: _ShardOwner) -> int:
        """Global rank of the first replica."""
        # Ranks of a stage start at its first rank; tp ranks, and ep ranks, are consecutive.
        return self._parallel_layout.rank(pp=owner.stage) + owner.group_rank

    def _has_parameter(self, owner: _ShardOwner) -> bool:
        group_rank = self._ep_rank if owner.is_expert else self._tp_rank
        return self._stage == owner.stage and group_rank == owner.group_rank

    def _register(self, stage: int, group_rank: int, parameter: str, spec: ParamSpec) -> None:
        if not spec.is_owner:
            # A replica; the owner sends the same values.
            return
        # A fused parameter has slices of several Hugging Face tensors.
        slices_of_name: dict[str, list[HFSlice]] = {}
        for hf_slice in spec.slices:
            slices_of_name.setdefault(hf_slice.name, []).append(hf_slice)
        for name, slices in slices_of_name.items():
            owner = _ShardOwner(stage, group_rank, spec.is_expert, parameter, tuple(slices))
            self._owners.setdefault(name, []).append(owner)


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
        assert replicas is not None, "Megatron-Core always has process groups"
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
