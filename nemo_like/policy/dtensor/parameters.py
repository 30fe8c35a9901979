"""One sharded parameter: the position of this rank's shard, and gathering the full tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.integer_math import ceil_div
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.dtensor.parallel import Groups, ShardSpec


@dataclass(frozen=True)
class ShardedParameter:
    """A distinct parameter, sharded by tensor parallelism first and then by FSDP along dim 0.

    Between the two, expert parallelism divides the experts, dim 0, of a tensor-parallel rank.

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
        """True on the one rank that reports this shard of a parameter.

        It belongs to copy 0 of the weights and, for a parameter that tensor parallelism replicates,
        to tp rank 0.
        """
        if self.groups.replica > 0:
            return False
        is_replicated = self.spec.dim is None
        return not is_replicated or self.groups.tensor is None or self.groups.tensor.rank == 0

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of this rank's shard in the full tensor."""
        group = self.groups.shard
        start, stop = self.rows(0 if group is None else group.rank())
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

    def rows(self, rank: int) -> tuple[int, int]:
        """Rows [start, stop), of this tp rank's, that rank `rank` of `groups.shard` has."""
        group = self.groups.shard
        num_ranks = 1 if group is None else group.size()
        num_rows = self.parameter.shape[0]
        fsdp_rank, ep_rank = divmod(rank, self.spec.ep)
        start, stop = row_range(num_rows, num_ranks // self.spec.ep, fsdp_rank)
        return ep_rank * num_rows + start, ep_rank * num_rows + stop

    def gather_full(self, shard: Tensor) -> Tensor:
        """Gather the full tensor from the ranks' plain tensors `shard`; every rank calls.

        `shard` is of the parameter, its gradient or a moment; `block` returns its shape. The
        result is [*full_shape] on rank 0; elsewhere it may be smaller or empty.
        """
        rows = self.gather_over_fsdp(shard)
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

    def gather_over_fsdp(self, shard: Tensor) -> Tensor:
        """All-gather this tp rank's n rows, [n, ...], from the FSDP ranks' `shard` [m, ...]."""
        # Not `DTensor.full_tensor`: it caches meshes that outlive their process group.
        group = self.groups.shard
        if group is None:
            return shard
        num_rows = self.parameter.shape[0]
        ep = self.spec.ep
        # Shards differ in size if the rows do not divide evenly; the collective needs equal ones.
        rows_per_rank = ceil_div(num_rows, group.size() // ep)
        padded = shard.new_empty(rows_per_rank, *shard.shape[1:])
        padded[: len(shard)] = shard
        gathered = gather_rows(group, padded)
        if ep == 1:
            return gathered[:num_rows]
        # Expert-parallel ranks are consecutive, and their rows are not.
        by_ep_rank = gathered.unflatten(0, (-1, ep, rows_per_rank)).transpose(0, 1).flatten(1, 2)
        return by_ep_rank[:, :num_rows].flatten(0, 1)


def gather_parameters(
    parameters: Sequence[ShardedParameter],
    shards: Sequence[Tensor],
    targets: Sequence[Tensor] | None,
) -> None:
    """Gather parameters into `targets`, [*full_shape] each, of rank 0; None on all other ranks.

    `shards` are this rank's plain tensors, [m, ...] each. Rank 0 receives the rows of the other
    FSDP ranks in their place, all messages at once: one all-gather per parameter would need two
    more copies and a synchronization each. Every rank calls.
    """
    messages: list[dist.P2POp] = []
    # Rows that cannot be received in their place: (received, place).
    staged: list[tuple[Tensor, Tensor]] = []
    for index, (parameter, shard) in enumerate(zip(parameters, shards, strict=True)):
        target = None if targets is None else targets[index]
        tensor_parallel = parameter.groups.tensor
        if tensor_parallel is not None and parameter.spec.dim is not None:
            full = parameter.gather_full(shard)
            if target is not None:
                target.copy_(full)
        elif target is not None:
            target[: len(shard)].copy_(shard)
            messages += _receive_rows(parameter, target, shard, index, staged)
        elif parameter.is_owner:
            messages += _send_rows(parameter.groups.shard, shard, index)
    if messages:
        for work in dist.batch_isend_irecv(messages):
            work.wait()
    for received, place in staged:
        place.copy_(received)


def _send_rows(group: dist.ProcessGroup | None, shard: Tensor, tag: int) -> list[dist.P2POp]:
    """Return the message with the rows `shard`, [m, ...], to rank 0; none without rows."""
    if shard.numel() == 0:
        return []
    return [dist.P2POp(dist.isend, shard.contiguous(), group=group, group_peer=0, tag=tag)]


def _receive_rows(
    parameter: ShardedParameter,
    target: Tensor,
    shard: Tensor,
    tag: int,
    staged: list[tuple[Tensor, Tensor]],
) -> list[dist.P2POp]:
    """Return the messages of the other FSDP ranks with their rows of `target`, [n, ...].

    Messages arrive on the device of `shard`, [m, ...]. For a target on another device `staged`
    gets the received rows and their place.
    """
    messages = []
    group = parameter.groups.shard
    for rank in range(1, 1 if group is None else group.size()):
        start, stop = parameter.rows(rank)
        place = target[start:stop]
        if place.numel() == 0:
            continue
        received = place
        if target.device != shard.device:
            received = torch.empty_like(place, device=shard.device)
            staged.append((received, place))
        messages.append(dist.P2POp(dist.irecv, received, group=group, group_peer=rank, tag=tag))
    return messages


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor itself; without gradient.

    The shard has the rows [m, ...] of this FSDP rank.
    """
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def row_range(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Rows [start, stop) of dim 0 that FSDP2 gives `rank`.

    Example: 5 rows on 3 ranks are (0, 2), (2, 4), (4, 5).
    """
    rows_per_rank = ceil_div(num_rows, num_ranks)
    start = min(rank * rows_per_rank, num_rows)
    stop = min((rank + 1) * rows_per_rank, num_rows)
    return start, stop
