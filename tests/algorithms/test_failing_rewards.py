"""GRPO runs whose reward function fails on some completions."""

from __future__ import annotations

import json

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.environments.reward import RewardError
from tests.recipe import Recipe

_FAILS = "reward.functions.digits.path=tests.algorithms.rewards.broken_sometimes"
_SHORT = ("grpo.max_num_steps=1", "grpo.val_at_start=false", "checkpointing.enabled=false")


def test_a_run_goes_on_without_the_completions_whose_reward_failed(recipe: Recipe) -> None:
    overrides = [_FAILS, "reward.on_error=drop", "reward.max_error_share=0.2", *_SHORT]
    result = run_grpo(recipe.grpo(*overrides))
    # One of eight calls fails: 4 of 32 completions.
    assert result.last["reward/num_errors"] == result.last["reward/num_errors_raised"] == 4
    assert result.last["reward/num_dropped"] == 4
    lines = result.directory.rollouts(1).read_bytes().splitlines()
    records = [json.loads(line) for line in lines]
    failed = [record for record in records if "error" in record]
    assert len(records) == 32 and len(failed) == 4
    for record in failed:
        assert "raised KeyError: 'no such key in the verifier'" in record["error"]
        assert record["reward"] == record["advantage"] == 0.0 and record["dropped"]
    rewards = [record["reward"] for record in records if not record.get("dropped")]
    assert result.last["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))


def test_too_many_failures_end_the_run(recipe: Recipe) -> None:
    overrides = [_FAILS, "reward.on_error=zero", "reward.max_error_share=0.1"]
    with pytest.raises(RewardError, match=r"above reward.max_error_share 0.1: correct the"):
        run_grpo(recipe.grpo(*overrides, *_SHORT))
