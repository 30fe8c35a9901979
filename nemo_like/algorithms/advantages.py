"""Rewards of a prompt's group of completions become advantages. NumPy on the driver; nothing here
is large.
"""

from __future__ import annotations

import numpy as np

from nemo_like.config.schema import AdvantageConfig


def group_advantages(
    rewards: np.ndarray, groups: np.ndarray, config: AdvantageConfig
) -> np.ndarray:
    """float32 [B] advantages from `rewards` [B] and `groups` int [B] (equal for completions of one
    prompt, any order).

    `group_mean`: A = R - mean(R). `leave_one_out` (RLOO): A = R - mean of the others = G/(G-1) * (R
    - mean(R)). `group_std` divides by the group's sample standard deviation (n-1) plus eps.
    `leave_one_out_std` divides by the sample standard deviation of the other completions plus eps,
    and does not divide where that is 0 (as NeMo-RL does with a leave-one-out baseline). A group
    without spread gets exactly 0. Raises ValueError for a group of one, and with
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
            "a prompt has only two completions, so the standard deviation of the others is not"
            " defined;"
            " set grpo.num_generations_per_prompt to 3 or more, or grpo.advantage.normalize to"
            " group_std"
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
    rewards: np.ndarray,
    means: np.ndarray,
    std: np.ndarray,
    sizes: np.ndarray,
    member_of: np.ndarray,
) -> np.ndarray:
    """float64 [B]: sample standard deviation of the group's other rewards; exactly 0 where they are
    equal.

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
