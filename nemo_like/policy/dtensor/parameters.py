"""One sharded parameter: the position of this rank's shard, and gathering the full tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.integer_math import ceil_div
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.parallel import ShardSpec


@dataclass(frozen=True)
class ShardedParameter:
    """A distinct parameter, sharded by tensor parallelism first and then by FSDP along dim 0.

    Example: an (8, 6) matrix has its columns sharded over two tp ranks and its rows over two FSDP
    ranks. Tp rank 1 and FSDP rank 0 have the block at offset (0, 3) of shape (4, 3).
    """

    name: str
    """Hugging Face name."""
    parameter: nn.Parameter
    spec: ShardSpec
    groups: Groups

    @property
    def is_owner(self) -> bool:
        """True on the one tp rank that reports a parameter: rank 0 for a replicated one."""
        is_replicated = self.spec.dim is None
        return not is_replicated or self.groups.tensor is None or self.groups.tensor.rank == 0

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of this rank's shard in the full tensor."""
        mesh = self.groups.fsdp_mesh
        start = 0
        stop = self.parameter.shape[0]
        if mesh is not None:
            start, stop = row_range(
                stop,
                mesh.size(),
                mesh.get_local_rank(),
            )
        shape = tuple(local_shard(self.parameter).shape)
        assert shape[0] == stop - start, (
            f"{self.name}: FSDP has {shape[0]} rows where {start}..{stop} was expected"
        )
        offset = [0] * len(shape)
        offset[0] = start
        if self.spec.dim is not None:
            # Added, because tensor parallelism and FSDP may shard the same dim.
            offset[self.spec.dim] += self.spec.start
        return tuple(offset), shape

    def gather_full(self, shard: Tensor) -> Tensor:
        """Gather the full tensor from the ranks' plain tensors `shard`; every rank calls.

        `shard` is of the parameter, its gradient or a moment; `block` returns its shape. The
        result is [*full_shape] on rank 0; elsewhere it may be smaller or empty.
        """
        rows = self._gather_fsdp(shard)
        tensor_parallel = self.groups.tensor
        if tensor_parallel is None or self.spec.dim is None:
            return rows
        if tensor_parallel.rank > 0:
            dist.send(rows.contiguous(), group=tensor_parallel.group, group_dst=0)
            return rows.new_empty(0)
        # Point to point and not an all-gather: only tp rank 0 needs memory for the full tensor.
        parts = [rows]
        for rank in range(1, tensor_parallel.size):
            start, stop = tensor_parallel.shard_range(self.spec.full_shape[self.spec.dim], rank)
            shape = list(rows.shape)
            shape[self.spec.dim] = stop - start
            received = rows.new_empty(shape)
            dist.recv(received, group=tensor_parallel.group, group_src=rank)
            parts.append(received)
        return torch.cat(parts, dim=self.spec.dim)

    def _gather_fsdp(self, shard: Tensor) -> Tensor:
        """All-gather this tp rank's n rows, [n, ...], from the FSDP ranks' `shard` [m, ...]."""
        # Not `DTensor.full_tensor`: it caches meshes that outlive their process group.
        group = self.groups.dp_cp
        if group is None:
            return shard
        num_rows = self.parameter.shape[0]
        # Shards differ in size if the rows do not divide evenly; the collective needs equal ones.
        rows_per_rank = ceil_div(num_rows, group.size())
        padded = shard.new_empty(rows_per_rank, *shard.shape[1:])
        padded[: len(shard)] = shard
        return gather_rows(group, padded)[:num_rows]


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself; without gradient.

    The shard has the rows [m, ...] of this FSDP rank.
    """
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def row_range(
    num_rows: int,
    num_ranks: int,
    rank: int,
) -> tuple[int, int]:
    """Rows [start, stop) of dim 0 that FSDP2 gives `rank`.

    Example: 5 rows on 3 ranks are (0, 2), (2, 4), (4, 5).
    """
    rows_per_rank = ceil_div(num_rows, num_ranks)
    start = min(rank * rows_per_rank, num_rows)
    stop = min((rank + 1) * rows_per_rank, num_rows)
    return start, stop
