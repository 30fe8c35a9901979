"""Losses of pairs of rows in one microbatch: DPO, IPO, SimPO, and of reward models Bradley-Terry.

With the log-prob l(y) of a completion, summed over its tokens for DPO and averaged for IPO and
SimPO, and the log-prob r(y) under the reference, 0 for SimPO, the reward of a completion is
`beta * (l(y) - r(y))` and the margin of a pair `reward(chosen) - reward(rejected)`. Loss of a pair:

* `dpo` (Rafailov et al. 2023): `-log sigmoid(margin)`; with label smoothing e (conservative DPO,
  Mitchell 2023) `-(1 - e) log sigmoid(margin) - e log sigmoid(-margin)`.
* `ipo` (Azar et al. 2023): `(margin / beta - 1 / (2 beta))^2`. The log-probs are averaged, as in
  TRL, whose authors confirmed it with the authors of the paper: sums grow with the length.
* `simpo` (Meng et al. 2024): the loss of DPO with `margin - gamma`.

`sft_loss_weight` adds the mean negative log-likelihood of the chosen completion (RPO, Pang et al.
2024).

Bradley-Terry: with the scores r of the two completions of a pair and its margin m (0 without the
column `margin`), the loss of the pair is

    -log sigmoid(r_chosen - r_rejected - m) + c (r_chosen + r_rejected)^2

The first term is from Bradley and Terry (1952) with the margin of Llama 2 (Touvron et al. 2023,
equation 2); the second, with `center_coefficient` c, keeps the mean score of a pair near 0, which
the first term leaves free (Eisenstein et al. 2023, "Helping or Herding?").

The loss of a batch is the mean over its pairs, over all data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_like.algorithms.preferences.config import PreferenceLossConfig
from nemo_like.device_transfer import to_device
from nemo_like.losses import GlobalCounts, LossInputs, LossMetrics, LossTerms, TensorMean


def pair_rows(inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the rows of the chosen and of the rejected completions, int64 [P] each.

    Row columns: `pair` (equal for the two rows of a pair) and `is_chosen`. A dummy microbatch has
    no pairs. Raises ValueError for an incomplete pair.
    """
    # On the host: the number of pairs is a shape, and reading it would wait for the device.
    host = inputs.rows_on_host("pair", "is_chosen")
    # A dummy has one row without tokens.
    rows = np.flatnonzero(host.num_tokens)
    pair = host.columns["pair"][rows]
    is_chosen = host.columns["is_chosen"][rows].astype(bool)
    # Both sorted by pair, so that position i of the two belongs to the same pair.
    chosen = rows[is_chosen][pair[is_chosen].argsort()]
    rejected = rows[~is_chosen][pair[~is_chosen].argsort()]
    pairs = host.columns["pair"]
    if not np.array_equal(pairs[chosen], pairs[rejected]):
        raise ValueError(
            "a microbatch has one row of a preference pair without the other; plan the batch with"
            " groups=batch['pair']"
        )
    rows_of_pairs = {"chosen": chosen, "rejected": rejected}
    tensors = to_device(rows_of_pairs, inputs.row_num_tokens.device)
    return tensors["chosen"], tensors["rejected"]


def pair_means(values: Mapping[str, Tensor], weight: float) -> LossMetrics:
    """Return the means over pairs of [P] tensors, with `weight` for each pair."""
    metrics = {}
    for name, value in values.items():
        metrics[name] = TensorMean(value.detach().float().sum() * weight, len(value) * weight)
    return metrics


