"""Surrogates of the policy gradient: the loss of each token from its log-prob and its advantage.

With l the log-prob of the policy, l_prev the one before the update, A the advantage and sg() the
value without gradient:

* `clipped_surrogate`: max(-A r, -A clip(r)) with r = exp(l - l_prev), of PPO (Schulman et al. 2017)
  with the asymmetric clip of DAPO (Yu et al. 2025) and the dual clip of Ye et al. 2020. With the
  log-ratio of `row_log_ratio` it is that of GSPO and GSPO-token (Zheng et al. 2025).
* `cispo_surrogate`: -sg(clip(r)) A l, of MiniMax-M1 (2025).
* `reinforce_surrogate`: -A l (Williams 1992), as in RLOO (Ahmadian et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_like.losses.mismatch import MAX_EXPONENT
from nemo_like.losses.reduce import LossInputs

Bounds = tuple[float | None, float | None]
"""(lowest, highest) value of a clipped ratio; None is no bound."""


@dataclass(frozen=True, kw_only=True)
class SurrogateTerms:
    """Result of a surrogate on T tokens."""

    losses: Tensor
    """float32 [T], with gradient."""
    per_token: dict[str, Tensor] = field(default_factory=dict)
    """Metric -> [T], for the mean over trained tokens."""


def row_log_ratio(inputs: LossInputs, log_ratio: Tensor) -> Tensor:
    """Return the mean of `log_ratio` over the trained tokens of a row, for each of its tokens.

    `log_ratio` and the result are float32 [T]. The value is that of the row, log s = 1/n sum of
    l - l_prev, over all context-parallel ranks; the gradient is that of the token's own l, as in
    log s_t = sg(log s) + l - sg(l) of GSPO-token.

    GSPO has the same gradient. The loss of a row is a function f(s), and its token weights add up
    to 1 if each is 1/n. d f(s) / d l_t is f'(s) s / n, and so is the derivative of 1/n f(s_t). So
    each context-parallel rank needs the sum of the row only, and no gradient of other ranks.
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
    ratio = torch.exp(log_ratio.clamp(-MAX_EXPONENT, MAX_EXPONENT))
    return {"policy/approx_kl_k1": -log_ratio, "policy/approx_kl_k3": ratio - 1 - log_ratio}


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
