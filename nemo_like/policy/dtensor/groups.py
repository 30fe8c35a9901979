"""The process groups of one rank of the DTensor engine: whom it shares what with."""

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
    """A group is None where it would be this rank alone."""

    world: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    cp: dist.ProcessGroup | None = None
    """The ranks that hold the other chunks of the same rows."""
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
        """The groups of `rank`, in the process group that exists; every rank calls.

        One process in float32 needs no process group. Mixed precision is FSDP's, so it takes a mesh
        of one rank too.
        """
        if topology.pp > 1:
            raise ConfigError(
                f"parallel.pipeline is {topology.pp}, but policy.engine dtensor has no pipeline:"
                f" set it to 1, or policy.engine "
                "to megatron"
            )
        if topology.world_size == 1 and not mixed_precision:
            return cls()
        mesh = build_device_mesh(topology, device.type)
        if topology.dp > 1 and topology.cp > 1:
            dp_cp = mesh["dp", "cp"]._flatten("dp_cp")
        else:
            dp_cp = mesh["cp" if topology.cp > 1 else "dp"]
        has_replicas = topology.dp * topology.cp > 1
        tensor = None
        if topology.tp > 1:
            tensor = TensorParallel(
                mesh.get_group("tp"), topology.coordinates(rank).tp, topology.tp, sequence_parallel
            )
        return cls(
            world=dist.group.WORLD if topology.world_size > 1 else None,
            dp=mesh.get_group("dp") if topology.dp > 1 else None,
            cp=mesh.get_group("cp") if topology.cp > 1 else None,
            dp_cp=dp_cp.get_group() if has_replicas else None,
            tensor=tensor,
            fsdp_mesh=dp_cp if has_replicas or mixed_precision else None,
        )
