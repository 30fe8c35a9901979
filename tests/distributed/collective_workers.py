"""A worker in a gloo process group, for what happens when one member of a collective goes away."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from nemo_like.distributed import process_groups
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.parallel_layout import ParallelLayout


class CollectiveWorker:
    def __init__(self, context: WorkerContext, *, parallel_layout: ParallelLayout) -> None:
        self.context = context
        self.device = process_groups.init_process_group(context)
        self.mesh = process_groups.build_device_mesh(parallel_layout, "cpu")

    def describe(self) -> tuple[int, str, str | None]:
        """Threads torch uses, its device, and the network interface gloo was bound to."""
        return torch.get_num_threads(), str(self.device), os.environ.get("GLOO_SOCKET_IFNAME")

    def sum_along(self, axis: str, value: float) -> float:
        """The sum of `value` plus rank over this rank's group of one mesh axis."""
        tensor = torch.tensor([value + self.context.rank])
        dist.all_reduce(tensor, group=self.mesh.get_group(axis))
        return tensor.item()

    def all_reduce_forever(self) -> None:
        while True:
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)

    def fail_after_leaving(self, rank: int) -> None:
        """`rank` breaks the others' collective first and tells why only later."""
        if self.context.rank == rank:
            dist.destroy_process_group()
            time.sleep(1.5)
            raise ValueError(f"row 7 is bad on rank {rank}")
        self.all_reduce_forever()
