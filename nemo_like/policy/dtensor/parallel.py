"""Process groups of a rank, and its tensor-parallel group. `tensor_plan` shards a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.process_groups import (
    build_device_mesh,
    build_expert_mesh,
    build_replica_mesh,
    context_parts,
    share_timeout,
)
from nemo_like.parallel_layout import LayoutError, ParallelLayout, engine_problems
from nemo_like.policy.collectives import (
    copy_to,
    gather_columns,
    gather_equal_rows,
    gather_rows,
    scatter_sum,
    split_columns,
    sum_over,
)
from nemo_like.policy.rank_groups import RankGroups


class ShardSpec(NamedTuple):
    """Part of a weight that a tensor-parallel rank has: [start, stop) of one dim, or all of it.

    Example: rows 33 to 67 of an embedding are
    `ShardSpec((67, 32), dim=0, start=33, stop=67, has_partial_grad=False)`.
    """

    full_shape: tuple[int, ...]
    dim: int | None = None
    """The sharded dim; None for a weight that every rank replicates."""
    start: int = 0
    stop: int = 0
    has_partial_grad: bool = False
    """True for a replicated weight whose gradient covers this rank's heads or tokens only; it is
    all-reduced over the tp ranks.
    """
    ep: int = 1
    """Expert-parallel ranks over which the rows (dim 0) of the tensor-parallel rank are divided."""

    def shard(self, full: Tensor) -> Tensor:
        """Return this rank's part of `full` [*full_shape].

        It is a copy of [start, stop) of `dim` where the weight is sharded, else `full` itself.
        """
        if self.dim is None:
            return full
        # A copy, so that the memory of the full tensor can be freed.
        return full.narrow(self.dim, self.start, self.stop - self.start).clone()


Specs = dict[nn.Parameter, ShardSpec]


@dataclass(frozen=True)
class TensorParallel:
    """The tensor-parallel group of one rank."""

    group: dist.ProcessGroup
    rank: int
    size: int
    sequence: bool
    """Sequence parallelism: norms and residuals are sharded too, by tokens."""

    def gather_input(self, hidden: Tensor) -> Tensor:
        """Return the input [..., D] of a sharded computation, `hidden` itself.

        With sequence parallelism `hidden` is this rank's [T / tp, D] or [1, T / tp, D] and is
        all-gathered to T tokens. The backward sums the ranks' gradients.
        """
        if not self.sequence:
            return copy_to(self.group, hidden)
        if hidden.ndim == 3:
            return gather_rows(self.group, hidden[0])[None]
        return gather_rows(self.group, hidden)

    def gather_tokens(self, hidden: Tensor) -> Tensor:
        """Return the input of a computation that every rank does completely.

        As `gather_input`, but the ranks' gradients are equal and are not summed.
        """
        return gather_equal_rows(self.group, hidden[0])[None] if self.sequence else hidden

    def reduce_output(self, partial_sums: Tensor) -> Tensor:
        """Sum the ranks' outputs [..., D] of a sharded computation.

        With sequence parallelism the result is this rank's tokens [1, T / tp, D] or [T / tp, D].
        """
        if not self.sequence:
            return sum_over(self.group, partial_sums)
        if partial_sums.ndim == 3:
            return scatter_sum(self.group, partial_sums[0])[None]
        return scatter_sum(self.group, partial_sums)

    def copy_input(self, hidden: Tensor) -> Tensor:
        """Return `hidden` [..., D] of all tokens; the backward sums the ranks' gradients."""
        return copy_to(self.group, hidden)

    def gather_features(self, outputs: Tensor) -> Tensor:
        """All-gather [..., D] from each rank's [..., D / tp]; the ranks' gradients are equal."""
        return gather_columns(self.group, outputs)

    def split_features(self, hidden: Tensor) -> Tensor:
        """Return this rank's features [..., D / tp] of `hidden` [..., D], equal on all ranks."""
        return split_columns(self.group, hidden)

    def shard_range(self, size: int, rank: int | None = None) -> tuple[int, int]:
        """[start, stop) of a dim of `size` on this tp rank, or on tp rank `rank`.

        Example: a dim of 67 over 2 ranks gives (0, 33) and (33, 67).
        """
        if rank is None:
            rank = self.rank
        return rank * size // self.size, (rank + 1) * size // self.size


