"""Advantages from the rewards of each prompt's completions; NumPy in float64 on the driver.

Sources: Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr. GRPO); Ahmadian et al. 2024 (RLOO); Hu et al.
2025, arXiv 2501.03262 (REINFORCE++); arXiv 2601.05242 (GDPO).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nemo_like.algorithms.grpo.advantage_config import AdvantageConfig
from nemo_like.data.jagged import Jagged

_MAX_KL = 20.0
"""Limit of the magnitude of a token's log-prob difference in `kl_to_go`."""


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
    * `none`: A = R, for groups of any size.
    * `group_std` divides A by the standard deviation plus eps.
    * `leave_one_out_std` divides A by the standard deviation of the other completions plus eps, and
      does not divide where that is 0 (as NeMo RL does with a leave-one-out baseline).
    * `batch_std` divides A by the standard deviation of all B rewards plus eps.

    With a baseline, a group whose rewards are all equal gets exactly 0. Raises ValueError for a
    group of one with a baseline, and with `leave_one_out_std` for a group of two, whose others have
    no standard deviation.
    """
    if reward_mask is not None and not reward_mask.all():
        rows = _rows_of_large_groups(groups, reward_mask, config)
        advantages = np.zeros(len(rewards), dtype=np.float32)
        advantages[rows] = group_advantages(rewards[rows], groups[rows], config)
        return advantages
    if len(rewards) == 0:
        return np.zeros(0, dtype=np.float32)
    rewards = rewards.astype(np.float64)
    if config.baseline == "none":
        return rewards.astype(np.float32)
    _, group_of_row, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    _check_sizes(sizes, config)
    means = np.bincount(group_of_row, weights=rewards) / sizes
    centred = rewards - means[group_of_row]
    sums_of_squares = np.bincount(group_of_row, weights=centred**2)
    std = np.sqrt(sums_of_squares / (sizes - 1))
    is_spread = has_spread(std, means)
    if config.baseline == "leave_one_out":
        centred = centred * (sizes / (sizes - 1))[group_of_row]
    if config.normalize == "group_std":
        centred = centred / (std + config.eps)[group_of_row]
    elif config.normalize == "leave_one_out_std":
        others_std = _std_of_others(rewards, means, std, sizes, group_of_row)
        centred = np.where(others_std > 0, centred / (others_std + config.eps), centred)
    elif config.normalize == "batch_std":
        centred = centred / (rewards.std(ddof=1) + config.eps)
    return np.where(is_spread[group_of_row], centred, 0.0).astype(np.float32)


def separate_advantages(
    components: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    groups: np.ndarray,
    config: AdvantageConfig,
    reward_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Return sum_k w_k A_k, float32 [B], the advantage of GDPO before whitening.

    `components` are the unweighted values of each part of the reward, float [B] by name;
    `groups` int [B] and `reward_mask` bool [B] are as in `group_advantages`, which computes A_k
    from component k alone. `weights` are the w_k. Raises ValueError for a component without one.
    """
    missing = sorted(set(components) - set(weights))
    if missing:
        raise ValueError(
            f"the parts {', '.join(missing)} of the reward have no weight, which"
            " grpo.advantage.components=separate needs; set grpo.advantage.components to sum"
        )
    total = np.zeros(len(groups))
    for name, values in components.items():
        advantages = group_advantages(values, groups, config, reward_mask)
        total += weights[name] * advantages.astype(np.float64)
    return total.astype(np.float32)


def whitened(values: np.ndarray, weights: np.ndarray, eps: float) -> np.ndarray:
    """Return (values - mean) / (std + eps), float32 [N], from float `values` [N].

    Mean and population standard deviation are those of values that occur `weights` (float [N],
    at least 0) times each: 1 for a trained token and 0 for another, or the number of trained tokens
    of a row. Values without spread become exactly 0.
    """
    values = values.astype(np.float64)
    count = weights.sum()
    if count == 0:
        return np.zeros(len(values), dtype=np.float32)
    mean = (weights * values).sum() / count
    centred = values - mean
    std = np.sqrt((weights * centred**2).sum() / count)
    if not has_spread(std, mean):
        return np.zeros(len(values), dtype=np.float32)
    return (centred / (std + eps)).astype(np.float32)


def kl_to_go(
    policy_logprobs: Jagged, reference_logprobs: Jagged, trained: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k1 estimate of each token and its sum from the token to the end of the row.

    Both are float64 [T] over the tokens of the rows, from the log-probs of the policy that sampled
    the rows and of the reference, float32 [T] each, and `trained` bool [T]. With d = l_ref - l,
    limited to [-20, 20], the first is k1_t = -d_t, and 0 where a token is not trained or d_t is NaN
    (a sampler's log-prob may be, and the loss gives such a token no weight); the second is sum over
    s >= t of k1_s in the row of token t.
    """
    difference = policy_logprobs.values.astype(np.float64) - reference_logprobs.values
    is_measured = trained & ~np.isnan(difference)
    k1 = np.where(is_measured, difference.clip(-_MAX_KL, _MAX_KL), 0.0)
    before = np.concatenate([[0.0], np.cumsum(k1)])
    # The sum up to the end of the row, minus that before the token.
    row_end = np.repeat(before[policy_logprobs.offsets[1:]], policy_logprobs.lengths)
    return k1, row_end - before[:-1]


def token_advantages(
    advantages: np.ndarray, kl_sums: np.ndarray | None, *, kl_penalty: float, lengths: np.ndarray
) -> np.ndarray:
    """Return the advantage of each token, float64 [T]: A_t = A - penalty * sum over s >= t of KL_s.

    `advantages` float [B] are those of the rows, `lengths` int [B] their tokens, and `kl_sums`
    float64 [T] the second result of `kl_to_go`, None for no penalty. This is the reward-to-go of
    REINFORCE++ without discount: its token reward is R at the last token minus penalty * KL_t at
    every token. A baseline or a division by a standard deviation applies to R only.
    """
    values = np.repeat(advantages.astype(np.float64), lengths)
    if kl_sums is None:
        return values
    return values - kl_penalty * kl_sums


def has_spread(std: np.ndarray | float, mean: np.ndarray | float) -> np.ndarray:
    """Return True where values of this standard deviation and mean, [...] each, are not all equal.

    Equal values can differ from their computed mean by a rounding error.
    """
    return np.asarray(std > 1e-8 * np.maximum(1.0, np.abs(mean)))


def _rows_of_large_groups(
    groups: np.ndarray, reward_mask: np.ndarray, config: AdvantageConfig
) -> np.ndarray:
    """Return the rows with a reward whose groups have enough of them, int64 [n].

    `groups` is int [B], `reward_mask` bool [B].
    """
    _, group_of_row = np.unique(groups, return_inverse=True)
    sizes = np.bincount(group_of_row, weights=reward_mask)
    min_size = 2
    if config.baseline == "none":
        min_size = 1
    elif config.normalize == "leave_one_out_std":
        min_size = 3
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
