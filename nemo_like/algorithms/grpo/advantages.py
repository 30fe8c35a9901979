"""Advantages from the rewards of each prompt's completions; NumPy on the driver."""

from __future__ import annotations

import numpy as np

from nemo_like.algorithms.grpo.config import AdvantageConfig


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    config: AdvantageConfig,
    reward_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Return advantages, float32 [B], from `rewards` [B] and `groups` int [B].

    `reward_mask` bool [B] is False for rows without a reward: their advantage is 0, and they are no
    part of their group. The rest of a group that has too few rows then has the advantage 0.

    `groups` is equal for the G completions of one prompt, in any order. With the reward R of a
    completion and the mean and the sample standard deviation (n - 1) of its group:

    * `group_mean`: A = R - mean(R).
    * `leave_one_out` (RLOO, Ahmadian et al. 2024): A = R - mean of the others
      = G / (G - 1) * (R - mean(R)).
    * `group_std` divides A by the standard deviation plus eps.
    * `leave_one_out_std` divides A by the standard deviation of the other completions plus eps, and
      does not divide where that is 0 (as NeMo RL does with a leave-one-out baseline).

    A group whose rewards are all equal gets exactly 0. Raises ValueError for a group of one, and
    with `leave_one_out_std` for a group of two, whose others have no standard deviation.
    """
    if reward_mask is not None and not reward_mask.all():
        rows = _rows_of_large_groups(groups, reward_mask, config)
        advantages = np.zeros(len(rewards), dtype=np.float32)
        advantages[rows] = group_advantages(rewards[rows], groups[rows], config)
        return advantages
    if len(rewards) == 0:
        return np.zeros(0, dtype=np.float32)
    rewards = rewards.astype(np.float64)
    _, group_of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    _check_sizes(sizes, config)
    means = np.bincount(group_of_row, weights=rewards) / sizes
    centred = rewards - means[group_of_row]
    sums_of_squares = np.bincount(group_of_row, weights=centred**2)
    std = np.sqrt(sums_of_squares / (sizes - 1))
    # Relative to the mean: equal rewards can differ from their computed mean by a rounding error.
    has_spread = std > 1e-8 * np.maximum(1.0, np.abs(means))
    if config.baseline == "leave_one_out":
        centred = centred * (sizes / (sizes - 1))[group_of_row]
    if config.normalize == "group_std":
        centred = centred / (std + config.eps)[group_of_row]
    elif config.normalize == "leave_one_out_std":
        others_std = _std_of_others(rewards, means, std, sizes, group_of_row)
        centred = np.where(
            others_std > 0,
            centred / (others_std + config.eps),
            centred,
        )
    return np.where(has_spread[group_of_row], centred, 0.0).astype(np.float32)


def _rows_of_large_groups(
    groups: np.ndarray,
    reward_mask: np.ndarray,
    config: AdvantageConfig,
) -> np.ndarray:
    """Return the rows with a reward whose groups have enough of them, int64 [n].

    `groups` is int [B], `reward_mask` bool [B].
    """
    _, group_of_row = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group_of_row, weights=reward_mask)
    min_size = 3 if config.normalize == "leave_one_out_std" else 2
    return np.flatnonzero(reward_mask & (sizes[group_of_row] >= min_size))


def _check_sizes(sizes: np.ndarray, config: AdvantageConfig) -> None:
    """Raise ValueError for a group that is too small; `sizes` is int [number of groups]."""
    if sizes.min() < 2:
        raise ValueError(
            "a prompt has only one completion, so its advantage would always be 0;"
            " set grpo.num_generations_per_prompt to 2 or more"
        )
    if config.normalize == "leave_one_out_std" and sizes.min() < 3:
        raise ValueError(
            "a prompt has only two completions, so the standard deviation of the others is not"
            " defined; set grpo.num_generations_per_prompt to 3 or more, or"
            " grpo.advantage.normalize to group_std"
        )


def _std_of_others(
    rewards: np.ndarray,
    means: np.ndarray,
    std: np.ndarray,
    sizes: np.ndarray,
    group_of_row: np.ndarray,
) -> np.ndarray:
    """Return the sample standard deviation of the group's other rewards, float64 [B].

    `rewards` and `group_of_row` are [B]; `means`, `std` and `sizes` have one entry per group. The
    squared deviations of the others from their own mean are those of the group minus
    G / (G-1) * (R - mean(R))^2. The result is exactly 0 where the others are equal.
    """
    size = sizes[group_of_row]
    deviation = rewards - means[group_of_row]
    group_squares = (std**2 * (sizes - 1))[group_of_row]
    squares = group_squares - size / (size - 1) * deviation**2
    variance = squares / (size - 2)
    # The subtraction leaves rounding errors of the larger numbers where the others are equal.
    scale = np.maximum(np.abs(means), std)[group_of_row]
    is_positive = variance > (1e-7 * scale) ** 2
    return np.where(is_positive, np.sqrt(np.maximum(variance, 0.0)), 0.0)
