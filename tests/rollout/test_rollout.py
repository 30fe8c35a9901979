"""Version gaps of completion tokens, and metrics of validation answers."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.generation.requests import Completions
from nemo_like.metrics import metric_values
from nemo_like.rollout.answers import answer_metrics
from nemo_like.rollout.conversations import ConversationRow, Prompt
from nemo_like.rollout.rows import Rollout, build_rollout, rollout_metrics


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


def test_rows_with_tokens_that_are_too_old_are_left_out_and_counted() -> None:
    rollout = rollout_of([[3, 4], [2, 4], [4], [], [1]])
    # A reward function failed in it.
    rollout.batch["reward_mask"][2] = rollout.batch["row_mask"][2] = False
    assert rollout.drop_stale(3, 5) == 2
    is_trained = [True, False, False, True, False]
    assert rollout.batch["reward_mask"].tolist() == is_trained
    assert rollout.batch["row_mask"].tolist() == is_trained
    metrics = metric_values(rollout_metrics(rollout))
    assert metrics["reward/num_dropped"] == 3, "5 started, 2 are trained"
    assert [record.get("dropped", False) for record in rollout.records(rows=[0, 1, 4])] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("versions", "oldest", "newest"),
    [([[3, 6], [4]], 3, 5), ([[1], [2, 4]], 3, 5), ([[5], [4]], 5, 5)],
)
def test_weights_that_were_not_synchronized_are_an_error(
    versions: list[list[int]], oldest: int, newest: int
) -> None:
    """Newer ones than the policy's, no row that is new enough, or no older ones allowed."""
    with pytest.raises(RuntimeError, match="the weights were not synchronized"):
        rollout_of(versions).drop_stale(oldest, newest)


def test_answers_without_rewards_have_no_mean_reward() -> None:
    rollout = rollout_of([[3, 3], [3], [3]])
    rollout.components["answer"] = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    rollout.batch["reward"] = np.array([1.0, 0.0, 0.0], dtype=np.float32)
    rollout.batch["reward_mask"] = np.array([True, True, False])
    rows = np.arange(3)
    values = metric_values(answer_metrics(rollout, rows, num_samples=1, pass_reward=1.0))
    assert (values["reward_mean"], values["answer_mean"]) == (0.5, 0.5)
    dropped = metric_values(answer_metrics(rollout, rows[2:], num_samples=1, pass_reward=1.0))
    assert set(dropped) == {"generation_completion_length_mean", "generation_truncated_share"}
