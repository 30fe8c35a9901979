"""Divergence of a student from a teacher per token, from hidden states, in chunks of tokens.

A target is the teacher's complete distribution, from its last hidden states, or its k most probable
tokens.

As in `logprobs`, the logits of all T tokens never exist together: forward and backward each
materialise the logits of `chunk_size` tokens, the student's and the teacher's, and the backward
recomputes them. All arithmetic after the product is float32.

Where the vocabulary is sharded over ranks, each rank has its rows of both output embeddings. A
chunk has one all-gather and one all-reduce of a few numbers per token (with a top-k target of k
numbers); the backward all-reduces the hidden states' gradient once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.losses.likelihood import Divergence
from nemo_like.policy.collectives import gather_rows
from nemo_like.policy.heads.logit_chunks import (
    LOWEST,
    ChunkLabels,
    projection_gradients,
    scaled_logits,
)
from nemo_like.policy.outputs import LogitOptions, OutputEmbedding, VocabShard

Combine = Callable[[Tensor], Tensor]
"""Combines the values [m, chunk] of the ranks that share the vocabulary."""


class ChunkKept(NamedTuple):
    """What the backward of a chunk needs, float32 [chunk] each but for the last."""

    logsumexp: Tensor
    """Of the student's logits at temperature 1."""
    scaled_logsumexp: Tensor
    """Of the student's logits, or of those that the teacher has as well, at the temperature."""
    slope_sum: Tensor
    """The sum of s of `losses.likelihood`."""
    target_logsumexp: Tensor
    """Of the teacher's logits at its temperature; with top-k of the student's logits outside."""
    rest_slope: Tensor | None = None
    """With top-k: s of the rest."""
    token_gradients: Tensor | None = None
    """[chunk, k], with top-k: the gradient of the scaled logits of the k tokens."""


class ChunkResult(NamedTuple):
    """Result of a chunk."""

    outputs: Tensor
    """float32 [5, chunk]: divergence, log-prob of the label, entropy of the student and of the
    teacher, log-prob of the label under the teacher.
    """
    kept: ChunkKept


@dataclass(frozen=True)
class VocabularyTarget:
    """The complete distribution of the teacher."""

    hidden: Tensor
    """[T, H]: last hidden states."""
    weight: Tensor
    """[C, H]: output embedding of the first C of the student's tokens on this rank."""
    bias: Tensor | None = None
    """[C]."""

    def reduce(
        self,
        part: slice,
        logits: Tensor,
        labels: Tensor,
        divergence: Divergence,
        logsumexp: Combine,
        total: Combine,
    ) -> ChunkResult:
        """Compute a chunk from the student's `logits` [chunk, V] and local `labels` [chunk].

        The logits are overwritten: few matrices of this size fit into memory.
        """
        teacher = scaled_logits(self.hidden[part], self.weight, self.bias, 1.0)
        of_labels = [picked(each, labels[:, None])[:, 0] for each in (logits, teacher)]
        plain = [logits.logsumexp(dim=1), teacher.logsumexp(dim=1)]
        student = _divided_in_place(logits[:, : len(self.weight)], divergence.temperature)
        teacher = _divided_in_place(teacher, divergence.temperature)
        sums = logsumexp(
            torch.stack([plain[0], student.logsumexp(dim=1), plain[1], teacher.logsumexp(dim=1)])
        )
        log_p = _normalized_in_place(student, sums[1])
        log_q = _normalized_in_place(teacher, sums[3])
        entropies = [_entropy(log_p), _entropy(log_q)]
        terms, slopes = divergence.terms(log_p, log_q)
        values = total(torch.stack([terms.sum(dim=1), slopes.sum(dim=1), *entropies, *of_labels]))
        outputs = torch.stack(
            [values[0], values[4] - sums[0], values[2], values[3], values[5] - sums[2]]
        )
        return ChunkResult(outputs, ChunkKept(sums[0], sums[1], values[1], sums[3]))

    def add_gradient(
        self,
        gradient: Tensor,
        part: slice,
        logits: Tensor,
        kept: ChunkKept,
        divergence: Divergence,
        grad: Tensor,
    ) -> None:
        """Add the gradient of the student's `logits` [chunk, V] to `gradient` [chunk, V].

        `grad` is float32 [chunk], the gradient of the divergence.
        """
        teacher = scaled_logits(self.hidden[part], self.weight, self.bias, divergence.temperature)
        student = _divided(logits[:, : len(self.weight)], divergence.temperature)
        log_p = _normalized(student, kept.scaled_logsumexp)
        del student
        log_q = _normalized_in_place(teacher, kept.target_logsumexp)
        slopes = divergence.terms(log_p, log_q)[1]
        del teacher, log_q
        of_student = slopes.sub_(log_p.exp_().mul_(kept.slope_sum[:, None]))
        scale = grad / divergence.temperature
        gradient[:, : len(self.weight)] += of_student.mul_(scale[:, None])


