"""Divergence of a student from a teacher per token, from hidden states, in chunks of tokens.

As in `logprobs`, the logits of all T tokens never exist together: forward and backward each
materialise those of `chunk_size` tokens, the student's and the teacher's, and the backward
recomputes them. All arithmetic after the product is float32.

Where the vocabulary is sharded over ranks, each rank has its rows of both output embeddings. A
chunk has one all-gather and one all-reduce of a few numbers per token (with a top-k target of k
numbers); the backward all-reduces the hidden states' gradient once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.losses.divergence import Divergence
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.divergence_chunks import (
    ChunkResult,
    TopKTarget,
    VocabularyTarget,
    label_gradient,
)
from nemo_like.policy.logit_chunks import scaled_logits
from nemo_like.policy.projection import VocabShard, projection_gradients, token_chunks


class DivergenceOutputs(NamedTuple):
    """Results of `token_divergence`, float32 [T] each; the first two have a gradient."""

    divergence: Tensor
    logprobs: Tensor
    """Log-prob of the label under the student at temperature 1."""
    student_entropy: Tensor
    """Of the student at its temperature of the divergence."""
    teacher_entropy: Tensor
    """Of the teacher at its temperature; with a top-k target at temperature 1."""
    teacher_logprobs: Tensor
    """Log-prob of the label under the teacher at temperature 1."""


def token_divergence(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    target: VocabularyTarget | TopKTarget,
    divergence: Divergence,
    *,
    chunk_size: int = 1024,
    bias: Tensor | None = None,
    vocab: VocabShard | None = None,
) -> DivergenceOutputs:
    """Return the divergence of the student from the teacher for each token.

    `hidden` [T, D] are the student's last hidden states, `weight` [V, D] and `bias` [V] its output
    embedding, `labels` int64 [T]. With `vocab`, these are this rank's rows; see `token_logprobs`.
    The rows of a `VocabularyTarget` are the first of the student's rows on each rank: vocabulary
    entries beyond the common ones are left out of both distributions.
    """
    return DivergenceOutputs(
        *_ChunkedDivergence.apply(
            hidden,
            weight,
            bias,
            labels,
            _Call(target=target, divergence=divergence, chunk_size=chunk_size, vocab=vocab),
        )
    )


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Arguments of `token_divergence` without a gradient."""

    target: VocabularyTarget | TopKTarget
    divergence: Divergence
    chunk_size: int
    vocab: VocabShard | None

    def chunks(self, num_tokens: int) -> list[slice]:
        """Return consecutive slices of at most `chunk_size` tokens."""
        return list(token_chunks(num_tokens, self.chunk_size))

    def logsumexp(self, parts: Tensor) -> Tensor:
        """Combine the ranks' log-sum-exps [m, chunk] over their vocabulary rows."""
        if self.vocab is None:
            return parts
        gathered = gather_rows(self.vocab.group, parts[None])
        return gathered.logsumexp(dim=0)

    def sum(self, parts: Tensor) -> Tensor:
        """All-reduce the ranks' sums [m, chunk] over their vocabulary rows, in place."""
        if self.vocab is not None:
            dist.all_reduce(parts, group=self.vocab.group)
        return parts


class _ChunkedDivergence(torch.autograd.Function):
    """Divergence and log-prob of the label; see `losses.divergence` for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> tuple[Tensor, ...]:
        """Return the tensors of `DivergenceOutputs`, float32 [T] each."""
        if call.vocab is not None:
            labels = labels - call.vocab.start
        num_tokens = len(hidden)
        outputs = torch.empty((5, num_tokens), dtype=torch.float32, device=hidden.device)
        results: list[ChunkResult] = []
        for part in call.chunks(num_tokens):
            result = call.target.reduce(
                part,
                scaled_logits(hidden[part], weight, bias, 1.0),
                labels[part],
                call.divergence,
                call.logsumexp,
                call.sum,
            )
            outputs[:, part] = result.outputs
            results.append(result)
        ctx.save_for_backward(hidden, weight, bias, labels)
        # Tensors [chunk] or [chunk, k] each, without gradient.
        ctx.kept = [result.kept for result in results]
        ctx.call = call
        ctx.set_materialize_grads(False)
        divergence, logprobs, *detached = outputs.unbind(0)
        # Copies, because views of one tensor cannot differ in having a gradient.
        results_without_gradient = [values.clone() for values in detached]
        ctx.mark_non_differentiable(*results_without_gradient)
        return (divergence.clone(), logprobs.clone(), *results_without_gradient)

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_divergence: Tensor | None, grad_logprobs: Tensor | None, *_: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden` [T, D], `weight` [V, D] and `bias` [V]."""
        hidden, weight, bias, labels = ctx.saved_tensors
        call: _Call = ctx.call

        def gradient_of(index: int, part: slice) -> Tensor:
            """Return the gradient of the logits of a chunk, float32 [chunk, V]."""
            kept = ctx.kept[index]
            logits = scaled_logits(hidden[part], weight, bias, 1.0)
            gradient = torch.zeros_like(logits)
            if grad_divergence is not None:
                call.target.add_gradient(
                    gradient, part, logits, kept, call.divergence, grad_divergence[part]
                )
            if grad_logprobs is not None:
                label_gradient(gradient, logits, kept, labels[part], grad_logprobs[part])
            return gradient

        gradients = projection_gradients(
            hidden,
            weight,
            bias,
            ctx.needs_input_grad[:3],
            call.chunks(len(hidden)),
            gradient_of,
            call.vocab,
        )
        return *gradients, None, None
