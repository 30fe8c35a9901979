"""The preferences of the reward model's demo: right by the true reward, and the same for a seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.demo.reward_model import (
    MIN_MARGIN,
    NUM_HELD_OUT,
    NUM_PREFERENCES,
    build_preferences,
    mean_digit,
)


def test_the_preferences_follow_the_true_reward(tmp_path: Path) -> None:
    for name in ("a", "b"):
        build_preferences(tmp_path / name, seed=3)
    texts = {}
    for split, count in (("train", NUM_PREFERENCES), ("validation", NUM_HELD_OUT)):
        file = tmp_path / "a" / f"preferences_{split}.jsonl"
        assert file.read_text() == (tmp_path / "b" / file.name).read_text()
        pairs = [json.loads(line) for line in file.read_bytes().splitlines()]
        assert len(pairs) == count
        for pair in pairs:
            margin = mean_digit(pair["chosen"]) - mean_digit(pair["rejected"])
            assert margin >= MIN_MARGIN
        texts[split] = {(pair["chosen"], pair["rejected"]) for pair in pairs}
    assert not texts["train"] & texts["validation"]
    weights = "model/model.safetensors"
    assert (tmp_path / "a" / weights).read_bytes() == (tmp_path / "b" / weights).read_bytes()


def test_the_true_reward_is_the_mean_digit_of_all_characters() -> None:
    assert mean_digit("") == 0.0 and mean_digit("99") == 1.0
    assert mean_digit("9 8#7=9") == pytest.approx(33 / 9 / 7)
