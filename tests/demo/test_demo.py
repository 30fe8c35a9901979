"""A demo that fails states once what is kept and how to continue."""

from __future__ import annotations

import pytest

from nemo_like.demo import __main__ as demo
from tests.recipe import Recipe


def test_a_failed_phase_names_what_is_kept_and_the_command_that_continues(
    recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    config = recipe.grpo("reward.functions.digits.path=tests.algorithms.rewards.broken")
    assert demo.run_phase("grpo", config, 7) == 2
    said = capfd.readouterr().err
    assert "reward.functions.digits (tests.algorithms.rewards.broken) raised KeyError" in said
    assert said.count("The demo ended in its GRPO phase. Kept:") == 1
    assert "the finished SFT run in runs/demo_sft" in said
    assert said.rstrip().endswith("nemo-like grpo --config examples/configs/demo_grpo.yaml seed=7")

    latest = recipe.folder / "grpo" / "latest"
    latest.write_text("checkpoints/step_2\n")
    # The directory holds a run, so this start is refused.
    assert demo.run_phase("grpo", config, 7) == 2
    assert "seed=7 resume=true" in capfd.readouterr().err
