"""Metrics of rollouts: rewards, lengths, conversations, and validation answers with pass@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from nemo_like.environments.reward import BadRewardKind, RewardProblem
from nemo_like.metrics import Max, Mean, Metrics, Min, Sum
from nemo_like.rollout.conversations import ConversationRow
from nemo_like.rollout.intervals import PromptMeans
from nemo_like.rollout.rows import Rollout

_TOLERANCE = 1e-8
"""Rewards that differ by less count as equal."""
_ROUNDING = 1e-6
"""A reward that is lower by this still counts as correct: float32 sums are not exact."""


def rollout_metrics(rollout: Rollout) -> Metrics:
    """Return metrics of rewards, lengths, and completions that reached the length limit."""
    lengths = rollout.completions.token_ids.lengths
    is_stopped = np.array(rollout.completions.finish_reasons) == "stop"
    prompt_lengths = rollout.batch["length"] - lengths
    if rollout.conversations is not None:
        prompt_lengths = np.array([len(each.segments[0]) for each in rollout.conversations])
    mask = rollout.batch["reward_mask"]
    metrics = problem_metrics(rollout.reward_problems, mask)
    if mask.any():
        metrics |= reward_metrics(
            rollout.batch["reward"][mask],
            rollout.batch["group"][mask],
            {name: values[mask] for name, values in rollout.components.items()},
        )
    metrics |= {
        "generation/completion_length_mean": _mean(lengths),
        "generation/completion_length_max": Max(float(lengths.max())),
        "generation/completion_length_min": Min(float(lengths.min())),
        "generation/completion_length_p90": Max(float(np.quantile(lengths, 0.9))),
        # Without the completions that reached the limit, whose length is the limit.
        "generation/completion_length_stopped_mean": _mean(lengths[is_stopped]),
        "generation/truncated_share": _mean(~is_stopped),
        "generation/prompt_length_mean": _mean(prompt_lengths),
        "generation/num_tokens": Sum(float(lengths.sum())),
    }
    if rollout.conversations is not None:
        metrics |= conversation_metrics(rollout.conversations)
    return metrics


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


def problem_metrics(problems: Sequence[RewardProblem | None], mask: np.ndarray) -> Metrics:
    """Return the numbers of failed completions, in all and by kind, and of the rows left out.

    `mask` bool [B] is False for rows that are left out.
    """
    kinds = Counter(problem.kind for problem in problems if problem is not None)
    metrics: Metrics = {
        "reward/num_errors": Sum(float(kinds.total())),
        "reward/num_dropped": Sum(float((~mask).sum())),
    }
    for kind in get_args(BadRewardKind):
        metrics[f"reward/num_errors_{kind}"] = Sum(float(kinds[kind]))
    return metrics


def conversation_metrics(conversations: Sequence[ConversationRow]) -> Metrics:
    """Return turns, observations, time and reasons of the ends of B conversations.

    Metrics of the environment are `environment/<name>`, averaged over the conversations.
    """
    turns = np.array([conversation.num_turns for conversation in conversations])
    # Segments alternate: prompt, turn, observation, turn, ...
    observed = np.array([sum(map(len, each.segments[2::2])) for each in conversations])
    seconds = np.array([conversation.step_s for conversation in conversations])
    reasons = np.array([str(conversation.ended_by) for conversation in conversations])
    metrics: Metrics = {
        "conversation/turns_mean": _mean(turns),
        "conversation/turns_max": Max(float(turns.max(initial=0))),
        "conversation/observation_tokens_mean": _mean(observed),
        "conversation/step_s_mean": _mean(seconds),
        "conversation/step_s_max": Max(float(seconds.max(initial=0.0))),
        "conversation/ended_by_environment_share": _mean(reasons == "done"),
        "conversation/ended_by_turns_share": _mean(reasons == "turns"),
        "conversation/ended_by_tokens_share": _mean(reasons == "tokens"),
        "conversation/ended_by_timeout_share": _mean(reasons == "timeout"),
    }
    names = {name for conversation in conversations for name in conversation.metrics}
    for name in sorted(names):
        total = sum(conversation.metrics.get(name, 0.0) for conversation in conversations)
        metrics[f"environment/{name}"] = Mean(total, len(conversations))
    return metrics


def answer_metrics(
    rollout: Rollout, rows: np.ndarray, *, num_samples: int, pass_reward: float
) -> Metrics:
    """Return the means over `rows` (int64 [n], prompt-major) of reward, components and lengths.

    With several samples per prompt also avg@n and pass@k, where an answer with a reward of at least
    `pass_reward` is correct. A row without a reward (`row_mask` False) counts in none of the means
    of rewards, and as not correct; without rewards there are no such means.
    """
    batch = rollout.batch
    is_scored = np.asarray(batch["row_mask"], dtype=bool)[rows]
    rewards = batch["reward"][rows]
    lengths = rollout.completions.token_ids.lengths[rows]
    is_truncated = np.array(rollout.completions.finish_reasons)[rows] != "stop"
    metrics: Metrics = {
        "generation_completion_length_mean": _mean(lengths),
        "generation_truncated_share": _mean(is_truncated),
    }
    # Without rewards there are no means of them: 0 would be taken for a result.
    if is_scored.any():
        metrics["reward_mean"] = _mean(rewards[is_scored])
        # The value of each function, because the weights of the sum are a choice of the run.
        for name, values in rollout.components.items():
            metrics[f"{name}_mean"] = _mean(values[rows][is_scored])
    if num_samples > 1:
        is_correct = is_scored & (rewards >= pass_reward - _ROUNDING)
        metrics |= pass_metrics(is_correct, num_samples)
    return metrics


@dataclass(frozen=True, kw_only=True)
class ScoredAnswers:
    """n answers to each of P prompts, [P, n] each."""

    rewards: np.ndarray
    """float64; 0 for an answer without a reward."""
    is_scored: np.ndarray
    """bool: False for an answer without a reward."""
    lengths: np.ndarray
    """int64: tokens."""
    is_truncated: np.ndarray
    """bool: the answer reached the limit on tokens."""
    components: Mapping[str, np.ndarray]
    """float64 each: values of the reward functions, by name."""

    def take(self, prompts: np.ndarray) -> ScoredAnswers:
        """Return the answers to some prompts, int64 [p]."""
        return ScoredAnswers(
            rewards=self.rewards[prompts],
            is_scored=self.is_scored[prompts],
            lengths=self.lengths[prompts],
            is_truncated=self.is_truncated[prompts],
            components={name: values[prompts] for name, values in self.components.items()},
        )


def answer_means(answers: ScoredAnswers, *, pass_reward: float) -> dict[str, PromptMeans]:
    """Return the means of `answer_metrics` by prompt, of which intervals can be computed.

    avg@n and pass@k are there for any number of samples; with one they are the share of correct
    answers.
    """
    num_prompts, num_samples = answers.rewards.shape
    ones = np.ones(num_prompts)
    is_scored = answers.is_scored
    scored = is_scored.sum(axis=1).astype(np.float64)
    means: dict[str, PromptMeans] = {}
    if is_scored.any():
        rewards = np.where(is_scored, answers.rewards, 0.0)
        means["reward_mean"] = PromptMeans(totals=rewards.sum(axis=1), weights=scored)
        for name, values in answers.components.items():
            totals = np.where(is_scored, values, 0.0).sum(axis=1)
            means[f"{name}_mean"] = PromptMeans(totals=totals, weights=scored)
        is_correct = is_scored & (answers.rewards >= pass_reward - _ROUNDING)
        num_correct = is_correct.sum(axis=1)
        share = num_correct / num_samples
        means[f"avg_at_{num_samples}"] = PromptMeans(totals=share, weights=ones, is_share=True)
        for k in powers_of_two(num_samples):
            totals = pass_at_k(num_samples, num_correct, k)
            means[f"pass_at_{k}"] = PromptMeans(totals=totals, weights=ones, is_share=True)
    means["generation_completion_length_mean"] = PromptMeans(
        totals=answers.lengths.mean(axis=1), weights=ones
    )
    means["generation_truncated_share"] = PromptMeans(
        totals=answers.is_truncated.mean(axis=1), weights=ones, is_share=True
    )
    return means


def pass_at_k(num_samples: int, num_correct: np.ndarray, k: int) -> np.ndarray:
    """Return the probability that k of the samples of a prompt have a correct one, float64 [P].

    `num_correct` is int [P], of `num_samples` samples each. With n samples of which c are correct
    it is 1 - C(n - c, k) / C(n, k): the mean over all subsets of k samples, and an unbiased
    estimate of the probability that k new samples have a correct one. Raises ValueError for k
    outside 1 to n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k is {k}; pass@k of {num_samples} samples needs k from 1 to that number")
    # C(n - c, k) / C(n, k) is the product of (n - c - i) / (n - i) over i < k; a factor is 0 where
    # fewer than k samples are wrong.
    fail = np.ones(len(num_correct))
    for i in range(k):
        wrong_left = np.maximum(num_samples - num_correct - i, 0)
        fail *= wrong_left / (num_samples - i)
    return 1.0 - fail


def powers_of_two(largest: int) -> list[int]:
    """Return 1, 2, 4, ... up to `largest`."""
    powers = [1]
    while powers[-1] * 2 <= largest:
        powers.append(powers[-1] * 2)
    return powers


def pass_metrics(is_correct: np.ndarray, num_samples: int) -> Metrics:
    """Return `avg_at_<n>`, and `pass_at_<k>` for each power of two k up to n = `num_samples`.

    `is_correct` is bool [P x n], prompt-major. avg@n is the share of correct samples, the mean of
    pass@1. All are means over prompts.
    """
    num_correct = is_correct.reshape(-1, num_samples).sum(axis=1)
    num_prompts = len(num_correct)
    share = float(num_correct.sum()) / num_samples
    metrics: Metrics = {f"avg_at_{num_samples}": Mean(share, num_prompts)}
    for k in powers_of_two(num_samples):
        values = pass_at_k(num_samples, num_correct, k)
        metrics[f"pass_at_{k}"] = Mean(float(values.sum()), num_prompts)
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
