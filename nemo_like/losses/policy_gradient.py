"""Clipped policy-gradient loss of PPO, GRPO and DAPO, with importance correction and reference KL.

Sources: Schulman et al. 2017 (PPO clip); Ye et al. 2020 (dual clip); Yu et al. 2025 (DAPO,
asymmetric clip and token mean); Schulman 2020 (k1, k2, k3 estimators); arXiv 2506.09477 (bias
of their gradients).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses.importance import importance_weights
from nemo_like.losses.mismatch import MAX_EXPONENT, mismatch_metrics
from nemo_like.losses.reduce import (
    GlobalCounts,
    LossInputs,
    LossTerms,
    Normalization,
    token_weights,
)
from nemo_like.losses.tensor_metrics import LossMetric, TensorMean, mean_metrics

_MAX_KL = 10.0
"""Limit of the magnitude of a token's KL estimate, and separately of its derivative."""
_ORIGIN = {
    "generation_logprobs": "A generator records them for every sampled token",
    "prev_logprobs": "Policy.compute_logprobs computes them before the first optimizer step",
    "reference_logprobs": "Policy.compute_logprobs computes them on workers with a reference",
}
"""Where each column per token comes from, for messages."""


@dataclass(frozen=True, kw_only=True)
class ClippedPolicyGradientLoss:
    """Clipped surrogate plus `beta * KL` minus `c * entropy`, summed over tokens.

    The surrogate of a token is `max(-A r, -A clip(r, 1 - min, 1 + max))`, r = exp(l - l_prev),
    times the weight of `config.importance_correction`.
    """

    config: PolicyGradientLossConfig
    is_single_step: bool = False
    """True: exactly one optimizer step is taken on the batch. l_prev is then the policy's own
    log-prob without gradient, so that r = 1 with the gradient of l, and no pass computes it."""

    @property
    def logprob_names(self) -> tuple[Literal["prev_logprobs", "reference_logprobs"], ...]:
        """Columns that a log-prob pass has to compute; with none of them no pass is needed."""
        names: list[Literal["prev_logprobs", "reference_logprobs"]] = []
        if not self.is_single_step and self.config.importance_correction.kind != "bypass":
            names.append("prev_logprobs")
        if self.config.reference_policy_kl_penalty > 0:
            names.append("reference_logprobs")
        return tuple(names)

    def for_num_steps(self, num_optimizer_steps: int) -> ClippedPolicyGradientLoss:
        """Return the loss for a batch on which so many optimizer steps are taken."""
        return replace(self, is_single_step=num_optimizer_steps == 1)

    @property
    def normalization(self) -> Normalization:
        """Divisor of the summed loss: tokens or sequences."""
        return self.config.normalization

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
        """Return the number of tokens or of sequences of the optimizer step."""
        return counts.denominator(self.normalization)

    def coupled_rows(self, inputs: LossInputs) -> None:
        """Return None: the loss is a sum over rows."""
        return

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Compute from `advantages`, `generation_logprobs` and the columns of `logprob_names`.

        With top-k, top-p or min-p sampling the ratio is that of the filtered distributions; the KL
        to the reference and the entropy are those of the unfiltered distributions. With a column
        `version_gap` the mismatch is reported by version gap as well. Raises ValueError for a
        missing column.
        """
        mask = inputs.token_mask
        columns = inputs.columns
        for name in ("generation_logprobs", *self.logprob_names):
            if name not in columns:
                raise ValueError(
                    f"the batch has no column {name}, which the loss reads; it has"
                    f" {', '.join(sorted(columns)) or 'none'}. {_ORIGIN[name]}"
                )
        generation_logprobs = columns["generation_logprobs"]
        # What the training engine computed, for the comparison with the sampler.
        engine_logprobs = inputs.policy_logprobs.detach()
        if "prev_logprobs" in self.logprob_names:
            engine_logprobs = columns["prev_logprobs"]
        correction = self.config.importance_correction
        if correction.kind == "bypass":
            prev_logprobs = generation_logprobs
            is_sampled = mask & generation_logprobs.isfinite()
        else:
            prev_logprobs = engine_logprobs
            is_sampled = mask
        # Masked positions have no sample; their difference is set to 0 so that neither value nor
        # gradient can be NaN.
        delta = torch.where(is_sampled, inputs.policy_logprobs - prev_logprobs, 0.0)
        losses, per_token = self._surrogate(delta, inputs.per_token("advantages"))
        importance = importance_weights(correction, inputs, engine_logprobs, generation_logprobs)
        per_token |= importance.per_token
        # The mean over samples of -log p, an unbiased estimate where the policy sampled them.
        per_token["policy/entropy_estimate"] = -inputs.policy_logprobs.detach()
        if importance.weights is not None:
            losses = losses * importance.weights
        if self.config.reference_policy_kl_penalty > 0:
            # The reference's log-probs are unfiltered, so the policy's must be as well.
            unfiltered = inputs.unfiltered_logprobs
            policy_logprobs = inputs.policy_logprobs if unfiltered is None else unfiltered
            kl = reference_kl(
                policy_logprobs,
                columns["reference_logprobs"],
                mask,
                self.config.reference_policy_kl_type,
            )
            losses = losses + self.config.reference_policy_kl_penalty * kl
            per_token[f"policy/reference_kl_{self.config.reference_policy_kl_type}"] = kl
        if inputs.entropy is not None:
            per_token["policy/entropy"] = inputs.entropy
            if self.entropy_gradient:
                entropy = torch.where(mask, inputs.entropy, 0.0)
                losses = losses - self.config.entropy_coefficient * entropy
        shares = token_weights(inputs, self.normalization)
        loss_sum = (shares * losses).sum()
        metrics: dict[str, LossMetric] = {
            "policy/loss": TensorMean(loss_sum.detach(), shares.sum()),
            **mean_metrics(per_token, mask),
            # Every context-parallel rank counts every row, which leaves the mean as it is.
            **mean_metrics(importance.per_row, inputs.row_num_tokens > 0),
        }
        metrics |= mismatch_metrics(
            engine_logprobs,
            generation_logprobs,
            mask,
            columns.get("version_gap"),
        )
        return LossTerms(loss_sum, metrics)

    def _surrogate(self, delta: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the surrogate losses [T] and the per-token metrics [T] by name.

        `delta` [T] is l - l_prev. With `ratio_clip_c`, the dual clip, the loss of a token with
        negative advantage is at most -A c.
        """
        low = 1.0 - self.config.ratio_clip_min
        high = 1.0 + self.config.ratio_clip_max
        exponent = delta.clamp(-MAX_EXPONENT, MAX_EXPONENT)
        ratio = torch.exp(exponent)
        unclipped = -advantages * ratio
        clipped = -advantages * ratio.clamp(low, high)
        losses = torch.maximum(unclipped, clipped)
        # Only where the advantage pushes the ratio further out does the clip remove the gradient.
        clipped_high = (ratio > high) & (advantages > 0)
        clipped_low = (ratio < low) & (advantages < 0)
        kl_k3 = ratio - 1 - delta
        per_token = {
            "policy/ratio_mean": ratio,
            "policy/approx_kl_k1": -delta,
            "policy/approx_kl_k3": kl_k3,
            "policy/clip_fraction": (clipped_high | clipped_low),
            "policy/clip_fraction_high": clipped_high,
            "policy/clip_fraction_low": clipped_low,
        }
        if self.config.ratio_clip_c is not None:
            bound = -advantages * self.config.ratio_clip_c
            clipped_dual = (advantages < 0) & (losses > bound)
            losses = torch.where(clipped_dual, bound, losses)
            per_token["policy/clip_fraction_dual"] = clipped_dual
        return losses, per_token


