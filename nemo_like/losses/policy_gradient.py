"""The policy-gradient losses of GRPO, DAPO, Dr. GRPO, GSPO, CISPO, RLOO and REINFORCE++.

A loss is a surrogate (`losses.surrogates`), times the weights of the importance correction
(`losses.importance`), plus a KL penalty (`losses.reference_kl`) and an entropy bonus, divided as
`losses.normalizer` states. docs/losses.md has a table of all members.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_like.config.loss import LogprobName, PolicyGradientLossConfig
from nemo_like.losses.importance import importance_weights
from nemo_like.losses.mismatch import mismatch_metrics
from nemo_like.losses.normalizer import Normalizer
from nemo_like.losses.reduce import GlobalCounts, LossInputs, LossTerms
from nemo_like.losses.reference_kl import reference_kl
from nemo_like.losses.surrogates import (
    SurrogateTerms,
    cispo_surrogate,
    clipped_surrogate,
    divergence_metrics,
    reinforce_surrogate,
    row_log_ratio,
)
from nemo_like.losses.tensor_metrics import LossMetric, TensorMean, mean_metrics

_ORIGIN = {
    "generation_logprobs": "A generator records them for every sampled token",
    "prev_logprobs": "Policy.compute_logprobs computes them before the first optimizer step",
    "reference_logprobs": "Policy.compute_logprobs computes them on workers with a reference",
}
"""Where each column per token comes from, for messages."""


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradientLoss:
    """The surrogate of `config.surrogate` plus `beta * KL` minus `c * entropy`, summed over tokens.

    The surrogate of a token is multiplied by the weight of `config.importance_correction`. Tokens
    of a row may share a ratio (GSPO), but the loss is a sum over rows: no row depends on others.
    """

    config: PolicyGradientLossConfig
    is_single_step: bool = False
    """True: exactly one optimizer step is taken on the batch. l_prev is then the policy's own
    log-prob without gradient, so that r = 1 with the gradient of l, and no pass computes it."""

    @property
    def logprob_names(self) -> tuple[LogprobName, ...]:
        """Columns that a log-prob pass has to compute; with none of them no pass is needed."""
        return self.config.logprob_names(is_single_step=self.is_single_step)

    def for_num_steps(self, num_optimizer_steps: int) -> ClippedPolicyGradientLoss:
        """Return the loss for a batch on which so many optimizer steps are taken."""
        return replace(self, is_single_step=num_optimizer_steps == 1)

    @property
    def normalizer(self) -> Normalizer:
        """The denominator. Raises ValueError for a constant one without `constant_length`."""
        return Normalizer(kind=self.config.divisor, constant_length=self.config.constant_length)

    @property
    def uses_sampling_distribution(self) -> bool:
        """True: log-probs are those of the distribution that is sampled from."""
        return True

    @property
    def needs_entropy(self) -> bool:
        """True if the loss has an entropy bonus or the entropy is a metric."""
        return self.entropy_gradient or self.config.log_entropy

    @property
    def entropy_gradient(self) -> bool:
        """True if the loss has an entropy bonus."""
        return self.config.entropy_coefficient > 0

    def denominator(self, counts: GlobalCounts) -> float:
        """Return the divisor of the summed loss of an optimizer step, at least 1."""
        return self.normalizer.denominator(counts)

    def coupled_rows(self, inputs: LossInputs) -> None:
        """Return None: the loss is a sum over rows."""
        return

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Compute from `advantages`, `generation_logprobs` and the columns of `logprob_names`.

        With top-k, top-p or min-p sampling the ratio is that of the filtered distributions; the KL
        to the reference and the entropy are those of the unfiltered distributions. With a column
        `version_gap` the mismatch is reported by version gap as well. Raises ValueError for a
        missing column, and for advantages of tokens where the loss needs one per row.
        """
        mask = inputs.token_mask
        columns = inputs.columns
        self._check_columns(inputs)
        generation_logprobs = columns["generation_logprobs"]
        # What the training engine computed, for the comparison with the sampler.
        engine_logprobs = inputs.policy_logprobs.detach()
        if "prev_logprobs" in self.logprob_names:
            engine_logprobs = columns["prev_logprobs"]
        surrogate = self._surrogate(inputs, engine_logprobs)
        losses = surrogate.losses
        per_token = surrogate.per_token
        importance = importance_weights(self.config, inputs, engine_logprobs, generation_logprobs)
        per_token |= importance.per_token
        # The mean over samples of -log p, an unbiased estimate where the policy sampled them.
        per_token["policy/entropy_estimate"] = -inputs.policy_logprobs.detach()
        if importance.weights is not None:
            losses = losses * importance.weights
        if self.config.has_kl_in_loss:
            kl = self._reference_kl(inputs)
            losses = losses + self.config.reference_policy_kl_penalty * kl
            per_token[f"policy/reference_kl_{self.config.reference_policy_kl_type}"] = kl
        if inputs.entropy is not None:
            per_token["policy/entropy"] = inputs.entropy
            if self.entropy_gradient:
                entropy = torch.where(mask, inputs.entropy, 0.0)
                losses = losses - self.config.entropy_coefficient * entropy
        normalizer = self.normalizer
        loss_sum = (normalizer.weights(inputs) * losses).sum()
        metrics: dict[str, LossMetric] = {
            "policy/loss": TensorMean(loss_sum.detach(), normalizer.count(inputs)),
            **mean_metrics(per_token, mask),
            # Every context-parallel rank counts every row, which leaves the mean as it is.
            **mean_metrics(importance.per_row, inputs.row_num_tokens > 0),
        }
        metrics |= mismatch_metrics(
            engine_logprobs, generation_logprobs, mask, columns.get("version_gap")
        )
        return LossTerms(loss_sum, metrics)

    def _check_columns(self, inputs: LossInputs) -> None:
        for name in ("generation_logprobs", *self.logprob_names):
            if name not in inputs.columns:
                raise ValueError(
                    f"the batch has no column {name}, which the loss reads; it has"
                    f" {', '.join(sorted(inputs.columns)) or 'none'}. {_ORIGIN[name]}"
                )
        if self.config.surrogate == "gspo" and "advantages" in inputs.columns:
            raise ValueError(
                "the batch has one advantage per token, but loss_fn.surrogate gspo has one ratio"
                " per row and needs one advantage per row: use loss_fn.surrogate=gspo_token"
            )

    def _surrogate(self, inputs: LossInputs, engine_logprobs: Tensor) -> SurrogateTerms:
        """Return the surrogate of each token, with `engine_logprobs` float32 [T] as l_prev."""
        config = self.config
        mask = inputs.token_mask
        advantages = inputs.per_token("advantages")
        prev_logprobs = engine_logprobs
        is_sampled = mask
        if config.importance_correction.kind == "bypass":
            prev_logprobs = inputs.columns["generation_logprobs"]
            is_sampled = mask & prev_logprobs.isfinite()
        # Masked positions have no sample; their difference is set to 0 so that neither value nor
        # gradient can be NaN.
        log_ratio = torch.where(is_sampled, inputs.policy_logprobs - prev_logprobs, 0.0)
        logprobs = torch.where(mask, inputs.policy_logprobs, 0.0)
        if config.surrogate == "reinforce":
            terms = reinforce_surrogate(logprobs, advantages)
        elif config.surrogate == "cispo":
            terms = cispo_surrogate(logprobs, log_ratio, advantages, config.ratio_bounds)
        else:
            ratio = row_log_ratio(inputs, log_ratio) if config.has_row_ratio else log_ratio
            terms = clipped_surrogate(ratio, advantages, config.ratio_bounds, config.ratio_clip_c)
        if config.surrogate != "reinforce":
            terms.per_token.update(divergence_metrics(log_ratio))
        return terms

    def _reference_kl(self, inputs: LossInputs) -> Tensor:
        """Return the KL to the reference of each token, float32 [T]."""
        # The reference's log-probs are unfiltered, so the policy's must be as well.
        unfiltered = inputs.unfiltered_logprobs
        return reference_kl(
            inputs.policy_logprobs if unfiltered is None else unfiltered,
            inputs.columns["reference_logprobs"],
            inputs.token_mask,
            self.config.reference_policy_kl_type,
        )
