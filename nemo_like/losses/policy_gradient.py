"""The policy-gradient losses of GRPO, DAPO, Dr. GRPO, GSPO, CISPO, RLOO and REINFORCE++.

A loss is a surrogate, times the weights of the importance correction (`losses.importance`), plus a
KL penalty (`reference_kl`) and an entropy bonus, divided as `losses.reduce.Normalizer` states.
docs/losses.md has a table of all members. `rollout_loss` returns the loss of a configuration, which
may also be a loss of the user.

The surrogates give the loss of each token. With l the log-prob of the policy, l_prev the one before
the update, A the advantage and sg() the value without gradient:

* `clipped_surrogate`: max(-A r, -A clip(r)) with r = exp(l - l_prev), of PPO (Schulman et al. 2017)
  with the asymmetric clip of DAPO (Yu et al. 2025) and the dual clip of Ye et al. 2020. With the
  log-ratio of `row_log_ratio` it is the surrogate of GSPO and GSPO-token (Zheng et al. 2025).
* `cispo_surrogate`: -sg(clip(r)) A l, of MiniMax-M1 (2025).
* `reinforce_surrogate`: -A l (Williams 1992), as in RLOO (Ahmadian et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.config.loss import LogprobName, PolicyGradientLossConfig
from nemo_like.losses.importance import MAX_EXPONENT, importance_weights, mismatch_metrics
from nemo_like.losses.reduce import (
    GlobalCounts,
    Loss,
    LossInputs,
    LossMetric,
    LossTerms,
    Normalizer,
    TensorMean,
    mean_metrics,
)

Bounds = tuple[float | None, float | None]
"""(lowest, highest) value of a clipped ratio; None means no bound."""

_MAX_KL = 10.0
"""Limit of the magnitude of a token's KL estimate, and separately of its derivative."""

_ORIGIN = {
    "generation_logprobs": "A generator records them for every sampled token",
    "prev_logprobs": "Policy.compute_logprobs computes them before the first optimizer step",
    "reference_logprobs": "Policy.compute_logprobs computes them on workers with a reference",
}
"""Where each column per token comes from, for messages."""

_PATH_KEY = "loss_fn.path"
_MEMBERS = (
    "uses_sampling_distribution",
    "needs_entropy",
    "entropy_gradient",
    "denominator",
    "coupled_rows",
)
"""Members of `Loss` besides the call."""


@dataclass(frozen=True, kw_only=True)
class SurrogateTerms:
    """Result of a surrogate on T tokens."""

    losses: Tensor
    """float32 [T], with gradient."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Metric -> [T], for the mean over trained tokens."""


def row_log_ratio(inputs: LossInputs, log_ratio: Tensor) -> Tensor:
    """Return the mean of `log_ratio` over the trained tokens of a row, for each of its tokens.

    `log_ratio` and the result are float32 [T]. The value belongs to the row, log s = 1/n sum of
    l - l_prev, over all context-parallel ranks; the gradient belongs to the token's own l, as in
    log s_t = sg(log s) + l - sg(l) of GSPO-token.

    GSPO has the same gradient. The loss of a row is a function f(s), and its token weights add up
    to 1 if each is 1/n. d f(s) / d l_t is f'(s) s / n, and so is the derivative of 1/n f(s_t). So
    each context-parallel rank needs the sum of the row only, and no gradient of other ranks.

    Each row of an episode has a ratio of its own: n counts its trained tokens, and its loss has
    the weight n / (trained tokens of the episode).
    """
    sums = inputs.sum_over_row(log_ratio.detach())
    means = sums / inputs.row_num_tokens.clamp(min=1.0)
    return means[inputs.row_ids] + (log_ratio - log_ratio.detach())


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, bounds: Bounds, dual_clip: float | None
) -> SurrogateTerms:
    """Return max(-A r, -A clip(r)) for r = exp(`log_ratio`); both arguments are float32 [T].

    With `dual_clip` c the loss of a token with negative advantage is at most -A c.
    """
    lowest, highest = bounds
    ratio = torch.exp(log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT))
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lowest, highest)
    losses = torch.maximum(unclipped, clipped)
    # Only where the advantage pushes the ratio further out does the clip remove the gradient.
    is_above, is_below = _outside(ratio, bounds)
    per_token = _clip_metrics(ratio, is_above & (advantages > 0), is_below & (advantages < 0))
    if dual_clip is not None:
        bound = -advantages * dual_clip
        clipped_dual = (advantages < 0) & (losses > bound)
        losses = torch.where(clipped_dual, bound, losses)
        per_token["policy/clip_fraction_dual"] = clipped_dual
    return SurrogateTerms(losses=losses, per_token=per_token)


