"""Metrics of generated validation answers, of all or of some rows of a rollout."""

from __future__ import annotations

import numpy as np

from nemo_like.metrics import Mean, Metrics
from nemo_like.rollout.pass_at_k import pass_metrics
from nemo_like.rollout.rollout import Rollout

_ROUNDING = 1e-6
"""A reward that is lower by this still counts as correct: float32 sums are not exact."""


def answer_metrics(
    rollout: Rollout,
    rows: np.ndarray,
    *,
    num_samples: int,
    pass_reward: float,
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
