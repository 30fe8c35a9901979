"""Negative log-likelihood: the loss of SFT."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_like.losses.reduce import (
    GlobalCounts,
    LossInputs,
    LossTerms,
    Normalization,
    token_weights,
)
from nemo_like.losses.tensor_metrics import TensorMean


@dataclass(frozen=True, kw_only=True)
class NllLoss:
    """-sum(m * log p) over the trained tokens; the worker divides by their global count."""

    normalization: Normalization = "token"
    uses_sampling_distribution: bool = False
    """A likelihood is that of the model's own distribution: temperature 1, no filters."""
    needs_entropy: bool = False
    entropy_gradient: bool = False

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the number of tokens or of sequences of the optimizer step."""
        return counts.denominator(self.normalization)

    def coupled_rows(self, inputs: LossInputs) -> None:
        """Return None: the loss is a sum over rows."""
        return

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the summed loss and its mean as metric `policy/loss`."""
        # where() and not a product: an infinite log-prob at a masked position must not become NaN.
        losses = torch.where(inputs.token_mask, -inputs.policy_logprobs, 0.0)
        weights = token_weights(inputs, self.normalization)
        loss_sum = (weights * losses).sum()
        return LossTerms(loss_sum, {"policy/loss": TensorMean(loss_sum.detach(), weights.sum())})
