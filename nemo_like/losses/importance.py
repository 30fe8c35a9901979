"""Importance weights, and the difference between the log-probs of the policy and of the sampler.

With l_prev the training engine's log-prob of a sampled token before the update and l_generation the
sampler's, the weight is w = exp(l_prev - l_generation), without gradient.

Sources: Schulman 2020 (k3 estimator); Yao et al. 2025 (TIS, truncated importance sampling between
inference and training engines); Ring team 2025 (IcePop, masked tokens); Liu et al. 2025
(sequence-level correction and rejection by the geometric mean).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.config.loss import PolicyGradientLossConfig
from nemo_like.losses.reduce import (
    LossInputs,
    LossMetric,
    TensorMax,
    TensorMean,
    TensorSum,
    mean_metrics,
)

MAX_EXPONENT = 20.0
"""Limit of a log-prob difference: exp(20) is finite in float32, and a larger difference is no
meaningful signal.
"""
NUM_GAPS = 6
"""Groups of tokens by version gap: 0, 1, 2, 3, 4, and 5 or more."""

_REPORTED_BOUNDS = (0.5, 5.0)
"""Bounds of the reported share where no weight is applied: the defaults of `token_mask`."""

_OUT_OF_BOUNDS = "importance/out_of_bounds_share"
_WEIGHT_MEAN = "importance/weight_mean"


def log_weights(
    prev_logprobs: Tensor, generation_logprobs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return log w = l_prev - l_generation, limited to [-20, 20], and where it is finite.

    All are [T]: the log-probs and the first result float32, `mask` and the second bool. The first
    is 0 where `mask` is False or the difference is not finite; the second is True where `mask` is
    False.
    """
    difference = torch.where(mask, prev_logprobs.detach() - generation_logprobs, 0.0)
    is_finite = difference.isfinite()
    difference = torch.where(is_finite, difference, 0.0)
    return difference.clamp(-MAX_EXPONENT, MAX_EXPONENT), is_finite


def mismatch_metrics(
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    mask: Tensor,
    version_gap: Tensor | None = None,
) -> dict[str, LossMetric]:
    """Compare the training engine's log-probs of the sampled tokens with the sampler's, [T] each.

    Usual values: `gen_kl_k3` of 1e-4 to 1e-3, `token_mult_prob_error` = mean exp|difference| below
    about 1.02. Tokens without a finite difference are counted in `num_nonfinite` and left out of
    the others. `mask` is bool [T]; `version_gap`, float32 [T], adds metrics by gap, see
    `version_gap_metrics`.
    """
    log_weight, is_finite = log_weights(prev_logprobs, generation_logprobs, mask)
    measured = mask & is_finite
    weight = torch.exp(log_weight)
    # `expm1`: for small differences exp(d) - 1 has no digits left.
    kl_k3 = torch.expm1(log_weight) - log_weight
    metrics = mean_metrics(
        {
            "mismatch/gen_kl_k3": kl_k3,
            "mismatch/token_mult_prob_error": torch.exp(log_weight.abs()),
            "mismatch/importance_ratio_mean": weight,
        },
        measured,
    )
    # max() of an empty tensor is an error.
    largest = log_weight.new_zeros(())
    if log_weight.numel():
        largest = log_weight.abs().max()
    metrics["mismatch/logprob_diff_max"] = TensorMax(largest)
    metrics["mismatch/num_nonfinite"] = TensorSum((mask & ~is_finite).sum())
    if version_gap is not None:
        metrics |= version_gap_metrics(kl_k3, weight, version_gap, measured)
    return metrics


def version_gap_metrics(
    kl_k3: Tensor, weight: Tensor, version_gap: Tensor, mask: Tensor
) -> dict[str, LossMetric]:
    """Return `staleness/*`, and the means of `kl_k3` and `weight` of the tokens of each gap.

    `version_gap` is the number of weight versions between the sampling of a token and the version
    that is trained, at least 0. The names are `mismatch/gap_<g>/...` with g in 0 to 4 and
    `mismatch/gap_5_or_more/...`; a gap without tokens has no metrics. `kl_k3`, `weight` and
    `version_gap` are float32 [T], `mask` is bool [T].
    """
    if version_gap.numel() == 0:
        return {}
    gap = torch.where(mask, version_gap, 0.0)
    groups = torch.arange(NUM_GAPS, device=gap.device)
    group_of_token = gap.clamp(0, NUM_GAPS - 1).long()
    # [T, G]; a sum over it is deterministic on a GPU, other than index_add.
    is_in_group = mask[:, None] & (group_of_token[:, None] == groups)
    counts = is_in_group.sum(dim=0).float()
    kl_sums = torch.where(is_in_group, kl_k3[:, None], 0.0).sum(dim=0)
    weight_sums = torch.where(is_in_group, weight[:, None], 0.0).sum(dim=0)
    metrics: dict[str, LossMetric] = {
        "staleness/mean": TensorMean(gap.sum(), counts.sum()),
        "staleness/max": TensorMax(gap.max()),
    }
    for group in range(NUM_GAPS):
        name = f"gap_{group}" if group < NUM_GAPS - 1 else f"gap_{group}_or_more"
        count = counts[group]
        metrics[f"mismatch/{name}/gen_kl_k3"] = TensorMean(kl_sums[group], count, is_optional=True)
        metrics[f"mismatch/{name}/importance_ratio_mean"] = TensorMean(
            weight_sums[group], count, is_optional=True
        )
    return metrics


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
    sequence kinds, and with `bypass` if the ratio is per row. Counts include all trained tokens and
    rows: a masked token stays in the denominator of the loss.
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
