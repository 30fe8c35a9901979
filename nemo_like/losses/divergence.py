"""Divergences of a student's next-token distribution p from that of a teacher, q.

With a mixture m = beta q + (1 - beta) p:

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

DivergenceKind = Literal["reverse_kl", "forward_kl", "mixed_kl", "jsd"]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A divergence and the temperatures by which the logits of both models are divided."""

    kind: DivergenceKind = "reverse_kl"
    forward_weight: float = 0.5
    """w of `mixed_kl`, in [0, 1]."""
    beta: float = 0.5
    """Weight of the teacher in the mixture of `jsd`, in (0, 1)."""
    student_temperature: float = 1.0
    teacher_temperature: float = 1.0

    def terms(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms whose sum over the last dim is D, and s; both [..., V].

        `student` and `teacher` are finite log-probs log p and log q, float [..., V].
        """
        # Products are in place: each further matrix of logits counts in the peak of memory.
        if self.kind == "jsd":
            # The logarithm of the mixture without its probabilities, which may underflow.
            mixture = torch.logaddexp(
                teacher + math.log(self.beta), student + math.log(1 - self.beta)
            )
            of_teacher = teacher.exp().mul_(self.beta).mul_(teacher - mixture)
            of_student = student.exp().mul_(1 - self.beta).mul_(student - mixture)
            return of_teacher.add_(of_student), of_student
        if self.kind == "reverse_kl":
            terms = student.exp().mul_(student - teacher)
            return terms, terms
        teacher_probs = teacher.exp()
        forward = (teacher - student).mul_(teacher_probs)
        if self.kind == "forward_kl":
            return forward, teacher_probs.neg_()
        weight = self.forward_weight
        reverse = student.exp().mul_(student - teacher).mul_(1 - weight)
        terms = forward.mul_(weight).add_(reverse)
        return terms, reverse.sub_(teacher_probs.mul_(weight))
