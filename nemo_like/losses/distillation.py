"""The loss of distillation: the divergence from the teacher, and optionally the likelihood."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_like.losses.reduce import GlobalCounts, LossInputs, LossTerms
from nemo_like.losses.tensor_metrics import LossMetric, TensorMean, mean_metrics

DIVERGENCE = "divergence"
"""Column of the divergence of each token."""
TEACHER_LOGPROBS = "teacher_logprobs"
STUDENT_ENTROPY = "student_entropy"
TEACHER_ENTROPY = "teacher_entropy"


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """sum over the trained tokens of divergence + sft_weight x negative log-likelihood.

    The worker divides by the number of trained tokens of the optimizer step.
    """

    sft_weight: float = 0.0
    uses_sampling_distribution: bool = False
    """The temperatures are those of the divergence; the likelihood is at temperature 1."""
    needs_entropy: bool = False
    entropy_gradient: bool = False

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the number of trained tokens of the optimizer step."""
        return counts.denominator("token")

    def coupled_rows(self, inputs: LossInputs) -> None:
        """Return None: the loss is a sum over rows."""
        return

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Compute from the columns that the teachers' targets add; see `policy.teachers`.

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
