"""Confidence intervals of means over prompts.

The answers to one prompt depend on each other, so the prompt is the unit: a prompt has a sum and a
weight (its number of answers, or 1), and a mean is the ratio of both summed over prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

NUM_RESAMPLES = 2000
_BLOCK_COUNTS = 2**22
"""Counts that are drawn at a time."""

Method = Literal["wilson", "bootstrap", "none"]


@dataclass(frozen=True, kw_only=True)
class PromptMeans:
    """Contributions of P prompts to a mean."""

    totals: np.ndarray
    """float64 [P]"""
    weights: np.ndarray
    """float64 [P]"""
    is_share: bool = False
    """The totals are between 0 and 1 and the weights 1."""

    @property
    def value(self) -> float:
        """The mean; NaN without weight."""
        weight = float(self.weights.sum())
        return float(self.totals.sum()) / weight if weight else math.nan


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean and its confidence interval."""

    value: float
    low: float | None
    high: float | None
    method: Method
    """`wilson`, `bootstrap` over prompts, or `none` where neither applies; see `estimates`."""


def estimates(
    means: Mapping[str, PromptMeans], *, confidence: float = 0.95, seed: int = 0
) -> dict[str, Estimate]:
    """Return the mean and the interval of each of `means`, which are over the same P prompts.

    A share of prompts that are right or wrong has the Wilson interval; any other mean the
    percentile interval of a bootstrap that resamples prompts. Where all prompts are right, or all
    wrong, a bootstrap would have an interval of length 0, and the Wilson interval of P trials is
    taken. Another mean of prompts with equal values, or of one prompt, has no interval. Means
    without weight are left out. Raises ValueError for a confidence outside of (0, 1).
    """
    if not 0 < confidence < 1:
        raise ValueError(f"the confidence is {confidence}; it must be between 0 and 1")
    found: dict[str, Estimate] = {}
    resampled: dict[str, PromptMeans] = {}
    for name, mean in means.items():
        if math.isnan(mean.value):
            continue
        num_prompts = len(mean.totals)
        if mean.is_share and _is_binary(mean.totals):
            low, high = wilson_interval(float(mean.totals.sum()), num_prompts, confidence)
            found[name] = Estimate(value=mean.value, low=low, high=high, method="wilson")
        elif num_prompts < 2 or _is_constant(mean):
            found[name] = Estimate(value=mean.value, low=None, high=None, method="none")
        else:
            resampled[name] = mean
    for name, (low, high) in bootstrap_intervals(resampled, confidence, seed).items():
        value = resampled[name].value
        found[name] = Estimate(value=value, low=low, high=high, method="bootstrap")
    # In the order of the argument.
    return {name: found[name] for name in means if name in found}


def wilson_interval(num_correct: float, num_trials: int, confidence: float) -> tuple[float, float]:
    """Return the Wilson score interval of a share (Wilson 1927).

    With z the quantile of the normal distribution and p = c / n it is
    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n).
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = num_correct / num_trials
    ratio = z * z / num_trials
    center = share + ratio / 2
    variance = share * (1 - share) / num_trials
    half = z * math.sqrt(variance + ratio / (4 * num_trials))
    scale = 1 + ratio
    # The bounds of 0 and n are exact, up to rounding.
    low = 0.0 if num_correct == 0 else (center - half) / scale
    high = 1.0 if num_correct == num_trials else (center + half) / scale
    return low, high


def bootstrap_intervals(
    means: Mapping[str, PromptMeans],
    confidence: float,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> dict[str, tuple[float, float]]:
    """Return the percentile intervals of `means` over the same P prompts (Efron 1979).

    A resample draws P prompts with replacement; all means use the same draws.
    """
    if not means:
        return {}
    totals = np.stack([mean.totals for mean in means.values()]).astype(np.float64)
    weights = np.stack([mean.weights for mean in means.values()]).astype(np.float64)
    num_prompts = totals.shape[1]
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK_COUNTS // num_prompts)
    parts = []
    for start in range(0, num_resamples, block):
        size = min(block, num_resamples - start)
        # How often a resample has each prompt.
        shares = np.full(num_prompts, 1 / num_prompts)
        counts = generator.multinomial(num_prompts, shares, size=size).astype(np.float64)
        sums = counts @ totals.T
        resampled_weights = counts @ weights.T
        # A resample of prompts without weight has no mean.
        missing = resampled_weights == 0
        parts.append(np.where(missing, np.nan, sums / np.where(missing, 1, resampled_weights)))
    values = np.concatenate(parts)
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(values, [tail, 1 - tail], axis=0)
    bounds = zip(low.tolist(), high.tolist(), strict=True)
    return dict(zip(means, bounds, strict=True))


def _is_constant(mean: PromptMeans) -> bool:
    """Return True if all prompts with a weight have the same value."""
    has_weight = mean.weights > 0
    values = mean.totals[has_weight] / mean.weights[has_weight]
    return bool((values == values[0]).all())


def _is_binary(totals: np.ndarray) -> bool:
    """Return True if all of `totals` [P] are 0 or 1, so that they are outcomes of P trials."""
    return bool(np.isin(totals, (0.0, 1.0)).all())