@dataclass(frozen=True)
class TopKTarget:
    """The k most probable tokens of the teacher.

    All other tokens are one further outcome of both distributions, so that the divergence has k + 1
    outcomes.
    """

    token_ids: Tensor
    """int64 [T, k]."""
    logprobs: Tensor
    """float32 [T, k + 1]: of these tokens, and last of all others together, at the teacher's
    temperature.
    """
    entropy: Tensor
    """float32 [T], of the teacher at temperature 1."""
    label_logprobs: Tensor
    """float32 [T], of the teacher at temperature 1."""
    start: int = 0
    """First vocabulary row of this rank."""

    def reduce(
        self,
        part: slice,
        logits: Tensor,
        labels: Tensor,
        divergence: Divergence,
        logsumexp: Combine,
        total: Combine,
    ) -> ChunkResult:
        """Compute a chunk from the student's `logits` [chunk, V] and local `labels` [chunk]."""
        student = _divided(logits, divergence.temperature)
        token_ids = self.token_ids[part] - self.start
        is_token = marked_columns(token_ids, logits.shape[1])
        rest = student.masked_fill(is_token, float("-inf"))
        parts = [logits, student, rest]
        sums = logsumexp(torch.stack([each.logsumexp(dim=1) for each in parts]))
        values = total(
            torch.cat(
                [
                    picked(student, token_ids).t(),
                    _entropy(_normalized(student, sums[1]))[None],
                    picked(logits, labels[:, None]).t(),
                ]
            )
        )
        token_logits = values[:-2].t()
        log_p, log_q = self._outcomes(part, token_logits, sums)
        terms, slopes = divergence.terms(log_p, log_q)
        slope_sum = slopes.sum(dim=1)
        gradients = slopes - log_p.exp() * slope_sum[:, None]
        num_tokens = token_ids.shape[1]
        outputs = torch.stack(
            [
                terms.sum(dim=1),
                values[-1] - sums[0],
                values[-2],
                self.entropy[part],
                self.label_logprobs[part],
            ]
        )
        kept = ChunkKept(
            sums[0], sums[1], slope_sum, sums[2], slopes[:, -1], gradients[:, :num_tokens]
        )
        return ChunkResult(outputs, kept)

    def add_gradient(
        self,
        gradient: Tensor,
        part: slice,
        logits: Tensor,
        kept: ChunkKept,
        divergence: Divergence,
        grad: Tensor,
    ) -> None:
        """Add the gradient of the student's `logits` [chunk, V] to `gradient` [chunk, V].

        `grad` is float32 [chunk], the gradient of the divergence.
        """
        student = _divided(logits, divergence.temperature)
        scaled = logits.new_zeros((len(logits), logits.shape[1] + 1))
        assert kept.rest_slope is not None and kept.token_gradients is not None, "set by `reduce`"
        # A token outside has its share of the rest, p / P_rest, of the gradient of the rest.
        outside = (student - kept.target_logsumexp[:, None]).exp_()
        outside.mul_(kept.rest_slope[:, None])
        probs = (student - kept.scaled_logsumexp[:, None]).exp_()
        outside.sub_(probs.mul_(kept.slope_sum[:, None]))
        del probs
        scaled[:, :-1] = outside
        columns = _columns(self.token_ids[part] - self.start, logits.shape[1])
        scaled.scatter_(1, columns, kept.token_gradients)
        scale = grad / divergence.temperature
        gradient += scaled[:, :-1] * scale[:, None]

    def _outcomes(self, part: slice, token_logits: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the outcomes under student and teacher, [chunk, k + 1].

        `token_logits` [chunk, k] are the student's, `sums` the log-sum-exps [3, chunk].
        """
        teacher = self.logprobs[part]
        outcomes = torch.cat([token_logits, sums[2][:, None]], dim=1)
        return _normalized(outcomes, sums[1]), teacher.clamp(min=LOWEST)


def label_gradient(
    gradient: Tensor, logits: Tensor, kept: ChunkKept, labels: Tensor, grad: Tensor
) -> None:
    """Add the gradient of the label's log-prob times `grad` float32 [chunk] to `gradient` [chunk,
    V].

    `labels` int64 [chunk] are relative to the rows of this rank.
    """
    probs = (logits - kept.logsumexp[:, None]).exp()
    gradient -= probs * grad[:, None]
    ChunkLabels.of(labels, logits.shape[1], is_sharded=True).add_to(gradient, grad)


def _columns(token_ids: Tensor, num_columns: int) -> Tensor:
    """Return `token_ids` [chunk, k], relative to the rows of this rank, as columns of its logits.

    Tokens of other ranks have the column `num_columns`.
    """
    is_local = (token_ids >= 0) & (token_ids < num_columns)
    return token_ids.where(is_local, num_columns)


def marked_columns(token_ids: Tensor, num_columns: int) -> Tensor:
    """Return bool [chunk, num_columns], True at `token_ids` [chunk, k].

    They are relative to the rows of this rank; rows of other ranks are ignored. The device is not
    waited for: nothing is searched.
    """
    # One further column for them.
    shape = (len(token_ids), num_columns + 1)
    marks = torch.zeros(shape, dtype=torch.bool, device=token_ids.device)
    return marks.scatter_(1, _columns(token_ids, num_columns), True)[:, :-1]


def picked(logits: Tensor, columns: Tensor) -> Tensor:
    """Return `logits` [chunk, V] at `columns` int64 [chunk, n]; 0 for columns outside."""
    num_columns = logits.shape[1]
    if num_columns == 0:
        return logits.new_zeros(columns.shape)
    is_inside = (columns >= 0) & (columns < num_columns)
    return logits.gather(1, columns.where(is_inside, 0)).where(is_inside, 0.0)


def _divided(logits: Tensor, temperature: float) -> Tensor:
    """Return `logits` [...] / `temperature`, the same tensor for 1."""
    return logits if temperature == 1.0 else logits / temperature


def _divided_in_place(logits: Tensor, temperature: float) -> Tensor:
    """Return `logits` [...] / `temperature`, which overwrites them."""
    return logits if temperature == 1.0 else logits.div_(temperature)


def _normalized(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """Return log-probs [chunk, n], finite, of `logits` [chunk, n] and `logsumexp` [chunk]."""
    return (logits - logsumexp[:, None]).clamp_(min=LOWEST)


def _normalized_in_place(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """Return `_normalized`, which overwrites `logits` [chunk, n]; `logsumexp` is [chunk]."""
    return logits.sub_(logsumexp[:, None]).clamp_(min=LOWEST)


def _entropy(logprobs: Tensor) -> Tensor:
    """Return the entropy [chunk], of a vocabulary shard its part, of `logprobs` [chunk, n]."""
    return -logprobs.exp().mul_(logprobs).sum(dim=1)


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
    embedding: OutputEmbedding,
    labels: Tensor,
    target: VocabularyTarget | TopKTarget,
    divergence: Divergence,
) -> DivergenceOutputs:
    """Return the divergence of the student from the teacher for each token.

    `embedding` has the student's last hidden states of T tokens and its output embedding, `labels`
    are int64 [T]; see `token_logprobs`. The rows of a `VocabularyTarget` are the first of the
    student's rows on each rank: vocabulary entries beyond the common ones are left out of both
    distributions.
    """
    call = _Call(target=target, divergence=divergence, options=embedding.options)
    return DivergenceOutputs(
        *_ChunkedDivergence.apply(embedding.hidden, embedding.weight, embedding.bias, labels, call)
    )


@dataclass(frozen=True, kw_only=True)
class _Call:
    """Arguments of `token_divergence` without the tensors that autograd saves."""

    target: VocabularyTarget | TopKTarget
    divergence: Divergence
    options: LogitOptions

    def logsumexp(self, parts: Tensor) -> Tensor:
        """Combine the ranks' log-sum-exps [m, chunk] over their vocabulary rows."""
        vocab = self.options.vocab
        if vocab is None:
            return parts
        gathered = gather_rows(vocab.group, parts[None])
        return gathered.logsumexp(dim=0)

    def sum(self, parts: Tensor) -> Tensor:
        """All-reduce the ranks' sums [m, chunk] over their vocabulary rows, in place."""
        if self.options.vocab is not None:
            dist.all_reduce(parts, group=self.options.vocab.group)
        return parts


