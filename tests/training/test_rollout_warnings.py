"""Warnings about truncated completions and groups with equal rewards: once per run."""

from __future__ import annotations

from nemo_like.training.reporting import RolloutWarnings
from tests.recipe import Recipe

NO_BASELINE = ("grpo.advantage.baseline=none", "grpo.advantage.normalize=none")


def warned_steps(warnings: RolloutWarnings, name: str, shares: list[float]) -> list[int]:
    return [
        step for step, share in enumerate(shares) if list(warnings.observe(step, {name: share}))
    ]


def test_a_large_share_is_reported_once(recipe: Recipe) -> None:
    warnings = RolloutWarnings(recipe.grpo())
    assert warned_steps(warnings, "generation/truncated_share", [0.4, 0.6, 0.3, 0.9]) == [1]
    assert warned_steps(warnings, "reward/frac_groups_zero_std", [0.75, 0.85, 0.3, 1.0]) == [1]


def test_generated_validation_answers_are_watched_in_other_runs(recipe: Recipe) -> None:
    warnings = RolloutWarnings(recipe.sft())
    assert warned_steps(warnings, "validation/generation_truncated_share", [1.0, 1.0]) == [0]


def test_groups_of_runs_without_a_baseline_are_not_compared(recipe: Recipe) -> None:
    warnings = RolloutWarnings(recipe.grpo(*NO_BASELINE))
    assert warned_steps(warnings, "reward/frac_groups_zero_std", [1.0]) == []


def test_the_key_is_that_of_the_limit_which_was_reached(recipe: Recipe) -> None:
    metrics = {"generation/truncated_share": 1.0, "generation/completion_length_max": 24.0}
    [text] = RolloutWarnings(recipe.grpo()).observe(1, metrics)
    assert "raise policy.generation.max_new_tokens (now 24)" in text
    metrics["generation/completion_length_max"] = 20.0
    [text] = RolloutWarnings(recipe.grpo()).observe(1, metrics)
    assert "raise policy.max_total_sequence_length (now 96)" in text
    conversation = recipe.grpo("environment.path=nemo_like.environments.included.Calculator")
    [text] = RolloutWarnings(conversation).observe(1, metrics)
    assert "max_new_tokens (now 24) or policy.max_total_sequence_length (now 96)" in text
