"""One weight of a sharded model: where this rank's part lies in the whole, and how the whole comes
together again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.dtensor.groups import Groups
from nemo_like.policy.dtensor.parallel import Cut


@dataclass(frozen=True)
class Weight:
    """A distinct parameter: cut by tensor parallelism first, and along dim 0 of what is left by
    FSDP.

    Example: of a (8, 6) matrix whose columns two tp ranks share and whose rows two FSDP ranks
    share, tp rank 1 and FSDP rank 0 have the block at offset (0, 3) of shape (4, 3).
    """

    name: str
    """Hugging Face's."""
    parameter: nn.Parameter
    cut: Cut
    groups: Groups

    @property
    def is_counted_here(self) -> bool:
        """Whether this rank speaks for its part: of what all tp ranks hold, the first does."""
        return (
            self.cut.dim is not None or self.groups.tensor is None or self.groups.tensor.rank == 0
        )

    def block(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(offset, shape) of this rank's part in the whole weight."""
        mesh = self.groups.fsdp_mesh
        start, stop = 0, self.parameter.shape[0]
        if mesh is not None:
            start, stop = row_range(stop, mesh.size(), mesh.get_local_rank())
        shape = tuple(local(self.parameter).shape)
        assert shape[0] == stop - start, (
            f"{self.name}: FSDP holds {shape[0]} rows where {start}..{stop} was expected"
        )
        offset = [0] * len(shape)
        offset[0] = start
        if self.cut.dim is not None:
            offset[self.cut.dim] += self.cut.start
        return tuple(offset), shape

    def whole(self, part: Tensor) -> Tensor:
        """The full tensor of which the plain tensor `part` (of weight, gradient or moment) is this
        rank's: on rank 0; elsewhere it may be empty or less. Every rank calls.
        """
        rows = self._all_rows(part)
        tensor_parallel = self.groups.tensor
        if tensor_parallel is None or self.cut.dim is None:
            return rows
        if tensor_parallel.rank > 0:
            dist.send(rows.contiguous(), group=tensor_parallel.group, group_dst=0)
            return rows.new_empty(0)
        parts = [rows]
        for rank in range(1, tensor_parallel.size):
            start, stop = tensor_parallel.span(self.cut.full_shape[self.cut.dim], rank)
            shape = list(rows.shape)
            shape[self.cut.dim] = stop - start
            parts.append(rows.new_empty(shape))
            dist.recv(parts[-1], group=tensor_parallel.group, group_src=rank)
        return torch.cat(parts, dim=self.cut.dim)

    def _all_rows(self, part: Tensor) -> Tensor:
        """What the ranks of FSDP hold, end to end. Not by `DTensor.full_tensor`, whose meshes
        outlive a process group.
        """
        group, num_rows = self.groups.dp_cp, self.parameter.shape[0]
        if group is None:
            return part
        block = -(-num_rows // group.size())
        padded = part.new_empty(block, *part.shape[1:])
        padded[: len(part)] = part
        return gather_rows(group, padded)[:num_rows]


def local(tensor: Tensor) -> Tensor:
    """This rank's part: the shard of a DTensor, a plain tensor itself; without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def row_range(num_rows: int, num_ranks: int, rank: int) -> tuple[int, int]:
    """Rows [start, stop) of dim 0 that FSDP2 gives `rank`. Example: 5 rows on 3 ranks are (0, 2),
    (2, 4), (4, 5).
    """
    block = -(-num_rows // num_ranks)
    return min(rank * block, num_rows), min((rank + 1) * block, num_rows)
