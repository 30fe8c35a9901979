"""Targets of distillation, and what the divergence from them needs of one chunk of logits.

A target is the teacher's complete distribution, from its last hidden states, or its k most probable
tokens. `divergence` combines the chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from nemo_like.losses.divergence import Divergence
from nemo_like.policy.logit_chunks import LOWEST, ChunkLabels, scaled_logits

TopKTail = Literal["bucket", "renormalize"]
Combine = Callable[[Tensor], Tensor]
"""Combines the values [m, chunk] of the ranks that share the vocabulary."""


class ChunkKept(NamedTuple):
    """What the backward of a chunk needs, float32 [chunk] each but for the last."""

    logsumexp: Tensor
    """Of the student's logits at temperature 1."""
    scaled_logsumexp: Tensor
    """Of the student's logits, or of those that the teacher has as well, at the temperature."""
    slope_sum: Tensor
    """The sum of s of `losses.divergence`."""
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
        student = _divided_in_place(logits[:, : len(self.weight)], divergence.student_temperature)
        teacher = _divided_in_place(teacher, divergence.teacher_temperature)
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
        """Add to `gradient` [chunk, V] that of the student's `logits` [chunk, V].

        `grad` is float32 [chunk], the gradient of the divergence.
        """
        teacher = scaled_logits(
            self.hidden[part], self.weight, self.bias, divergence.teacher_temperature
        )
        student = _divided(logits[:, : len(self.weight)], divergence.student_temperature)
        log_p = _normalized(student, kept.scaled_logsumexp)
        del student
        log_q = _normalized_in_place(teacher, kept.target_logsumexp)
        slopes = divergence.terms(log_p, log_q)[1]
        del teacher, log_q
        of_student = slopes.sub_(log_p.exp_().mul_(kept.slope_sum[:, None]))
        scale = grad / divergence.student_temperature
        gradient[:, : len(self.weight)] += of_student.mul_(scale[:, None])


@dataclass(frozen=True)
class TopKTarget:
    """The k most probable tokens of the teacher.

    With the tail `bucket` all other tokens are one further outcome of both distributions, so that
    the divergence is that of k + 1 outcomes. With `renormalize` both distributions are restricted
    to the k tokens.
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
    tail: TopKTail
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
        student = _divided(logits, divergence.student_temperature)
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
        rest_slope = slopes[:, -1] if self.tail == "bucket" else None
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
            sums[0], sums[1], slope_sum, sums[2], rest_slope, gradients[:, :num_tokens]
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
        """Add to `gradient` [chunk, V] that of the student's `logits` [chunk, V].

        `grad` is float32 [chunk], the gradient of the divergence.
        """
        student = _divided(logits, divergence.student_temperature)
        scaled = logits.new_zeros((len(logits), logits.shape[1] + 1))
        if kept.rest_slope is not None:
            # A token outside has its share of the rest, p / P_rest, of the gradient of the rest.
            outside = (student - kept.target_logsumexp[:, None]).exp_()
            outside.mul_(kept.rest_slope[:, None])
            probs = (student - kept.scaled_logsumexp[:, None]).exp_()
            outside.sub_(probs.mul_(kept.slope_sum[:, None]))
            del probs
            scaled[:, :-1] = outside
        assert kept.token_gradients is not None, "set by `reduce`"
        columns = _columns(self.token_ids[part] - self.start, logits.shape[1])
        scaled.scatter_(1, columns, kept.token_gradients)
        scale = grad / divergence.student_temperature
        gradient += scaled[:, :-1] * scale[:, None]

    def _outcomes(self, part: slice, token_logits: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probs of the outcomes under student and teacher, [chunk, k or k + 1].

        `token_logits` [chunk, k] are the student's, `sums` the log-sum-exps [3, chunk].
        """
        teacher = self.logprobs[part]
        if self.tail == "renormalize":
            return log_softmax(token_logits, dim=1), log_softmax(teacher[:, :-1], dim=1)
        outcomes = torch.cat([token_logits, sums[2][:, None]], dim=1)
        return _normalized(outcomes, sums[1]), teacher.clamp(min=LOWEST)


def label_gradient(
    gradient: Tensor, logits: Tensor, kept: ChunkKept, labels: Tensor, grad: Tensor
) -> None:
    """Add to `gradient` [chunk, V] that of the label's log-prob, times `grad` float32 [chunk].

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

    They are relative to the rows of this rank; those of other ranks are ignored. The device is not
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