@dataclass(frozen=True)
class ExpertParallel:
    """The expert-parallel group of one rank: ranks of one copy of the weights and one tp rank."""

    group: dist.ProcessGroup
    rank: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Groups(RankGroups):
    """Process groups of this rank, and the meshes of FSDP."""

    tensor: TensorParallel | None = None
    fsdp_mesh: DeviceMesh | None = None
    """The ranks of `dp_cp`, over which weights, gradients and optimizer state are sharded; with
    several replicas [replicas, ranks of `shard`]. None without FSDP.
    """
    shard: dist.ProcessGroup | None = None
    """The ranks over which this rank's copy of the weights is sharded."""
    expert: ExpertParallel | None = None
    """Consecutive ranks of `shard`."""
    expert_mesh: DeviceMesh | None = None
    """As `fsdp_mesh`, of the ranks with the same experts."""
    replica: int = 0
    """Index of this rank's copy of the weights. Copy 0 writes checkpoints and exports."""

    @classmethod
    def join(
        cls,
        parallel_layout: ParallelLayout,
        rank: int,
        device: torch.device,
        *,
        mixed_precision: bool,
    ) -> Groups:
        """Create the groups of `rank` in the default process group; every rank calls.

        Raises LayoutError for a pipeline, and for expert-parallel groups of unequal size.
        """
        problems = engine_problems("dtensor", pp=parallel_layout.pp)
        problems += parallel_layout.engine_problems("dtensor")
        if problems:
            raise LayoutError(problems)
        if parallel_layout.world_size == 1 and not mixed_precision:
            # No process group exists then, and none is needed.
            return cls(layout=parallel_layout, rank=rank, device=device)
        mesh = build_device_mesh(parallel_layout, device.type)
        # Dp and cp ranks with the same tp rank have equal weights: FSDP shards over both axes.
        if parallel_layout.dp > 1 and parallel_layout.cp > 1:
            dp_cp = mesh["dp", "cp"]._flatten("dp_cp")
        else:
            dp_cp = mesh["cp" if parallel_layout.cp > 1 else "dp"]
        has_replicas = parallel_layout.dp * parallel_layout.cp > 1
        # FSDP implements mixed precision, so one process in mixed precision has a mesh of one rank.
        needs_fsdp = has_replicas or mixed_precision
        tensor = None
        if parallel_layout.tp > 1:
            tp_rank = parallel_layout.coordinates(rank).tp
            tensor = TensorParallel(
                mesh.get_group("tp"), tp_rank, parallel_layout.tp, parallel_layout.sequence_parallel
            )
        shard = dp_cp
        fsdp_mesh = dp_cp
        if parallel_layout.num_replicas > 1:
            replica_mesh = build_replica_mesh(parallel_layout, device.type)
            fsdp_mesh = replica_mesh["replica", "shard"]
            shard = replica_mesh["shard"]
        expert = None
        expert_mesh = None
        if parallel_layout.ep > 1:
            experts = build_expert_mesh(parallel_layout, device.type)
            group = experts.get_group("expert")
            expert = ExpertParallel(group, group.rank(), group.size())
            has_copies = parallel_layout.num_replicas > 1
            expert_mesh = experts["replica", "shard"] if has_copies else experts["shard"]
        cp_parts = context_parts(parallel_layout)
        share_timeout()
        return cls(
            layout=parallel_layout,
            rank=rank,
            device=device,
            world=dist.group.WORLD if parallel_layout.world_size > 1 else None,
            dp=mesh.get_group("dp") if parallel_layout.dp > 1 else None,
            cp=mesh.get_group("cp") if parallel_layout.cp > 1 else None,
            cp_parts=cp_parts,
            dp_cp=dp_cp.get_group() if has_replicas else None,
            tensor=tensor,
            fsdp_mesh=fsdp_mesh if needs_fsdp else None,
            shard=shard.get_group() if parallel_layout.num_shards > 1 else None,
            expert=expert,
            expert_mesh=expert_mesh,
            replica=parallel_layout.replica(rank),
        )
