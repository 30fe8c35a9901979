"""Rewards of a prompt's group of completions become advantages. NumPy on the driver; nothing here is large."""

from __future__ import annotations

import numpy as np

from nemo_like.config.schema import AdvantageConfig
from nemo_like.metrics import Max, Mean, Metrics, Min


def group_advantages(rewards: np.ndarray, groups: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """float32 [B] advantages from `rewards` [B] and `groups` int [B] (equal for completions of one prompt, any order).

    `group_mean`: A = R - mean(R). `leave_one_out` (RLOO): A = R - mean of the others = G/(G-1) * (R - mean(R)).
    `group_std` divides by the group's sample standard deviation (n-1) plus eps; a group without spread gets exactly 0.
    Raises ValueError for a group of one, which can teach nothing.
    """
    if len(rewards) == 0:
        return np.zeros(0, dtype=np.float32)
    rewards = rewards.astype(np.float64)
    _, member_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    if sizes.min() < 2:
        raise ValueError(
            "a prompt has only one completion, so its advantage would always be 0;"
            " set grpo.num_generations_per_prompt to 2 or more"
        )
    means = np.bincount(member_of, weights=rewards) / sizes
    centred = rewards - means[member_of]
    std = np.sqrt(np.bincount(member_of, weights=centred**2) / (sizes - 1))
    spread = std > 1e-8 * np.maximum(1.0, np.abs(means))
    if config.baseline == "leave_one_out":
        centred = centred * (sizes / (sizes - 1))[member_of]
    if config.normalize == "group_std":
        centred = centred / (std + config.eps)[member_of]
    return np.where(spread[member_of], centred, 0.0).astype(np.float32)


def reward_metrics(rewards: np.ndarray, groups: np.ndarray, components: dict[str, np.ndarray]) -> Metrics:
    """Mean, spread and extremes of the reward, of each named component, and the share of groups that teach nothing."""
    _, member_of, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    means = np.bincount(member_of, weights=rewards) / sizes
    spread = np.bincount(member_of, weights=np.abs(rewards - means[member_of])) > 1e-8 * sizes
    flat = means[~spread]
    best = rewards.max(initial=-np.inf)
    metrics: Metrics = {
        "reward/mean": Mean(float(rewards.sum()), len(rewards)),
        "reward/std": Mean(float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0),
        "reward/max": Max(float(best)),
        "reward/min": Min(float(rewards.min(initial=np.inf))),
        "reward/frac_groups_zero_std": Mean(float((~spread).sum()), len(sizes)),
        "reward/frac_groups_all_best": Mean(float((flat >= best - 1e-8).sum()), len(sizes)),
    }
    for name, values in components.items():
        metrics[f"reward/{name}_mean"] = Mean(float(values.sum()), len(values))
    return metrics
