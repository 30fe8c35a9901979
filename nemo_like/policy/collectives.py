"""Collectives with gradients for activations, and reductions of numbers and Python objects.

Forward and backward are the pairs of Megatron-Core's `tensor_parallel/mappings.py`:

    function            forward             backward
    copy_to             identity            all-reduce
    sum_over            all-reduce          identity
    gather_rows         all-gather          reduce-scatter
    gather_equal_rows   all-gather          this rank's part
    scatter_sum         reduce-scatter      all-gather
    gather_columns      all-gather          this rank's part
    split_columns       this rank's part    all-gather
    exchange_rows       all-to-all          all-to-all, in the other direction

The columns are the last dim of a tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

ResultT = TypeVar("ResultT")


def first_available(module: Any, *names: str) -> Any:
    """Return the attribute of `module` with the first of `names` that it has.

    Names that differ between releases are tested, and not versions, so that nightly builds work.
    Raises AttributeError if it has none of them.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(
        f"{module.__name__} {getattr(module, '__version__', '')} has none of {', '.join(names)};"
        " install torch 2.11 to 2.13"
    )


def keyword_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameters of `function` that can be passed by name."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)


Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]
# The second names are from torch 2.11.
_all_gather_single = first_available(dist, "all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = first_available(dist, "reduce_scatter_single", "reduce_scatter_tensor")


def copy_to(group: dist.ProcessGroup, hidden: Tensor) -> Tensor:
    """Return `hidden`, equal on all ranks; the backward all-reduces its gradient.

    Used before a computation of which each rank does a part. The result has the same shape.
    """
    return _PairedCollective.apply(hidden, group, _identity, _all_reduce)  # type: ignore[return-value]


def sum_over(group: dist.ProcessGroup, partial_sums: Tensor) -> Tensor:
    """All-reduce the ranks' `partial_sums` of the same shape; the backward is the identity."""
    return _PairedCollective.apply(partial_sums, group, _all_reduce, _identity)  # type: ignore[return-value]


def gather_rows(group: dist.ProcessGroup, rows: Tensor) -> Tensor:
    """All-gather [n x T, ...] from each rank's [T, ...]; the backward reduce-scatters."""
    return _PairedCollective.apply(rows, group, _all_gather, _reduce_scatter)  # type: ignore[return-value]


def scatter_sum(group: dist.ProcessGroup, partial_sums: Tensor) -> Tensor:
    """Reduce-scatter `partial_sums` [T, ...] to this rank's [T / n, ...]; the backward gathers."""
    return _PairedCollective.apply(partial_sums, group, _reduce_scatter, _all_gather)  # type: ignore[return-value]


def gather_equal_rows(group: dist.ProcessGroup, rows: Tensor) -> Tensor:
    """All-gather [n x T, ...] from each rank's [T, ...] for a computation that all ranks do."""
    return _PairedCollective.apply(rows, group, _all_gather, _own_rows)  # type: ignore[return-value]


def gather_columns(group: dist.ProcessGroup, columns: Tensor) -> Tensor:
    """All-gather [..., n x D] from each rank's [..., D] for a computation that all ranks do."""
    return gather_equal_rows(group, columns.movedim(-1, 0)).movedim(0, -1)


def split_columns(group: dist.ProcessGroup, columns: Tensor) -> Tensor:
    """Return this rank's [..., D] of `columns` [..., n x D], which are equal on all ranks."""
    rows = columns.movedim(-1, 0)
    own = _PairedCollective.apply(rows, group, _own_rows, _all_gather)
    return own.movedim(0, -1)  # type: ignore[union-attr]


def exchange_rows(
    group: dist.ProcessGroup, rows: Tensor, sent: Sequence[int], received: Sequence[int]
) -> Tensor:
    """Send `rows` [S, ...], `sent[i]` to rank i; return the rows of all ranks, [R, ...].

    Of rank i these are `received[i]`. Both are sorted by rank.
    """
    forward = partial(_all_to_all, sent, received)
    backward = partial(_all_to_all, received, sent)
    return _PairedCollective.apply(rows, group, forward, backward)  # type: ignore[return-value]


def gather_objects(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Return the ranks' values, small Python objects, in rank order; [value] without a group."""
    if group is None:
        return [value]
    gathered: list[Any] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def reduce_objects(
    group: dist.ProcessGroup | None, value: Any, reduce: Callable[[list[Any]], ResultT]
) -> ResultT:
    """Return `reduce` of the ranks' values, small Python objects in rank order, on every rank.

    It is computed on the first rank: n values go to one rank and not to n.
    """
    if group is None:
        return reduce([value])
    first = dist.get_global_rank(group, 0)
    gathered = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(value, gathered, dst=first, group=group)
    reduced = [None if gathered is None else reduce(gathered)]
    dist.broadcast_object_list(reduced, src=first, group=group)
    return reduced[0]  # type: ignore[return-value]


def sum_floats(
    values: Sequence[float], group: dist.ProcessGroup | None, device: torch.device
) -> list[float]:
    """Sum each of `values` over the ranks of `group` in float64; the values without a group."""
    if group is None:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return total.tolist()


class _PairedCollective(torch.autograd.Function):
    """One collective in the forward, its counterpart in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        group: dist.ProcessGroup,
        forward: Collective,
        backward: Collective,
    ) -> Tensor:
        """Apply the collective `forward` to `tensor`.

        The result has the same shape, or [n x T, ...] or [T / n, ...] for a `tensor` [T, ...] that
        is gathered from, or scattered to, n ranks.
        """
        ctx.group = group
        ctx.backward_collective = backward
        return forward(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `tensor`, of the same shape as it, and None for the rest."""
        (gradient,) = gradients
        return ctx.backward_collective(gradient, ctx.group), None, None, None


def _identity(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return a view of `tensor` with the same shape."""
    # A view, because autograd does not accept an input returned unchanged.
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the ranks' `tensor`, a new tensor of the same shape."""
    # A copy, because all_reduce works in place and autograd may still need the input.
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return [n x T, ...], the ranks' `tensor` [T, ...] in rank order."""
    num_rows = group.size() * tensor.shape[0]
    gathered = tensor.new_empty(num_rows, *tensor.shape[1:])
    _all_gather_single(gathered, tensor.contiguous(), group=group)
    return gathered


def _all_to_all(
    sent: Sequence[int], received: Sequence[int], tensor: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Return the rows [R, ...] that this rank receives for `tensor` [S, ...]."""
    rows = tensor.new_empty(sum(received), *tensor.shape[1:])
    dist.all_to_all_single(rows, tensor.contiguous(), list(received), list(sent), group=group)
    return rows


def _own_rows(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's [T / n, ...] of `tensor` [T, ...], a copy."""
    return tensor.chunk(group.size())[group.rank()].clone()


def _reduce_scatter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's [T / n, ...] of the sum of the ranks' `tensor` [T, ...]."""
    num_rows = tensor.shape[0] // group.size()
    shard = tensor.new_empty(num_rows, *tensor.shape[1:])
    _reduce_scatter_single(shard, tensor.contiguous(), group=group)
    return shard
