"""Negative log-likelihood, the loss of SFT; and the loss of distillation, a divergence per token.

The divergence is between a student's next-token distribution p and a teacher's q, with the mixture
m = beta q + (1 - beta) p:

    reverse_kl   KL(p || q) = sum p (log p - log q)
    forward_kl   KL(q || p) = sum q (log q - log p)
    mixed_kl     w KL(q || p) + (1 - w) KL(p || q)
    jsd          beta KL(q || m) + (1 - beta) KL(p || m)

`jsd` is the generalized Jensen-Shannon divergence of GKD (Agarwal et al. 2023, "On-Policy
Distillation of Language Models"), with the teacher as its first distribution.

With p = softmax(z) and s = p dD/dp, each up to a multiple of p that cancels, the gradient is
dD/dz = s - p sum(s), where s is p (log p - log q) for the reverse KL, -q for the forward KL and
(1 - beta) p (log p - log m) for the Jensen-Shannon divergence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_like.losses.reduce import (
    GlobalCounts,
    LossInputs,
    LossMetric,
    LossTerms,
    Normalization,
    TensorMean,
    mean_metrics,
    token_weights,
)

DivergenceKind = Literal["reverse_kl", "forward_kl", "mixed_kl", "jsd"]
DIVERGENCE = "divergence"
"""Column of the divergence of each token."""

TEACHER_LOGPROBS = "teacher_logprobs"
STUDENT_ENTROPY = "student_entropy"
TEACHER_ENTROPY = "teacher_entropy"


@dataclass(frozen=True, kw_only=True)
class NllLoss:
    """-sum(m * log p) over the trained tokens; the worker divides by their global count."""

    normalization: Normalization = "token"
    uses_sampling_distribution: bool = False
    """A likelihood refers to the model's own distribution: temperature 1, no filters."""
    sources: tuple[str, ...] = ()
    """Names of the sources of a mixture, whose losses are metrics. The index of the source of each
    row is in the column `source`, int64 [R].
    """
    needs_entropy: bool = False
    entropy_gradient: bool = False

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the number of tokens or of sequences of the optimizer step."""
        return counts.denominator(self.normalization)

    def coupled_rows(self, inputs: LossInputs) -> None:
        """Return None: the loss is a sum over rows."""
        return

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the summed loss, its mean as `policy/loss`, and `policy/token_accuracy`.

        The accuracy is the share of trained tokens that are the most probable ones; of several most
        probable tokens each counts as correct.
        """
        # where() and not a product: an infinite log-prob at a masked position must not become NaN.
        losses = torch.where(inputs.token_mask, -inputs.policy_logprobs, 0.0)
        weights = token_weights(inputs, self.normalization)
        loss_sum = (weights * losses).sum()
        metrics: dict[str, LossMetric] = {
            "policy/loss": TensorMean(loss_sum.detach(), weights.sum())
        }
        if inputs.is_argmax is not None:
            metrics |= mean_metrics({"policy/token_accuracy": inputs.is_argmax}, inputs.token_mask)
        return LossTerms(loss_sum, metrics | self._source_losses(inputs, losses.detach()))

    def _source_losses(self, inputs: LossInputs, losses: Tensor) -> dict[str, LossMetric]:
        """Return the token mean of `losses`, float32 [T], of each source with trained tokens."""
        metrics: dict[str, LossMetric] = {}
        for index, name in enumerate(self.sources):
            mask = inputs.token_mask & (inputs.per_token("source") == index)
            metrics[f"policy/source_{name}/loss"] = TensorMean(
                torch.where(mask, losses, 0.0).sum(), mask.to(torch.float32).sum(), is_optional=True
            )
        return metrics


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A divergence, and the temperature by which the logits of both models are divided."""

    kind: DivergenceKind = "reverse_kl"
    weight: float = 0.5
    """In (0, 1): of the forward KL in `mixed_kl`, or of the teacher in the mixture of `jsd`."""
    temperature: float = 1.0

    def terms(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms whose sum over the last dim is D, and s; both [..., V].

        `student` and `teacher` are finite log-probs log p and log q, float [..., V].
        """
        # Products are in place: each further matrix of logits counts in the peak of memory.
        if self.kind == "jsd":
            # The logarithm of the mixture without its probabilities, which may underflow.
            mixture = torch.logaddexp(
                teacher + math.log(self.weight), student + math.log(1 - self.weight)
            )
            of_teacher = teacher.exp().mul_(self.weight).mul_(teacher - mixture)
            of_student = student.exp().mul_(1 - self.weight).mul_(student - mixture)
            return of_teacher.add_(of_student), of_student
        if self.kind == "reverse_kl":
            terms = student.exp().mul_(student - teacher)
            return terms, terms
        teacher_probs = teacher.exp()
        forward = (teacher - student).mul_(teacher_probs)
        if self.kind == "forward_kl":
            return forward, teacher_probs.neg_()
        weight = self.weight
        reverse = student.exp().mul_(student - teacher).mul_(1 - weight)
        terms = forward.mul_(weight).add_(reverse)
        return terms, reverse.sub_(teacher_probs.mul_(weight))


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """sum over the trained tokens of divergence + sft_weight x negative log-likelihood.

    The worker divides by the number of trained tokens of the optimizer step.
    """

    sft_weight: float = 0.0
    uses_sampling_distribution: bool = False
    """The temperatures belong to the divergence; the likelihood is at temperature 1."""
    needs_entropy: bool = False
    entropy_gradient: bool = False

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the number of trained tokens of the optimizer step."""
        return counts.denominator("token")

    def coupled_rows(self, inputs: LossInputs) -> None:
        """Return None: the loss is a sum over rows."""
        return

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Compute from the columns that the teachers' targets add; see `policy.frozen_models`.

        Raises ValueError without them.
        """
        if DIVERGENCE not in inputs.columns:
            raise ValueError(
                "the batch has no targets of a teacher; call compute_targets and pass its result"
            )
        mask = inputs.token_mask
        losses = inputs.columns[DIVERGENCE]
        if self.sft_weight > 0:
            losses = losses - self.sft_weight * inputs.policy_logprobs
        # where() and not a product: an infinity at a masked position must not become NaN.
        loss_sum = torch.where(mask, losses, 0.0).sum()
        values = {
            "policy/divergence": inputs.columns[DIVERGENCE],
            "policy/nll": -inputs.policy_logprobs,
            "policy/teacher_nll": -inputs.columns[TEACHER_LOGPROBS],
            "policy/entropy": inputs.columns[STUDENT_ENTROPY],
            "policy/teacher_entropy": inputs.columns[TEACHER_ENTROPY],
        }
        metrics: dict[str, LossMetric] = mean_metrics(values, mask)
        count = mask.to(torch.float32).sum()
        metrics["policy/loss"] = TensorMean(loss_sum.detach(), count)
        return LossTerms(loss_sum, metrics)
