"""Version gaps of completion tokens, and metrics of validation answers."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.generation.requests import Completions, FinishReason
from nemo_like.metrics import metric_values
from nemo_like.rollout.answers import answer_metrics
from nemo_like.rollout.rows import Rollout


def rollout_of(versions: list[list[int]]) -> Rollout:
    """Rows of two prompt tokens and a completion token for each version."""
    reasons: list[FinishReason] = ["stop"] * len(versions)
    completions = Completions.from_rows(
        [[5] * len(row) for row in versions],
        [[-1.0] * len(row) for row in versions],
        versions,
        reasons,
    )
    masks = [[0, 0] + [1] * len(row) for row in versions]
    token_mask = Jagged.from_rows(masks, np.uint8)
    input_ids = Jagged(np.full(len(token_mask.values), 5, dtype=np.int32), token_mask.offsets)
    batch = BatchedDataDict(input_ids=input_ids, token_mask=token_mask)
    return Rollout(batch, [], {}, completions)


def test_a_gap_is_the_number_of_updates_since_the_token_was_sampled() -> None:
    gaps = rollout_of([[3, 4], [2]]).version_gaps(4)
    assert [row.tolist() for row in gaps] == [[0, 0, 1, 0], [0, 0, 2]]
    assert gaps.values.dtype == np.float32


def test_a_token_of_later_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="version_gap has the value -1"):
        rollout_of([[3, 5]]).version_gaps(4)


def test_answers_without_rewards_have_no_mean_reward() -> None:
    rollout = rollout_of([[3, 3], [3], [3]])
    rollout.components["answer"] = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    rollout.batch["reward"] = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    rollout.batch["row_mask"] = np.array([True, True, False])
    rows = np.arange(3)
    values = metric_values(answer_metrics(rollout, rows, num_samples=1, pass_reward=1.0))
    assert (values["reward_mean"], values["answer_mean"]) == (0.5, 0.5)
    dropped = metric_values(answer_metrics(rollout, rows[2:], num_samples=1, pass_reward=1.0))
    assert set(dropped) == {"generation_completion_length_mean", "generation_truncated_share"}
