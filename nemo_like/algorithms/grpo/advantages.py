"""Advantages from the rewards of each prompt's completions; NumPy in float64 on the driver.

Sources: Shao et al. 2024 (GRPO); Liu et al. 2025 (Dr. GRPO); Ahmadian et al. 2024 (RLOO); Hu et al.
2025, arXiv 2501.03262 (REINFORCE++); arXiv 2601.05242 (GDPO); Yu et al. 2025, arXiv 2503.14476
(DAPO: the overlong penalty and filter).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from nemo_like.agents.credit import return_to_go
from nemo_like.algorithms.grpo.advantage_config import AdvantageConfig
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.selection import WEIGHT, step_weights
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.rollout.rows import Rollout, has_spread

EPS = 1e-6
"""Added to every standard deviation before the division."""
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
    * `batch_std` divides A by the standard deviation of all rewards plus eps, including
      groups that are too small.

    With a baseline, a group whose rewards are all equal gets exactly 0. Raises ValueError for a
    group of one with a baseline, and with `leave_one_out_std` for a group of two, whose others have
    no standard deviation.
    """
    if reward_mask is not None and not reward_mask.all():
        rows = _rows_of_large_groups(groups, reward_mask, config)
        advantages = np.zeros(len(rewards), dtype=np.float32)
        if len(rows) > 0:
            # The spread of the batch includes the rewards of groups that are too small.
            batch_std = float(rewards[reward_mask].astype(np.float64).std(ddof=1))
            advantages[rows] = _group_advantages(rewards[rows], groups[rows], config, batch_std)
        return advantages
    batch_std = float(rewards.astype(np.float64).std(ddof=1)) if len(rewards) > 1 else 0.0
    return _group_advantages(rewards, groups, config, batch_std)


def _group_advantages(
    rewards: np.ndarray, groups: np.ndarray, config: AdvantageConfig, batch_std: float
) -> np.ndarray:
    """Return `group_advantages` of rows that all have a reward."""
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
        centred = centred / (std + EPS)[group_of_row]
    elif config.normalize == "leave_one_out_std":
        others_std = _std_of_others(rewards, means, std, sizes, group_of_row)
        centred = np.where(others_std > 0, centred / (others_std + EPS), centred)
    elif config.normalize == "batch_std":
        centred = centred / (batch_std + EPS)
    return np.where(is_spread[group_of_row], centred, 0.0).astype(np.float32)


def separate_advantages(
    components: Mapping[str, np.ndarray],
    weights: Mapping[str, float],
    groups: np.ndarray,
    config: AdvantageConfig,
    reward_mask: np.ndarray | None = None,
) -> np.ndarray:
    """Return sum_k w_k A_k, float32 [B], the advantage of GDPO before whitening.

    `components` are the unweighted values of each part of the reward, float [B] by name, NaN in
    rows to which it does not apply;
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
        # NaN: the component does not apply to the row, whatever the others are.
        is_valued = ~np.isnan(values)
        if reward_mask is not None:
            is_valued &= reward_mask
        advantages = group_advantages(values, groups, config, is_valued)
        total += weights[name] * advantages.astype(np.float64)
    return total.astype(np.float32)


def whitened(values: np.ndarray, weights: np.ndarray, eps: float) -> np.ndarray:
    """Return (values - mean) / (std + eps), float32 [N], from float `values` [N].

    Mean and population standard deviation count each value `weights` times (float [N],
    at least 0): 1 for a trained token and 0 for another, or the number of trained tokens
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


