"""Completions that reach the length limit: their soft penalty, and their removal from the loss.

Source: Yu et al. 2025, arXiv 2503.14476 (DAPO).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.rollout.rollout import Rollout


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
    return np.array(rollout.completions.finish_reasons) == "length"


def without_truncated(rollout: Rollout) -> Rollout:
    """Return the rollout with no loss for completions that reached the length limit.

    Their `row_mask` is False; rewards are unchanged, so they stay in the baseline of their group.
    """
    row_mask = rollout.batch["row_mask"] & ~is_truncated(rollout)
    return replace(rollout, batch=BatchedDataDict({**rollout.batch, "row_mask": row_mask}))