@dataclass(frozen=True, kw_only=True)
class PairLoss:
    """Base of the losses. Row columns: `pair`, equal for both rows of a pair, and `is_chosen`."""

    uses_sampling_distribution: bool = False
    """Scores have no distribution; a likelihood refers to the model's own distribution, at
    temperature 1 and without filters.
    """
    needs_entropy: bool = False
    entropy_gradient: bool = False

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the number of pairs of the optimizer step."""
        # At least 1, so that the gradient of a step without pairs is 0 and not NaN.
        return max(counts.num_rows / 2, 1.0)

    def coupled_rows(self, inputs: LossInputs) -> Tensor:
        """Return the pair of each row, int64 [R]."""
        return inputs.row_columns["pair"]


@dataclass(frozen=True, kw_only=True)
class PreferenceLoss(PairLoss):
    """The loss of preference optimization."""

    config: PreferenceLossConfig

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Compute from the columns `pair`, `is_chosen` and, but for SimPO, `reference_logprobs`.

        Raises ValueError if a pair is not complete in the microbatch.
        """
        logprobs = self._completion_logprobs(inputs, inputs.policy_logprobs)
        if self.config.kind == "simpo":
            ratios = logprobs
        else:
            reference = inputs.columns["reference_logprobs"]
            ratios = logprobs - self._completion_logprobs(inputs, reference)
        # A packer may place the rows of a microbatch in any order.
        chosen, rejected = pair_rows(inputs)
        rewards = self.config.beta * ratios
        margins = rewards[chosen] - rewards[rejected]
        losses = self._pair_losses(margins)
        metrics: dict[str, Tensor] = {
            "rewards/chosen": rewards[chosen],
            "rewards/rejected": rewards[rejected],
            "rewards/margins": margins,
            "rewards/accuracies": (margins > 0).float(),
            "logprobs/chosen": logprobs[chosen],
            "logprobs/rejected": logprobs[rejected],
        }
        if self.config.sft_loss_weight > 0:
            # Averaged over the tokens of each completion, so that all terms are means over pairs.
            sums = inputs.sum_over_row(inputs.policy_logprobs)
            nll = -sums / inputs.row_num_tokens.clamp(min=1.0)
            metrics["policy/preference_loss"] = losses
            metrics["policy/chosen_nll"] = nll[chosen]
            losses = losses + self.config.sft_loss_weight * nll[chosen]
        metrics["policy/loss"] = losses
        return LossTerms(losses.sum(), pair_means(metrics, inputs.row_weight))

    def _completion_logprobs(self, inputs: LossInputs, logprobs: Tensor) -> Tensor:
        """Return the summed (DPO) or mean log-prob of each row, [R], from `logprobs` [T]."""
        sums = inputs.sum_over_row(logprobs)
        if self.config.kind == "dpo":
            return sums
        return sums / inputs.row_num_tokens.clamp(min=1.0)

    def _pair_losses(self, margins: Tensor) -> Tensor:
        """Return the loss of each pair, [P], from `margins` [P]."""
        if self.config.kind == "ipo":
            return (margins / self.config.beta - 1 / (2 * self.config.beta)).square()
        if self.config.kind == "simpo":
            margins = margins - self.config.simpo_gamma
        smoothing = self.config.label_smoothing
        # logsigmoid() and not log(sigmoid()): the latter is -inf for margins below -104 in float32.
        return -(1 - smoothing) * logsigmoid(margins) - smoothing * logsigmoid(-margins)


def bradley_terry_losses(
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor | None = None,
    *,
    center_coefficient: float = 0.0,
) -> Tensor:
    """Return the loss of each pair, float32 [P].

    `chosen` and `rejected`, float32 [P], are the scores, and `margins`, float32 [P], by how much
    the first should exceed the second.
    """
    differences = chosen - rejected
    if margins is not None:
        differences = differences - margins
    # logsigmoid() and not log(sigmoid()): the latter is -inf below -104 in float32.
    losses = -logsigmoid(differences)
    if center_coefficient > 0:
        losses = losses + center_coefficient * (chosen + rejected).square()
    return losses


@dataclass(frozen=True, kw_only=True)
class BradleyTerryLoss(PairLoss):
    """The loss of a reward model. Pairs with margins have the column `margin`, equal in both."""

    center_coefficient: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Compute from `LossInputs.row_scores`.

        Raises ValueError if a pair is not complete in the microbatch, or without scores.
        """
        scores = inputs.row_scores
        if scores is None:
            raise ValueError(
                "BradleyTerryLoss needs scores; start the policy workers with head='scores'"
            )
        # A packer may place the rows of a microbatch in any order.
        chosen, rejected = pair_rows(inputs)
        margins = None
        if "margin" in inputs.row_columns:
            margins = inputs.row_columns["margin"].float()[chosen]
        losses = bradley_terry_losses(
            scores[chosen], scores[rejected], margins, center_coefficient=self.center_coefficient
        )
        differences = scores[chosen] - scores[rejected]
        metrics = {
            "policy/loss": losses,
            "rm/accuracy": (differences > 0).float(),
            "rm/margin": differences,
            "rm/chosen_score": scores[chosen],
            "rm/rejected_score": scores[rejected],
        }
        return LossTerms(losses.sum(), pair_means(metrics, inputs.row_weight))
