"""Negative log-likelihood: the loss of SFT."""

from __future__ import annotations

from dataclasses import dataclass

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
