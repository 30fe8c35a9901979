"""Metrics of generated validation answers, of all or of some rows of a rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nemo_like.metrics import Mean, Metrics
from nemo_like.rollout.intervals import PromptMeans
from nemo_like.rollout.pass_at_k import pass_at_k, pass_metrics, powers_of_two
from nemo_like.rollout.rollout import Rollout

_ROUNDING = 1e-6
"""A reward that is lower by this still counts as correct: float32 sums are not exact."""


def answer_metrics(
    rollout: Rollout, rows: np.ndarray, *, num_samples: int, pass_reward: float
) -> Metrics:
    """Return the means over `rows` (int64 [n], prompt-major) of reward, components and lengths.

    With several samples per prompt also avg@n and pass@k, where an answer with a reward of at least
    `pass_reward` is correct. A row without a reward (`row_mask` False) counts in none of the means
    of rewards, and as not correct; if no row has one, there are no means of rewards.
    """
    batch = rollout.batch
    is_scored = np.asarray(batch["row_mask"], dtype=bool)[rows]
    rewards = batch["reward"][rows]
    lengths = rollout.completions.token_ids.lengths[rows]
    is_truncated = np.array(rollout.completions.finish_reasons)[rows] != "stop"
    num_rows = len(rows)
    metrics: Metrics = {
        "generation_completion_length_mean": Mean(float(lengths.sum()), num_rows),
        "generation_truncated_share": Mean(float(is_truncated.sum()), num_rows),
    }
    # Without rewards there are no means of them: 0 would be taken for a result.
    if is_scored.any():
        metrics["reward_mean"] = _mean(rewards, is_scored)
        # The value of each function, because the weights of the sum are a choice of the run.
        for name, values in rollout.components.items():
            metrics[f"{name}_mean"] = _mean(values[rows], is_scored)
    if num_samples > 1:
        is_correct = is_scored & (rewards >= pass_reward - _ROUNDING)
        metrics |= pass_metrics(is_correct, num_samples)
    return metrics


def _mean(values: np.ndarray, mask: np.ndarray) -> Mean:
    """Return the mean of `values` [n] where `mask` bool [n] is True."""
    return Mean(float(values[mask].sum()), float(mask.sum()))


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
