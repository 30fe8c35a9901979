"""Metrics of the rewards of one rollout."""

from __future__ import annotations

import numpy as np

from nemo_like.metrics import Max, Mean, Metrics, Min


def reward_metrics(
    rewards: np.ndarray, groups: np.ndarray, components: dict[str, np.ndarray]
) -> Metrics:
    """Mean, spread and extremes of the reward, the mean of each named component, and groups without
    spread.

    A group without spread has equal rewards and does not train the policy.
    `reward/frac_groups_zero_std` is the share of such groups; `reward/frac_groups_all_worst` and
    `reward/frac_groups_all_best` the shares of groups whose rewards all equal the lowest or the
    highest reward of the batch. Where the whole batch has one reward, it is neither: both are 0.
    `reward/frac_groups_all_zero` is the share of groups whose rewards are all 0.
    """
    _, member_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    means = np.bincount(member_of, weights=rewards) / sizes
    spread = np.bincount(member_of, weights=np.abs(rewards - means[member_of])) > 1e-8 * sizes
    flat = means[~spread]
    best = rewards.max(initial=-np.inf)
    worst = rewards.min(initial=np.inf)
    has_range = bool(best - worst > 1e-8)
    metrics: Metrics = {
        "reward/mean": Mean(float(rewards.sum()), len(rewards)),
        "reward/std": Mean(float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0),
        "reward/max": Max(float(best)),
        "reward/min": Min(float(worst)),
        "reward/frac_groups_zero_std": Mean(float((~spread).sum()), len(sizes)),
        "reward/frac_groups_all_best": Mean(
            float((has_range & (flat >= best - 1e-8)).sum()), len(sizes)
        ),
        "reward/frac_groups_all_worst": Mean(
            float((has_range & (flat <= worst + 1e-8)).sum()), len(sizes)
        ),
        "reward/frac_groups_all_zero": Mean(float((np.abs(flat) <= 1e-8).sum()), len(sizes)),
    }
    for name, values in components.items():
        metrics[f"reward/{name}_mean"] = Mean(float(values.sum()), len(values))
    return metrics
