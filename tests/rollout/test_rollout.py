"""Version gaps of completion tokens."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.generation.requests import Completions, FinishReason
from nemo_like.rollout.rollout import Rollout


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
