"""The product of hidden states and output embedding in chunks of tokens: shards and gradients.

`logprobs` and `divergence` compute the logits of one chunk at a time from it, in the forward and
again in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.policy.logit_chunks import add_weight_gradient, finished_gradient


@dataclass(frozen=True)
class VocabShard:
    """Rows of the output embedding on this rank; each row is on one rank of `group`.

    Shards may differ in size and may be empty.
    """

    group: dist.ProcessGroup
    start: int
    """First vocabulary row of this rank."""
    partial_hidden_grad: bool = False
    """Do not all-reduce the gradient of the hidden states, because the caller does: the backward of
    sequence parallelism reduce-scatters it.
    """


def token_chunks(num_tokens: int, chunk_size: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `chunk_size` tokens."""
    for start in range(0, num_tokens, chunk_size):
        yield slice(start, start + chunk_size)


class ProjectionGradients(NamedTuple):
    """Gradients of `hidden` [T, D], `weight` [V, D] and `bias` [V]; None where not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def projection_gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needs: Sequence[bool],
    chunks: Sequence[slice],
    logits_gradient: Callable[[int, slice], Tensor],
    vocab: VocabShard | None,
) -> ProjectionGradients:
    """Return the gradients of the inputs of the product that `needs` names, in this order.

    `logits_gradient(index, part)` returns the gradient of the logits [chunk, V] of the tokens
    `chunks[index]`, in float32 or in the dtype of `hidden`.
    """
    needs_hidden, needs_weight, needs_bias = needs
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_bias = None
    if needs_bias and bias is not None:
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device)
    # Several chunks are summed in float32; a single chunk needs no such buffer.
    sum_dtype = weight.dtype if len(chunks) <= 1 else torch.float32
    grad_weight = None
    for index, part in enumerate(chunks):
        gradient = logits_gradient(index, part)
        if grad_bias is not None:
            grad_bias += gradient.sum(dim=0, dtype=torch.float32)
        gradient = gradient.to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(gradient, weight, out=grad_hidden[part])
        if needs_weight:
            grad_weight = add_weight_gradient(grad_weight, gradient, hidden[part], sum_dtype)
        # Freed before the logits of the next chunk are computed.
        del gradient
    # Each rank has the gradient from its own vocabulary rows.
    if grad_hidden is not None and vocab is not None and not vocab.partial_hidden_grad:
        dist.all_reduce(grad_hidden, group=vocab.group)
    if needs_weight:
        grad_weight = finished_gradient(weight, grad_weight)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return ProjectionGradients(grad_hidden, grad_weight, grad_bias)