def turn_advantages(rollout: Rollout, discount: float) -> np.ndarray:
    """Return the advantage of the turn of each token, float64 [T] over the tokens of the rows.

    See `return_to_go`. It is 0 on tokens that were not sampled, and in episodes without a reward or
    without others in their group. Episodes with equal rewards in all turns get exactly 0.
    """
    batch = rollout.batch
    first_rows = rollout.first_rows
    groups = batch["group"][first_rows]
    mask = batch["reward_mask"][first_rows]
    episodes = _rows_of_large_groups(groups, mask, AdvantageConfig(baseline="leave_one_out"))
    rewards = [rollout.turn_rewards(int(first_rows[each])) for each in episodes]
    returns = return_to_go(rewards, groups[episodes], discount)
    found = dict(zip(episodes.tolist(), returns, strict=True))
    values = np.zeros(len(batch["input_ids"].values))
    stop = 0
    for row, episode in zip(rollout.conversations, rollout.episodes.tolist(), strict=True):
        turns = range(row.num_turns) if row.calls is None else row.calls
        for index, segment in enumerate(row.segments):
            start, stop = stop, stop + len(segment)
            if index % 2 and episode in found:
                values[start:stop] = found[episode][turns[index // 2]]
    return values


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
    squared deviations of the others from their own mean equal the group's minus
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


def overlong_penalty(
    lengths: np.ndarray, max_length: int, buffer: int, factor: float
) -> np.ndarray:
    """Return the term that is added to each reward, float64 [B], from 0 down to -factor.

    `lengths` int [B] are the tokens T of the completions. The term is 0 for T <= max_length -
    buffer, factor * (max_length - buffer - T) / buffer up to max_length, and -factor beyond it.
    `buffer` 0 turns the penalty off.
    """
    if buffer == 0:
        return np.zeros(len(lengths))
    excess = lengths - (max_length - buffer)
    return -factor * np.clip(excess / buffer, 0.0, 1.0)


def is_truncated(rollout: Rollout) -> np.ndarray:
    """Return True for completions and conversations that reached a token limit, bool [B]."""
    return rollout.finish_reasons == "length"


def without_truncated(rollout: Rollout) -> Rollout:
    """Return the rollout with no loss for completions that reached the length limit.

    Their `row_mask` is False; rewards are unchanged, so they stay in the baseline of their group.
    """
    row_mask = rollout.batch["row_mask"] & ~is_truncated(rollout)
    return replace(rollout, batch=BatchedDataDict({**rollout.batch, "row_mask": row_mask}))


_PENALTY = "overlong_penalty"
"""Name of the soft overlong penalty among the components of the reward."""


@dataclass(frozen=True)
class RolloutAdvantages:
    """Advantages of the B rows of a rollout."""

    column: np.ndarray | Jagged
    """What the loss reads: float32 [B] per row, or Jagged [T] per token with a KL in the reward or
    advantages of turns."""
    rows: np.ndarray
    """float32 [B]: of each row the mean over its trained tokens."""
    metrics: Metrics


def rollout_advantages(
    config: GrpoRunConfig, rollout: Rollout, logprobs: Mapping[str, Jagged]
) -> RolloutAdvantages:
    """Return the advantages of a rollout.

    With R the weighted sum of reward functions and models plus the soft overlong penalty: baseline
    and division of R per group give A (`group_advantages`; per component `separate_advantages`).
    With `loss_fn.reference_policy_kl_in` `reward` the advantage of token t is
    A_t = A - penalty * sum over s >= t of KL_s, where KL_s is the k1 estimate l_prev - l_ref from
    `logprobs` (float32 [T] each by name) and has no gradient. This is the reward-to-go of
    REINFORCE++ without discount: its token reward is R at the last token minus penalty * KL_t at
    every token. With `grpo.advantage.turns` A is that of the turn of the token (`turn_advantages`).
    After that follow whitening, for which only trained tokens and rows count, and the weights of
    the prompts with `grpo.prompt_selection.importance_weights` (`step_weights`).
    """
    batch = rollout.batch
    metrics: Metrics = {}
    advantages = _row_advantages(config, rollout, metrics)
    trained = trained_tokens(batch)
    row_of_token = np.repeat(np.arange(batch.size), batch["length"])
    num_trained = np.bincount(row_of_token, weights=trained, minlength=batch.size)
    advantage = config.grpo.advantage
    if not config.has_kl_in_reward and advantage.turns == "none":
        if advantage.whiten == "tokens":
            advantages = whitened(advantages, num_trained, EPS)
        elif advantage.whiten == "rows":
            # Every episode once.
            weights = np.zeros(batch.size)
            num_per_episode = np.bincount(rollout.episodes, weights=num_trained)
            weights[rollout.first_rows] = num_per_episode > 0
            advantages = whitened(advantages, weights, EPS)
        if WEIGHT in batch:
            weights = step_weights(batch[WEIGHT], batch["row_mask"])
            advantages = (advantages * weights).astype(np.float32)
        is_effective = (advantages != 0) & (num_trained > 0)
        metrics["reward/num_effective_rows"] = Sum(float(is_effective.sum()))
        return RolloutAdvantages(advantages, advantages, metrics)
    if advantage.turns == "none":
        per_token = np.repeat(advantages.astype(np.float64), batch["length"])
    else:
        per_token = turn_advantages(rollout, advantage.turn_discount)
    if config.has_kl_in_reward:
        k1, kl_sums = kl_to_go(_policy_logprobs(batch, logprobs), _reference(logprobs), trained)
        metrics["policy/reference_kl_k1"] = Mean(float(k1.sum()), float(trained.sum()))
        per_token -= config.loss_fn.reference_policy_kl_penalty * kl_sums
    if advantage.whiten == "tokens":
        per_token = whitened(per_token, trained.astype(np.float64), EPS)
    if WEIGHT in batch:
        per_token = per_token * step_weights(batch[WEIGHT], batch["row_mask"])[row_of_token]
    per_token = np.where(trained, per_token, 0.0).astype(np.float32)
    row_sums = np.bincount(row_of_token, weights=per_token, minlength=batch.size)
    row_means = row_sums / np.maximum(num_trained, 1.0)
    num_nonzero = np.bincount(row_of_token, weights=per_token != 0, minlength=batch.size)
    metrics["reward/num_effective_rows"] = Sum(float((num_nonzero > 0).sum()))
    column = Jagged(per_token, batch["input_ids"].offsets)
    return RolloutAdvantages(column, row_means.astype(np.float32), metrics)


def trained_tokens(batch: BatchedDataDict) -> np.ndarray:
    """Return True for the tokens of the rows of `batch` that have a loss, bool [T]."""
    is_row_trained = np.repeat(batch["row_mask"], batch["length"])
    return (batch["token_mask"].values != 0) & is_row_trained


def _row_advantages(config: GrpoRunConfig, rollout: Rollout, metrics: Metrics) -> np.ndarray:
    """Return the advantage of each row before whitening, float32 [B]; adds to `metrics`."""
    overlong = config.grpo.overlong
    completion_lengths = rollout.completion_lengths
    penalty = overlong_penalty(
        completion_lengths,
        config.policy.generation.max_new_tokens,
        overlong.penalty_buffer,
        overlong.penalty_factor,
    )
    if overlong.penalty_buffer > 0:
        metrics["reward/overlong_penalty_mean"] = Mean(float(penalty.sum()), len(penalty))
    if overlong.filter:
        num_filtered = float(is_truncated(rollout).sum())
        metrics["reward/num_overlong_filtered"] = Sum(num_filtered)
    # The rows of an episode have one reward, which counts once.
    first_rows = rollout.first_rows
    repeated = rollout.episodes
    groups = rollout.batch["group"][first_rows]
    reward_mask = rollout.batch["reward_mask"][first_rows]
    if config.grpo.advantage.components == "sum":
        rewards = (rollout.batch["reward"].astype(np.float64) + penalty)[first_rows]
        return group_advantages(rewards, groups, config.grpo.advantage, reward_mask)[repeated]
    components = {name: values[first_rows] for name, values in rollout.components.items()}
    # The rewards of an environment are added as they are.
    weights = dict.fromkeys(components, 1.0) | config.reward.weights
    if overlong.penalty_buffer > 0:
        components[_PENALTY] = penalty[first_rows]
        weights[_PENALTY] = 1.0
    advantages = separate_advantages(
        components, weights, groups, config.grpo.advantage, reward_mask
    )
    return advantages[repeated]


def _policy_logprobs(batch: BatchedDataDict, logprobs: Mapping[str, Jagged]) -> Jagged:
    """Return the log-probs of the policy that sampled the tokens, float32 [T].

    The loss takes them as previous log-probs: with
    `loss_fn.importance_correction.kind=bypass` the generator's.
    """
    return logprobs.get("prev_logprobs", batch["generation_logprobs"])


def _reference(logprobs: Mapping[str, Jagged]) -> Jagged:
    """Return the reference's log-probs, float32 [T]."""
    return logprobs["reference_logprobs"]
