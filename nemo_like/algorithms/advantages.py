"""Rewards of a prompt's group of completions become advantages. NumPy on the driver; nothing here is large."""

from __future__ import annotations

import numpy as np

from nemo_like.config.schema import AdvantageConfig
from nemo_like.metrics import Max, Mean, Metrics, Min


def group_advantages(rewards: np.ndarray, groups: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """float32 [B] advantages from `rewards` [B] and `groups` int [B] (equal for completions of one prompt, any order).

    `group_mean`: A = R - mean(R). `leave_one_out` (RLOO): A = R - mean of the others = G/(G-1) * (R - mean(R)).
    `group_std` divides by the group's sample standard deviation (n-1) plus eps. `leave_one_out_std` divides by the sample
    standard deviation of the other completions plus eps, and does not divide where that is 0 (as NeMo-RL does with a
    leave-one-out baseline). A group without spread gets exactly 0. Raises ValueError for a group of one, and with
    `leave_one_out_std` for a group of two, whose others have no standard deviation.
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
    if config.normalize == "leave_one_out_std" and sizes.min() < 3:
        raise ValueError(
            "a prompt has only two completions, so the standard deviation of the others is not defined;"
            " set grpo.num_generations_per_prompt to 3 or more, or grpo.advantage.normalize to group_std"
        )
    if config.baseline == "leave_one_out":
        centred = centred * (sizes / (sizes - 1))[member_of]
    if config.normalize == "group_std":
        centred = centred / (std + config.eps)[member_of]
    elif config.normalize == "leave_one_out_std":
        others_std = _std_of_others(rewards, means, std, sizes, member_of)
        centred = np.where(others_std > 0, centred / (others_std + config.eps), centred)
    return np.where(spread[member_of], centred, 0.0).astype(np.float32)


def _std_of_others(
    rewards: np.ndarray, means: np.ndarray, std: np.ndarray, sizes: np.ndarray, member_of: np.ndarray
) -> np.ndarray:
    """float64 [B]: sample standard deviation of the group's other rewards; exactly 0 where they are equal.

    The squared deviations of the others from their own mean are those of the group minus
    G / (G-1) * (R - mean(R))^2.
    """
    size = sizes[member_of]
    deviation = rewards - means[member_of]
    squares = (std**2 * (sizes - 1))[member_of] - size / (size - 1) * deviation**2
    variance = squares / (size - 2)
    # The subtraction leaves rounding errors of the larger numbers where the others are equal.
    scale = np.maximum(np.abs(means), std)[member_of]
    return np.where(variance > (1e-7 * scale) ** 2, np.sqrt(np.maximum(variance, 0.0)), 0.0)


def reward_metrics(rewards: np.ndarray, groups: np.ndarray, components: dict[str, np.ndarray]) -> Metrics:
    """Mean, spread and extremes of the reward, the mean of each named component, and groups without spread.

    A group without spread has equal rewards and does not train the policy. `reward/frac_groups_zero_std` is the share of
    such groups; `reward/frac_groups_all_worst` and `reward/frac_groups_all_best` the shares of groups whose rewards all
    equal the lowest or the highest reward of the batch. Where the whole batch has one reward, it is neither: both are 0.
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
        "reward/frac_groups_all_best": Mean(float((has_range & (flat >= best - 1e-8)).sum()), len(sizes)),
        "reward/frac_groups_all_worst": Mean(float((has_range & (flat <= worst + 1e-8)).sum()), len(sizes)),
        "reward/frac_groups_all_zero": Mean(float((np.abs(flat) <= 1e-8).sum()), len(sizes)),
    }
    for name, values in components.items():
        metrics[f"reward/{name}_mean"] = Mean(float(values.sum()), len(values))
    return metrics
