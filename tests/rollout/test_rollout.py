"""Version gaps of completion tokens, and metrics of validation answers."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.generation.requests import Completions
from nemo_like.metrics import metric_values
from nemo_like.rollout.answers import answer_metrics
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import Rollout, build_rollout


def rollout_of(versions: list[list[int]]) -> Rollout:
    """Rows of two prompt tokens and a completion token for each version."""
    prompt = Prompt(token_ids=np.array([5, 5], dtype=np.int32), text="", answer=None)
    rows = []
    for row_versions in versions:
        row = ConversationRow.start(prompt, 0)
        size = len(row_versions)
        completion = Completions.from_rows([[5] * size], [[-1.0] * size], [row_versions], ["stop"])
        row.add_turn(completion, 0)
        rows.append(row)
    return build_rollout(rows, 1, np.zeros(len(rows), np.float32), {})


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
