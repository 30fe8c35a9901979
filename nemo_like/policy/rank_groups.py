"""One rank of the policy: its place in the layout, its device, and reductions over its groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.collectives import (
    gather_objects,
    gather_rows,
    reduce_objects,
    sum_floats,
    sum_over,
)

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class RankGroups:
    """The groups that both engines have; each is None where this rank would be the only member.

    Every rank of a group calls its method.
    """

    layout: ParallelLayout
    rank: int
    device: torch.device
    world: dist.ProcessGroup | None = None
    dp: dist.ProcessGroup | None = None
    """Ranks with other rows."""
    cp: dist.ProcessGroup | None = None
    """Ranks with the other chunks of the same rows."""
    dp_cp: dist.ProcessGroup | None = None
    cp_parts: Mapping[int, dist.ProcessGroup] = field(default_factory=dict)
    """The groups of smaller context-parallel sizes above 1, of dynamic context parallelism."""

    @property
    def cp_rank(self) -> int:
        """Index of this rank along the context-parallel axis."""
        return self.layout.coordinates(self.rank).cp

    @property
    def dp_rank(self) -> int:
        """Index of this rank along the data-parallel axis."""
        return self.layout.dp_rank(self.rank)

    def sum_over_dp(self, values: Sequence[float]) -> list[float]:
        """Sum each value over the dp ranks, in float64."""
        return sum_floats(values, self.dp, self.device)

    def sum_over_world(self, values: Sequence[float]) -> list[float]:
        """Sum each value over all ranks, in float64."""
        return sum_floats(values, self.world, self.device)

    def gather_over_dp_cp(self, value: Any) -> list[Any]:
        """Gather small Python objects of the ranks that differ along dp and cp, in rank order.

        These ranks have different tokens.
        """
        return gather_objects(self.dp_cp, value)

    def reduce_over_dp_cp(self, value: Any, reduce: Callable[[list[Any]], ResultT]) -> ResultT:
        """Return `reduce` of what `gather_over_dp_cp` gathers, computed on one rank."""
        return reduce_objects(self.dp_cp, value, reduce)

    def gather_over_world(self, value: Any) -> list[Any]:
        """Gather small Python objects of all ranks, in rank order."""
        return gather_objects(self.world, value)

    def cp_group(self, size: int) -> dist.ProcessGroup | None:
        """Return the context-parallel group of `size` ranks; None for a single rank."""
        if size == self.layout.cp:
            return self.cp
        return None if size == 1 else self.cp_parts[size]

    def gather_over_cp(self, values: Tensor, size: int) -> Tensor:
        """All-gather [size x T] from `values` [T] of each rank of a context-parallel group.

        In cp-rank order, without gradient.
        """
        group = self.cp_group(size)
        return values if group is None else gather_rows(group, values.detach())

    def sum_over_cp(self, values: Tensor, size: int) -> Tensor:
        """All-reduce `values` over a context-parallel group; the backward is the identity.

        The ranks' `values` and the result have the same shape.
        """
        group = self.cp_group(size)
        return values if group is None else sum_over(group, values)

    def join_over_cp(self, values: np.ndarray) -> np.ndarray:
        """Sum `values` [n] over the context-parallel ranks, each of which has other elements.

        The elements of the other ranks are 0.
        """
        tensor = torch.from_numpy(values).to(self.device)
        return self.sum_over_cp(tensor, self.layout.cp).cpu().numpy()

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        # An all-reduce, because the ranks' own collectives obey the collective timeout.
        self.sum_over_world([0.0])