def cispo_surrogate(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, bounds: Bounds
) -> SurrogateTerms:
    """Return -sg(clip(r)) A l for l = `logprobs`, r = exp(`log_ratio`); arguments are float32 [T].

    Every token has a gradient, also where its ratio is clipped.
    """
    lowest, highest = bounds
    ratio = torch.exp(log_ratio.detach().clamp(-MAX_EXPONENT, MAX_EXPONENT))
    losses = -ratio.clamp(lowest, highest) * advantages * logprobs
    is_above, is_below = _outside(ratio, bounds)
    return SurrogateTerms(losses=losses, per_token=_clip_metrics(ratio, is_above, is_below))


def reinforce_surrogate(logprobs: Tensor, advantages: Tensor) -> SurrogateTerms:
    """Return -A l for l = `logprobs`; both arguments are float32 [T]."""
    return SurrogateTerms(losses=-advantages * logprobs)


def divergence_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Return estimates of KL(previous, policy), [T] each, from l - l_prev, float32 [T]."""
    log_ratio = log_ratio.detach()
    # `expm1`: for small differences exp(d) - 1 has no digits left.
    kl_k3 = torch.expm1(log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT)) - log_ratio
    return {"policy/approx_kl_k1": -log_ratio, "policy/approx_kl_k3": kl_k3}


def _outside(ratio: Tensor, bounds: Bounds) -> tuple[Tensor, Tensor]:
    """Return where `ratio` [T] is above and where it is below the bounds, bool [T] each."""
    lowest, highest = bounds
    none = torch.zeros_like(ratio, dtype=torch.bool)
    is_above = none if highest is None else ratio > highest
    is_below = none if lowest is None else ratio < lowest
    return is_above, is_below


def _clip_metrics(ratio: Tensor, clipped_high: Tensor, clipped_low: Tensor) -> dict[str, Tensor]:
    """Return the metrics of a clipped ratio [T] from the tokens that are clipped, bool [T] each."""
    return {
        "policy/ratio_mean": ratio,
        "policy/clip_fraction": clipped_high | clipped_low,
        "policy/clip_fraction_high": clipped_high,
        "policy/clip_fraction_low": clipped_low,
    }


def reference_kl(
    policy_logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, kind: str
) -> Tensor:
    """Estimate KL(policy || reference) per token, float32 [T]; 0 where `mask` is False.

    With d = l_ref - l, the value is the estimator `kind`, clamped to [-10, 10]:
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
            value = torch.expm1(difference) - difference
        value = value.clamp(-_MAX_KL, _MAX_KL)
    return _WithGradient.apply(policy_logprobs, value, gradient)  # type: ignore[return-value]


class _WithGradient(torch.autograd.Function):
    """Returns `value`, with `derivative` as its derivative with respect to `variable`."""

    @staticmethod
    def forward(ctx: Any, variable: Tensor, value: Tensor, derivative: Tensor) -> Tensor:
        """Return `value`, of the same shape as `variable`."""
        ctx.save_for_backward(derivative)
        return value.clone()

    @staticmethod
    @once_differentiable
    # torch declares `*grad_outputs`; a fixed signature checks their number.
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_value: Tensor
    ) -> tuple[Tensor, None, None]:
        """Multiply `grad_value` by the derivative; both have the same shape."""
        (derivative,) = ctx.saved_tensors
        return grad_value * derivative, None, None


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
        """True: log-probs refer to the distribution that is sampled from."""
        return True

    @property
    def needs_entropy(self) -> bool:
        """True if the loss has an entropy bonus or the entropy is a metric."""
        return self.entropy_gradient

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

        With top-k, top-p or min-p sampling the ratio refers to the filtered distributions; the KL
        to the reference and the entropy refer to the unfiltered distributions. With a column
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
            **mean_metrics(importance.per_row, inputs.row_num_tokens > 0, inputs.row_weight),
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


