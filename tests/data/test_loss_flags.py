"""Loss on single assistant turns: flags of messages and the last turn only."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import TrainOn, mask_turns, trained_turns


def dialog(*flags: dict) -> list[dict]:
    messages = []
    for flag in flags:
        messages.append({"role": "user", "content": "q"})
        messages.append({"role": "assistant", "content": "a", **flag})
    return messages


@pytest.mark.parametrize(
    ("flags", "train_on", "turns"),
    [
        (({}, {}), "assistant", None),
        (({}, {}), "all", None),
        (({"train": True}, {"weight": 1}), "assistant", None),
        (({"train": False}, {}), "assistant", [False, True]),
        (({}, {"weight": 0}), "assistant", [True, False]),
        (({}, {}, {}), "last", [False, False, True]),
        (({},), "last", None),
    ],
)
def test_turns_with_loss(flags: tuple, train_on: TrainOn, turns: list[bool] | None) -> None:
    assert trained_turns(dialog(*flags), train_on) == turns


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"removes its loss, but data\.train_on is all"):
        trained_turns(dialog({"train": False}, {}), "all")
    with pytest.raises(ConfigError, match=r"no assistant turn is left .* data\.train_on=last"):
        trained_turns(dialog({}, {"weight": 0}), "last")


def test_a_row_ends_with_its_last_turn_with_loss() -> None:
    row = EncodedRow(np.arange(8, dtype=np.int32), np.array([0, 1, 1, 0, 1, 0, 1, 1], np.uint8))
    masked = mask_turns(row, [False, True, False])
    assert masked.input_ids.tolist() == [0, 1, 2, 3, 4]
    assert masked.token_mask.tolist() == [0, 0, 0, 0, 1]
    assert mask_turns(row, [True, False, True]).token_mask.tolist() == [0, 1, 1, 0, 0, 0, 1, 1]


def test_turns_that_cannot_be_told_apart_are_refused() -> None:
    row = EncodedRow(np.arange(4, dtype=np.int32), np.array([0, 1, 1, 1], np.uint8))
    with pytest.raises(ConfigError, match="renders 2 assistant turns as 1 separate parts"):
        mask_turns(row, [False, True])
