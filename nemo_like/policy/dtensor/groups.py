"""Process groups of one rank of the DTensor engine (world, dp, cp, dp x cp, tp)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.distributed.process_groups import (
    build_device_mesh,
    build_replica_mesh,
    share_timeout,
)
from nemo_like.parallel_layout import LayoutError, ParallelLayout, engine_problems
from nemo_like.policy.dtensor.parallel import TensorParallel


@dataclass(frozen=True)
class Groups:
    """Process groups of this rank; None where this rank would be the only member."""

    world: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    """Ranks with the other chunks of the same rows."""
    dp_cp: dist.ProcessGroup | None = None
    tensor: TensorParallel | None = None
    fsdp_mesh: DeviceMesh | None = None
    """The ranks of `dp_cp`, over which weights, gradients and optimizer state are sharded; with
    several replicas [replicas, ranks of `shard`]. None without FSDP.
    """
    shard: dist.ProcessGroup | None = None
    """The ranks over which this rank's copy of the weights is sharded."""
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

        Raises LayoutError for a pipeline or expert parallelism.
        """
        problems = engine_problems("dtensor", pp=parallel_layout.pp, ep=parallel_layout.ep)
        if problems:
            raise LayoutError(problems)
        if parallel_layout.world_size == 1 and not mixed_precision:
            # No process group exists then, and none is needed.
            return cls()
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
        share_timeout()
        return cls(
            world=dist.group.WORLD if parallel_layout.world_size > 1 else None,
            dp=mesh.get_group("dp") if parallel_layout.dp > 1 else None,
            cp=mesh.get_group("cp") if parallel_layout.cp > 1 else None,
            dp_cp=dp_cp.get_group() if has_replicas else None,
            tensor=tensor,
            fsdp_mesh=fsdp_mesh if needs_fsdp else None,
            shard=shard.get_group() if parallel_layout.num_shards > 1 else None,
            replica=parallel_layout.replica(rank),
        )