class _ChunkedDivergence(torch.autograd.Function):
    """Divergence and log-prob of the label; see `losses.likelihood` for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: _Call
    ) -> tuple[Tensor, ...]:
        """Return the tensors of `DivergenceOutputs`, float32 [T] each."""
        embedding = OutputEmbedding(hidden=hidden, weight=weight, bias=bias, options=call.options)
        labels = labels - embedding.vocab_start
        outputs = torch.empty((5, len(hidden)), dtype=torch.float32, device=hidden.device)
        results: list[ChunkResult] = []
        for part in embedding.chunks():
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
        embedding = OutputEmbedding(hidden=hidden, weight=weight, bias=bias, options=call.options)

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

        gradients = projection_gradients(embedding, ctx.needs_input_grad[:3], gradient_of)
        return *gradients, None, None


@torch.no_grad()
def top_k_logprobs(
    embedding: OutputEmbedding, *, k: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the token ids int64 [T, k] and the log-probs float32 [T, k + 1].

    The last log-prob is the probability of all other tokens together. The distribution is
    softmax(logits / temperature) of the T hidden states of `embedding`. The results are equal on
    all ranks that share the vocabulary. k is at most the vocabulary size.
    """
    hidden = embedding.hidden
    vocab = embedding.options.vocab
    ids = torch.empty((len(hidden), k), dtype=torch.int64, device=hidden.device)
    logprobs = torch.empty((len(hidden), k + 1), dtype=torch.float32, device=hidden.device)
    start = embedding.vocab_start
    for part in embedding.chunks():
        logits = scaled_logits(hidden[part], embedding.weight, embedding.bias, temperature)
        values, ids[part] = _largest(logits, k, start, vocab)
        is_kept = marked_columns(ids[part] - start, logits.shape[1])
        rest = logits.masked_fill(is_kept, float("-inf"))
        sums = torch.stack([logits.logsumexp(dim=1), rest.logsumexp(dim=1)])
        if vocab is not None:
            sums = gather_rows(vocab.group, sums[None]).logsumexp(dim=0)
        outcomes = torch.cat([values, sums[1][:, None]], dim=1)
        logprobs[part] = outcomes - sums[0][:, None]
    return ids, logprobs


def _largest(logits: Tensor, k: int, start: int, vocab: VocabShard | None) -> tuple[Tensor, Tensor]:
    """Return the k largest logits float32 [chunk, k] over all ranks and their token ids.

    `logits` [chunk, V] are the logits of this rank, whose first token is `start`.
    """
    num_tokens, num_columns = logits.shape
    if vocab is None:
        return logits.topk(k, dim=1)
    # A rank may have fewer than k rows; its share is filled up to equal sizes.
    num_local = min(k, num_columns)
    values = logits.new_full((num_tokens, k), float("-inf"))
    ids = torch.zeros((num_tokens, k), dtype=torch.int64, device=logits.device)
    if num_local > 0:
        values[:, :num_local], columns = logits.topk(num_local, dim=1)
        ids[:, :num_local] = columns + start
    # [ranks, chunk, k] -> [chunk, ranks x k].
    all_values = gather_rows(vocab.group, values[None]).transpose(0, 1).flatten(1)
    all_ids = gather_rows(vocab.group, ids[None]).transpose(0, 1).flatten(1)
    largest, index = all_values.topk(k, dim=1)
    return largest, all_ids.gather(1, index)
