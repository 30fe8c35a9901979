"""Importance weights that correct the policy gradient for the mismatch of training and sampling.

With l_prev the training engine's log-prob of a sampled token before the update and l_generation the
sampler's, the weight is w = exp(l_prev - l_generation), without gradient.

Sources: Yao et al. 2025 (TIS, truncated importance sampling); Ring team 2025 (IcePop, masked
tokens); Liu et al. 2025 (sequence-level correction and rejection by the geometric mean).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses.mismatch import MAX_EXPONENT, log_weights
from nemo_like.losses.reduce import LossInputs

_REPORTED_BOUNDS = (0.5, 5.0)
"""Bounds of the reported share where no weight is applied: the defaults of `token_mask`."""
_OUT_OF_BOUNDS = "importance/out_of_bounds_share"
_WEIGHT_MEAN = "importance/weight_mean"


@dataclass(frozen=True, kw_only=True)
class ImportanceWeights:
    """Weights of one microbatch of T tokens and R rows, and the values of their metrics."""

    weights: Tensor | None
    """float32 [T]: factor of each token's surrogate loss; None where nothing is multiplied."""
    per_token: dict[str, Tensor]
    """Metric -> [T], for the mean over trained tokens."""
    per_row: dict[str, Tensor]
    """Metric -> [R], for the mean over rows with trained tokens."""


def importance_weights(
    loss: PolicyGradientLossConfig,
    inputs: LossInputs,
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
) -> ImportanceWeights:
    """Compute the factor of each token's surrogate loss from the log-probs, float32 [T] each.

    The factor is 0 for a token whose w is not finite. It is 0 for all tokens of its row in the
    sequence kinds, and with `bypass` where the ratio is one of the row. Counts are those of all
    trained tokens and rows: a masked token stays in the denominator of the loss.
    """
    config = loss.importance_correction
    log_weight, is_finite = log_weights(prev_logprobs, generation_logprobs, inputs.token_mask)
    if config.kind in ("sequence_truncate", "sequence_mask"):
        # NaN marks rows with a weight that is not finite.
        marked = torch.where(is_finite, log_weight, torch.nan)
        return _sequence_weights(loss, inputs, log_weight, inputs.sum_over_row(marked))
    lower, upper = config.bounds if config.has_weights else _REPORTED_BOUNDS
    weight = torch.exp(log_weight)
    is_within = _is_within(weight, lower, upper) & is_finite
    per_token = {_OUT_OF_BOUNDS: ~is_within}
    if config.kind == "none":
        return ImportanceWeights(weights=None, per_token=per_token, per_row={})
    if config.kind == "bypass":
        # The ratio of a token without a finite log-prob has no meaning. Where the policy's own is
        # not finite, the loss is not finite either, and the optimizer step is skipped.
        has_ratio = generation_logprobs.isfinite()
        weights = has_ratio.float()
        if loss.has_row_ratio:
            num_without = inputs.sum_over_row((~has_ratio).float())
            weights = (num_without == 0).float()[inputs.row_ids]
        return ImportanceWeights(weights=weights, per_token=per_token, per_row={})
    if config.kind == "token_truncate":
        weights = torch.where(is_finite, weight.clamp(lower, upper), 0.0)
    else:
        weights = torch.where(is_within, weight, 0.0)
    per_token[_WEIGHT_MEAN] = weights
    return ImportanceWeights(weights=weights, per_token=per_token, per_row={})


def _sequence_weights(
    loss: PolicyGradientLossConfig, inputs: LossInputs, log_weight: Tensor, sums: Tensor
) -> ImportanceWeights:
    """Return the weights of the sequence kinds from log w, float32 [T], and its row sums [R]."""
    config = loss.importance_correction
    lower, upper = config.bounds
    if config.kind == "sequence_truncate":
        weight = torch.exp(sums.clamp(-MAX_EXPONENT, MAX_EXPONENT))
        row_weights = torch.where(sums.isfinite(), weight.clamp(lower, upper), 0.0)
        is_within = _is_within(weight, lower, upper)
        weights = row_weights[inputs.row_ids]
    else:
        # The geometric mean of the row's weights.
        mean = torch.exp(sums / inputs.row_num_tokens.clamp(min=1.0))
        is_within = _is_within(mean, lower, upper)
        weight = torch.exp(log_weight)
        if loss.surrogate == "gspo":
            # A row has one ratio and one weight; their product is exp(mean(l - l_generation)).
            weight = mean[inputs.row_ids]
        weights = torch.where(is_within[inputs.row_ids], weight, 0.0)
    return ImportanceWeights(
        weights=weights, per_token={_WEIGHT_MEAN: weights}, per_row={_OUT_OF_BOUNDS: ~is_within}
    )


def _is_within(weight: Tensor, lower: float | None, upper: float | None) -> Tensor:
    """Return where `weight` [N] is in [lower, upper], bool [N]; False for NaN."""
    is_within = ~weight.isnan()
    if lower is not None:
        is_within = is_within & (weight >= lower)
    if upper is not None:
        is_within = is_within & (weight <= upper)
    return is_within
