"""Metrics of the rewards of one rollout."""

from __future__ import annotations

import numpy as np

from nemo_like.metrics import Max, Mean, Metrics, Min

_TOLERANCE = 1e-8
"""Rewards that differ by less count as equal."""


def reward_metrics(
    rewards: np.ndarray, groups: np.ndarray, components: dict[str, np.ndarray]
) -> Metrics:
    """Return the mean, spread and extremes of the reward, and shares of groups with equal rewards.

    `rewards` is float [B], `groups` int [B], each of the `components` float [B]. A group with equal
    rewards does not train the policy: its advantages are 0. `reward/frac_groups_zero_std` is the
    share of such groups; `reward/frac_groups_all_worst` and `reward/frac_groups_all_best` are the
    shares of groups whose rewards all equal the lowest or the highest reward of the batch, 0 for
    both if all rewards of the batch are equal. `reward/frac_groups_all_zero` is the share of groups
    whose rewards are all 0.
    """
    # Groups may have any numbers; `group_of_row` int64 [B] counts them from 0.
    _, group_of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    num_groups = len(sizes)
    group_sums = np.bincount(group_of_row, weights=rewards)
    means = group_sums / sizes
    deviations = np.abs(rewards - means[group_of_row])
    group_deviations = np.bincount(group_of_row, weights=deviations)
    has_spread = group_deviations > _TOLERANCE * sizes
    equal_rewards = means[~has_spread]
    best = rewards.max(initial=-np.inf)
    worst = rewards.min(initial=np.inf)
    # In a batch of equal rewards every group would be both best and worst.
    has_range = bool(best - worst > _TOLERANCE)
    is_best = has_range & (equal_rewards >= best - _TOLERANCE)
    is_worst = has_range & (equal_rewards <= worst + _TOLERANCE)
    is_zero = np.abs(equal_rewards) <= _TOLERANCE
    metrics: Metrics = {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/max": Max(float(best)),
        "reward/min": Min(float(worst)),
        "reward/frac_groups_zero_std": _share(~has_spread, num_groups),
        "reward/frac_groups_all_best": _share(is_best, num_groups),
        "reward/frac_groups_all_worst": _share(is_worst, num_groups),
        "reward/frac_groups_all_zero": _share(is_zero, num_groups),
    }
    for name, values in components.items():
        metrics[f"reward/{name}_mean"] = _mean(values)
        metrics[f"reward/{name}_std"] = _std(values)
    return metrics


def _mean(values: np.ndarray) -> Mean:
    """Return the mean of `values` [B]."""
    return Mean(float(values.sum()), len(values))


def _std(values: np.ndarray) -> Mean:
    """Return the sample standard deviation of `values` [B], 0 for one value."""
    return Mean(float(values.std(ddof=1)) if len(values) > 1 else 0.0)


def _share(mask: np.ndarray, num_groups: int) -> Mean:
    """Return the share of groups that are True in `mask` bool [n]."""
    return Mean(float(mask.sum()), num_groups)
