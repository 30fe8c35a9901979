"""Differences between the log-probs of the training engine and those of the sampler, as metrics.

Sources: Schulman 2020 (k3 estimator); Yao et al. 2025 (truncated importance sampling between
inference and training engines).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.losses.tensor_metrics import (
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
    kl_k3 = weight - 1 - log_weight
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
