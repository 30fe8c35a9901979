"""Collectives of the ranks of a group: with a gradient, for activations they share, and of Python
objects.

Each forward has the backward that belongs to it: a copy adds gradients up, a sum hands them on;
gathering rows scatters the sum of gradients, and the reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]


def copy_to(group: dist.ProcessGroup, hidden: Tensor) -> Tensor:
    """`hidden`, equal on all ranks, for a computation of which each rank does a part: gradients are
    added up.
    """
    return _Paired.apply(hidden, group, _same, _sum)  # type: ignore[return-value]


def sum_over(group: dist.ProcessGroup, parts: Tensor) -> Tensor:
    """The sum of the ranks' `parts`, on all of them."""
    return _Paired.apply(parts, group, _sum, _same)  # type: ignore[return-value]


def gather_rows(group: dist.ProcessGroup, rows: Tensor) -> Tensor:
    """[n x T, ...] from each rank's [T, ...], for a computation of which each rank does a part."""
    return _Paired.apply(rows, group, _gather, _scatter_sum)  # type: ignore[return-value]


def scatter_sum(group: dist.ProcessGroup, parts: Tensor) -> Tensor:
    """This rank's [T / n, ...] of the sum of the ranks' `parts` [T, ...]."""
    return _Paired.apply(parts, group, _scatter_sum, _gather)  # type: ignore[return-value]


def gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """The ranks' values, any small Python objects, in rank order."""
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


class _Paired(torch.autograd.Function):
    """One collective forward, another backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup,
        forward: Collective,
        backward: Collective,
    ) -> Tensor:
        ctx.group, ctx.collective = group, backward
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.collective(gradients[0], ctx.group), None, None, None


def _same(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    # A copy: autograd may still need what it was given.
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    gathered = tensor.new_empty(group.size() * tensor.shape[0], *tensor.shape[1:])
    dist.all_gather_single(gathered, tensor.contiguous(), group=group)
    return gathered


def _scatter_sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    part = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    dist.reduce_scatter_single(part, tensor.contiguous(), group=group)
    return part