@dataclass(frozen=True, kw_only=True)
class CustomLoss:
    """A loss of the user with the log-probs that a pass before training computes for it."""

    loss: Loss
    logprob_names: tuple[LogprobName, ...] = ()

    def for_num_steps(self, num_optimizer_steps: int) -> CustomLoss:
        """Return the loss itself: its columns do not depend on the number of optimizer steps."""
        return self

    @property
    def uses_sampling_distribution(self) -> bool:
        """See `Loss.uses_sampling_distribution`."""
        return self.loss.uses_sampling_distribution

    @property
    def needs_entropy(self) -> bool:
        """See `Loss.needs_entropy`."""
        return self.loss.needs_entropy

    @property
    def entropy_gradient(self) -> bool:
        """See `Loss.entropy_gradient`."""
        return self.loss.entropy_gradient

    def denominator(self, counts: GlobalCounts) -> float:
        """See `Loss.denominator`."""
        return self.loss.denominator(counts)

    def coupled_rows(self, inputs: LossInputs) -> Tensor | None:
        """See `Loss.coupled_rows`: int64 [R] or None."""
        return self.loss.coupled_rows(inputs)

    def __call__(self, inputs: LossInputs) -> LossTerms:
        """Return the loss of one microbatch. Raises TypeError for a result of another type, and
        ValueError if the loss is not a sum over rows.
        """
        if self.loss.coupled_rows(inputs) is not None:
            raise ValueError(
                f"the loss {type(self.loss).__name__} of {_PATH_KEY} couples rows, but rows of"
                " rollouts are planned one by one and may be in different microbatches; return None"
                " from coupled_rows and a sum over rows"
            )
        terms = self.loss(inputs)
        if not isinstance(terms, LossTerms):
            raise TypeError(
                f"the loss {type(self.loss).__name__} of {_PATH_KEY} returned a"
                f" {type(terms).__name__}; return nemo_like.losses.LossTerms(loss_sum, metrics)"
            )
        return terms


def load_custom_loss(path: str, options: Mapping[str, Any]) -> Loss:
    """Import the class or function at `path`, call it with `options` as keyword arguments.

    Raises ConfigError that begins with `loss_fn.path` if the import or the call fails, or if the
    result is not a `Loss`.
    """
    example = "my_package.losses.MyLoss"
    argument = "keyword argument for each key of loss_fn.options"
    factory = import_function(_PATH_KEY, path, example, argument)
    try:
        loss = factory(**options)
    except Exception as error:
        # Code of the user can fail in any way.
        raise ConfigError(
            f"{_PATH_KEY} is {path!r}, but calling it with loss_fn.options"
            f" {shown_value(dict(options))} as keyword arguments failed with"
            f" {user_error_text(error)}"
        ) from error
    missing = [name for name in _MEMBERS if not hasattr(loss, name)]
    if not callable(loss):
        missing.append("__call__")
    if missing:
        raise ConfigError(
            f"{_PATH_KEY} is {path!r}, which returned a {type(loss).__name__} without"
            f" {', '.join(missing)}; a loss has the members of nemo_like.losses.Loss, see 'A loss'"
            " in docs/extending.md"
        )
    if "<locals>" in type(loss).__qualname__:
        raise ConfigError(
            f"{_PATH_KEY} is {path!r}, but its loss cannot be sent to the workers: its class"
            f" {type(loss).__name__} is defined inside a function. Define it at the top level of"
            " its module"
        )
    return cast(Loss, loss)


class RolloutLoss(Loss, Protocol):
    """A loss of rollouts, which names the log-probs that are computed before training."""

    @property
    def logprob_names(self) -> tuple[LogprobName, ...]:
        """Columns that a log-prob pass has to compute; with none of them no pass is needed."""
        ...

    def for_num_steps(self, num_optimizer_steps: int) -> RolloutLoss:
        """Return the loss for a batch on which so many optimizer steps are taken."""
        ...


def rollout_loss(config: PolicyGradientLossConfig, max_new_tokens: int) -> RolloutLoss:
    """Return the loss of `config`.

    `max_new_tokens`, the longest completion, is the default of `constant_length`. Raises
    ConfigError for a loss of the user that cannot be used.
    """
    if config.path is not None:
        return CustomLoss(
            loss=load_custom_loss(config.path, config.options),
            logprob_names=config.logprob_names(is_single_step=False),
        )
    if config.divisor == "constant" and config.constant_length is None:
        config = replace(config, constant_length=max_new_tokens)
    return ClippedPolicyGradientLoss(config=config)
