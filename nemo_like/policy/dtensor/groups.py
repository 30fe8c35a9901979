"""Process groups of one rank of the DTensor engine (world, dp, cp, dp x cp, tp)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nemo_like.config.errors import ConfigError
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.distributed.process_groups import build_device_mesh
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
    """The ranks of `dp_cp`, over which weights, gradients and optimizer state are sharded; None
    without FSDP.
    """

    @classmethod
    def join(
        cls,
        topology: Topology,
        rank: int,
        device: torch.device,
        *,
        sequence_parallel: bool,
        mixed_precision: bool,
    ) -> Groups:
        """Create the groups of `rank` in the default process group; every rank calls.

        Raises ConfigError for a pipeline.
        """
        if topology.pp > 1:
            raise ConfigError(
                f"parallel.pipeline is {topology.pp}, but policy.engine dtensor has no pipeline:"
                " set it to 1, or policy.engine to megatron"
            )
        if topology.world_size == 1 and not mixed_precision:
            return cls()
        mesh = build_device_mesh(topology, device.type)
        if topology.dp > 1 and topology.cp > 1:
            dp_cp = mesh["dp", "cp"]._flatten("dp_cp")
        else:
            dp_cp = mesh["cp" if topology.cp > 1 else "dp"]
        has_replicas = topology.dp * topology.cp > 1
        # FSDP implements mixed precision, so one process in mixed precision has a mesh of one rank.
        needs_fsdp = has_replicas or mixed_precision
        tensor = None
        if topology.tp > 1:
            tp_rank = topology.coordinates(rank).tp
            tensor = TensorParallel(mesh.get_group("tp"), tp_rank, topology.tp, sequence_parallel)
        return cls(
            world=dist.group.WORLD if topology.world_size > 1 else None,
            dp=mesh.get_group("dp") if topology.dp > 1 else None,
            cp=mesh.get_group("cp") if topology.cp > 1 else None,
            dp_cp=dp_cp.get_group() if has_replicas else None,
            tensor=tensor,
            fsdp_mesh=dp_cp if needs_fsdp else None,
        )
