"""Preference losses: DPO, IPO and SimPO on pairs of rows in one microbatch.

With the log-prob l(y) of a completion, summed over its tokens for DPO and averaged for IPO and
SimPO, and that of the reference, r(y), 0 for SimPO, the reward of a completion is
`beta * (l(y) - r(y))` and the margin of a pair `reward(chosen) - reward(rejected)`. Loss of a pair:

* `dpo` (Rafailov et al. 2023): `-log sigmoid(margin)`; with label smoothing e (conservative DPO,
  Mitchell 2023) `-(1 - e) log sigmoid(margin) - e log sigmoid(-margin)`.
* `ipo` (Azar et al. 2023): `(margin / beta - 1 / (2 beta))^2`. The log-probs are averaged, as in
  TRL, whose authors confirmed it with those of the paper: summed ones grow with the length.
* `simpo` (Meng et al. 2024): that of DPO with `margin - gamma`.

`sft_loss_weight` adds the mean negative log-likelihood of the chosen completion (RPO, Pang et al.
2024). The loss of a batch is the mean over its pairs, over all data-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from nemo_like.algorithms.dpo.config import PreferenceLossConfig
from nemo_like.losses import LossInputs, LossTerms
from nemo_like.losses.pairs import PairLoss, pair_means, pair_rows


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
        return LossTerms(losses.sum(), pair_means(metrics))

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