def reference_kl(
    policy_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    kind: str,
) -> Tensor:
    """Estimate KL(policy || reference) per token, float32 [T]; 0 where `mask` is False.

    With d = l_ref - l, the value is that of the estimator `kind`, clamped to [-10, 10]:
    k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d, where |d| is at most 20.

    The gradient with respect to `policy_logprobs` is -d clamped to [-10, 10], for every `kind`.
    It is the derivative of k2, and of k3 times the score-function factor exp(l - sg(l)); over
    samples from the policy it is an unbiased gradient of the KL, which the derivatives of k1 (the
    constant 1) and of k3 alone are not. Gradient descent therefore moves l towards l_ref at any
    d. The gradient is continuous and monotone in d, it is 0 only at d = 0, and the clamp of the
    value does not affect it.

    Sources: Schulman 2020 (values), arXiv 2506.09477 (gradients).
    """
    policy_logprobs = torch.where(mask, policy_logprobs, 0.0)
    with torch.no_grad():
        difference = reference_logprobs - policy_logprobs
        # Masked positions may have no reference value.
        difference = torch.where(mask, difference, 0.0)
        gradient = -difference.clamp(-_MAX_KL, _MAX_KL)
        difference = difference.clamp(-MAX_EXPONENT, MAX_EXPONENT)
        if kind == "k1":
            value = -difference
        elif kind == "k2":
            value = difference.square() / 2
        else:
            value = torch.exp(difference) - 1 - difference
        value = value.clamp(-_MAX_KL, _MAX_KL)
    return _WithGradient.apply(policy_logprobs, value, gradient)  # type: ignore[return-value]


class _WithGradient(torch.autograd.Function):
    """Returns `value`, with `derivative` as its derivative with respect to `variable`."""

    @staticmethod
    def forward(
        ctx: Any,
        variable: Tensor,
        value: Tensor,
        derivative: Tensor,
    ) -> Tensor:
        """Return `value`, of the same shape as `variable`."""
        ctx.save_for_backward(derivative)
        return value.clone()

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        grad_value: Tensor,
    ) -> tuple[Tensor, None, None]:
        """Multiply `grad_value` by the derivative; both have the same shape."""
        (derivative,) = ctx.saved_tensors
        return grad_value * derivative, None, None
