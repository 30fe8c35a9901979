"""Each health rule fires on a run that fails in its way, once, and on no other."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.config.health import HEALTH_RULES
from nemo_like.config.plain import to_dict
from nemo_like.config.schema import RunConfig
from nemo_like.training.health import RULES, Finding, Health
from nemo_like.training.stopping import EXIT_UNHEALTHY, RunStopped
from tests.recipe import Recipe

HEALTHY = {
    "reward/mean": 0.5,
    "reward/min": 0.0,
    "reward/max": 1.0,
    "reward/frac_groups_zero_std": 0.4,
    "reward/frac_groups_all_zero": 0.2,
    "policy/entropy_estimate": 0.4,
    "policy/reference_kl_k3": 0.01,
    "policy/clip_fraction": 0.02,
    "policy/grad_norm": 1.0,
    "data/full_length_share": 0.1,
    "mismatch/gen_kl_k3": 1e-4,
    "generation/completion_length_mean": 40.0,
    "generation/completion_length_max": 24.0,
    "generation/truncated_share": 0.1,
    "timing/step_s": 10.0,
    "timing/data_wait_s": 0.1,
    "timing/generator_busy_s": 5.0,
    "timing/generator_idle_s": 5.0,
    "packing/rank_imbalance_flops": 1.2,
    "policy/rank_time_worst_over_mean": 1.25,
    "policy/rank_time_slowest": 3.0,
    "episodes/calls_mean": 4.0,
    "episodes/failed_calls_mean": 3.0,
}
"""A record of GRPO whose values are usual."""
LENGTH = "generation/completion_length_mean"
GROWING: Mapping[str, Sequence[Mapping[str, float]]] = {
    "reward_flat": [{"reward/frac_groups_zero_std": 0.9}] * 12,
    "entropy_collapse": [{"policy/entropy_estimate": 0.001}] * 12,
    "kl": [{"policy/reference_kl_k3": 0.2 * step} for step in range(12)],
    "mismatch": [{"mismatch/gen_kl_k3": 0.3}] * 12,
    "length_explosion": [{LENGTH: 40.0 * 1.2**step} for step in range(12)],
    "truncated": [{"generation/truncated_share": 0.7}] * 12,
    "truncated_rows": [{"data/full_length_share": 0.7}] * 12,
    "clipped": [{"policy/clip_fraction": 0.5}] * 12,
    "grad_norm": [{}] * 11 + [{"policy/grad_norm": 50.0}],
    "data_wait": [{"timing/data_wait_s": 8.0}] * 12,
    "generator_idle": [{"timing/generator_idle_s": 45.0}] * 12,
    # Planned 1.2 times the mean, and taking 1.8 times: 1.5 times the plan.
    "slow_rank": [{"policy/rank_time_worst_over_mean": 1.8, "policy/rank_time_slowest": 3.0}] * 12,
    "long_failures": [{"episodes/failed_calls_mean": 6.5}] * 12,
}
"""What differs in each step of a run that fails in the way of the rule."""


def findings(health: Health, steps: Iterable[Mapping[str, float]]) -> list[Finding]:
    found = []
    for step, changed in enumerate(steps, start=1):
        found += health.observe(step, {**HEALTHY, **changed})
    return found


def health_of(config: RunConfig) -> Health:
    return Health(config.health, to_dict(config))


def grpo_health(recipe: Recipe, *overrides: str) -> Health:
    """The rules of a run whose generation workers have resources of their own."""
    ray = ("cluster.backend=ray", "cluster.generation_workers=1")
    return health_of(recipe.grpo(*ray, *overrides))


def test_every_rule_has_a_name_in_the_config_and_a_failing_run_here() -> None:
    assert tuple(RULES) == HEALTH_RULES == tuple(GROWING)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_fires_once_on_a_run_that_fails_in_its_way(recipe: Recipe, rule: str) -> None:
    health = grpo_health(recipe)
    [found] = findings(health, GROWING[rule])
    assert (found.rule, found.level) == (rule, "warn")
    assert f"Change {found.key} (now " in found.message
    advice = [f"health: {rule} at step {found.step}; change {found.key}"]
    assert health.advice() == advice


def test_no_rule_fires_on_usual_values(recipe: Recipe) -> None:
    assert findings(grpo_health(recipe), [{}] * 30) == []


@pytest.mark.parametrize("rule", ["reward_flat", "entropy_collapse", "length_explosion"])
def test_a_reward_that_rises_is_no_failure(recipe: Recipe, rule: str) -> None:
    rising = [{**step, "reward/mean": i / 12} for i, step in enumerate(GROWING[rule])]
    assert findings(grpo_health(recipe), rising) == []


def test_a_rule_fires_again_after_a_window_without_its_condition(recipe: Recipe) -> None:
    bad = {"mismatch/gen_kl_k3": 9.0}
    steps = [*[bad] * 3, *[{}] * 3, bad, *[{}] * 40, *[bad] * 3]
    assert [each.step for each in findings(grpo_health(recipe), steps)] == [3, 48]


def test_the_action_of_a_rule_is_that_of_its_list(recipe: Recipe) -> None:
    options = ("health.stop=[kl]", "health.ignore=[truncated]")
    steps = [{"policy/reference_kl_k3": 2.0, "generation/truncated_share": 1.0}] * 5
    [found] = findings(grpo_health(recipe, *options), steps)
    assert (found.rule, found.level) == ("kl", "stop")
    assert findings(grpo_health(recipe, "health.action=ignore"), steps) == []
    with pytest.raises(ConfigError, match=r"health\.stop.*a list of names among reward_flat, "):
        recipe.grpo("health.stop=[speed]")


def test_a_colocated_generator_may_be_idle_and_groups_without_a_baseline_may_be_equal(
    recipe: Recipe,
) -> None:
    no_baseline = ("grpo.advantage.baseline=none", "grpo.advantage.normalize=none")
    health = health_of(recipe.grpo(*no_baseline))
    for rule in ("generator_idle", "reward_flat"):
        assert findings(health, GROWING[rule]) == []


def test_the_key_is_that_of_the_limit_which_was_reached(recipe: Recipe) -> None:
    cut = {"generation/truncated_share": 1.0}
    keys = []
    for changed in (cut, cut | {"generation/completion_length_max": 20.0}):
        [found] = findings(health_of(recipe.grpo()), [changed] * 4)
        keys.append(found.key)
    assert keys == ["policy.generation.max_new_tokens", "policy.max_total_sequence_length"]
    # The mean over a validation set needs no further values.
    [found_once] = health_of(recipe.sft()).observe(
        0, {"validation/generation_truncated_share": 0.9}
    )
    assert found_once.rule == "truncated"


def test_a_run_whose_rewards_are_all_equal_is_warned_in_its_file_and_at_its_end(
    recipe: Recipe, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = (
        "reward.functions.digits.path=tests.algorithms.rewards.always_one",
        "policy.generation.max_new_tokens=4",
        "checkpointing.export_hf=false",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
    )
    run = run_grpo(recipe.grpo(*options))
    records = [json.loads(line) for line in run.directory.health.read_text().splitlines()]
    assert [(each["rule"], each["step"]) for each in records] == [
        ("reward_flat", 3),
        ("truncated", 3),
    ]
    assert records[0].keys() == {"step", "rule", "message", "key", "level"}
    assert records[0]["key"] == "grpo.num_generations_per_prompt"
    assert "100% of the groups have equal rewards" in caplog.text
    assert (
        "health: truncated at step 3; change policy.generation.max_new_tokens"
        in capsys.readouterr().out
    )


def test_a_rule_with_stop_ends_a_run_behind_a_checkpoint(recipe: Recipe) -> None:
    # Most conversations are longer than the limit.
    options = (
        *("policy.max_total_sequence_length=18", "policy.oversize_rows=truncate"),
        *("sft.val_at_start=false", "data.validation_path=null", "sft.val_period=0"),
        *("sft.max_num_steps=9", "health.stop=[truncated_rows]"),
    )
    with pytest.raises(
        RunStopped, match=r"health rule truncated_rows after step 3: resume=true"
    ) as end:
        run_sft(recipe.sft(*options))
    assert end.value.exit_code == EXIT_UNHEALTHY
    assert (recipe.folder / "sft" / "latest").read_text().strip() == "checkpoints/step_3"
    found = json.loads((recipe.folder / "sft" / "health.jsonl").read_text())
    assert (found["step"], found["level"]) == (3, "stop")


def test_a_slow_rank_is_one_that_is_always_the_slowest_beyond_its_plan(recipe: Recipe) -> None:
    slow = {"policy/rank_time_worst_over_mean": 1.8}
    alternating = [slow | {"policy/rank_time_slowest": float(step % 2)} for step in range(12)]
    planned = [slow | {"packing/rank_imbalance_flops": 1.7}] * 12
    for steps in (alternating, planned):
        assert [
            each for each in findings(grpo_health(recipe), steps) if each.rule == "slow_rank"
        ] == []
    (found,) = findings(grpo_health(recipe), GROWING["slow_rank"])
    assert "worker 3 of the policy group is the slowest in each of 10 steps" in found.message
    assert "at 1.50 times its planned time" in found.message
    assert found.key == "cluster.exclude_nodes"
