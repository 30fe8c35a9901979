"""Warnings about configs that are legal and probably not intended: they are reported, and the exit
code stays 0.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.commands.validate import validate
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import AdapterConfig, OptimizerConfig, PolicyConfig, RunConfig
from nemo_like.training.model_warnings import rate_warnings
from nemo_like.training.reporting import config_warnings, step_warnings
from tests.recipe import Recipe


def warnings_of(config: RunConfig) -> list[str]:
    layout = policy_layout(config.parallel, config.cluster)
    return list(config_warnings(config.policy, config.needs, layout))


def write_rows(path: Path, *completions: str) -> str:
    rows = [
        {"prompt": f"{n}+1", "completion": text, "answer": "1"}
        for n, text in enumerate(completions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_sound_config_has_none(recipe: Recipe):
    for config in (recipe.sft(), recipe.grpo()):
        assert warnings_of(config) == [] and validate(config).warnings == ()


def test_fewer_rows_than_one_batch(recipe: Recipe, tmp_path: Path):
    few = write_rows(tmp_path / "few.jsonl", "1", "2", "3")
    [warning] = validate(
        recipe.sft(f"data.train_path={few}", "policy.scheduler.warmup_steps=0")
    ).warnings
    assert "few.jsonl has 3 rows" in warning and "policy.train_global_batch_size 16" in warning
    [warning] = validate(recipe.grpo(f"data.train_path={few}")).warnings
    assert "few.jsonl has 3 rows" in warning and "grpo.num_prompts_per_step 8" in warning
    enough = write_rows(tmp_path / "enough.jsonl", *["1"] * 16)
    assert (
        validate(
            recipe.sft(f"data.train_path={enough}", "policy.scheduler.warmup_steps=0")
        ).warnings
        == ()
    )


def test_steps_that_end_before_the_epochs(recipe: Recipe, tmp_path: Path):
    rows = write_rows(tmp_path / "rows.jsonl", *["1"] * 48)
    options = (f"data.train_path={rows}", "sft.max_num_epochs=2", "policy.scheduler.warmup_steps=0")
    # 48 rows are 3 steps of 16.
    [warning] = validate(recipe.sft(*options)).warnings
    assert warning == (
        "sft.max_num_steps 4 ends the run after 1.3 of sft.max_num_epochs 2, which are 6 steps;"
        " remove one of the keys"
    )
    assert validate(recipe.sft(*options, "sft.max_num_steps=6")).warnings == ()
    assert validate(recipe.sft(*options, "sft.max_num_epochs=1")).warnings == ()


def test_a_learning_rate_far_outside_of_the_usual_range(recipe: Recipe):
    def rates(*overrides: str) -> tuple[str, ...]:
        return validate(recipe.sft(*overrides)).warnings

    # The model has less than 1e5 parameters: 1e-4 times 100, for which the factor is limited.
    [high] = rates("policy.optimizer.lr=0.5")
    assert re.fullmatch(
        r"policy\.optimizer\.lr is 0\.5, and the loss will probably diverge: usual for full"
        r" training of [0-9,]+ parameters is 1e-07 to 0\.0\d*",
        high,
    )
    [low] = rates("policy.optimizer.lr=1e-9")
    assert "policy.optimizer.lr is 1e-09, and the weights hardly change" in low
    assert rates("policy.optimizer.lr=3e-3") == ()
    [adapted] = rates("policy.optimizer.lr=5e-8", "policy.lora.enabled=true")
    assert "usual for LoRA of" in adapted and "is 1e-06 to" in adapted


@pytest.mark.parametrize(
    ("num_params", "has_lora", "low", "high"),
    [
        # Ten times beyond 1e-7 to 1e-4; the maximum times sqrt(1e9 / 1e7) = 10; LoRA times 10.
        (8_000_000_000, False, 1e-8, 1e-3),
        (10_000_000, False, 1e-8, 1e-2),
        (8_000_000_000, True, 1e-7, 1e-2),
    ],
)
def test_the_range_of_learning_rates(num_params: int, has_lora: bool, low: float, high: float):
    lora = AdapterConfig(enabled=has_lora)
    cases = ((low * 1.1, True), (low / 1.1, False), (high / 1.1, True), (high * 1.1, False))
    for rate, is_usual in cases:
        muon = OptimizerConfig(name="muon", lr=1e-5, muon_lr=rate)
        for optimizer in (OptimizerConfig(lr=rate), muon):
            policy = PolicyConfig(model_name="m", optimizer=optimizer, lora=lora)
            found = list(rate_warnings(policy, num_params))
            assert len(found) == (0 if is_usual else 1), (rate, found)
            key = "muon_lr" if optimizer.muon_lr else "lr"
            assert all(f"policy.optimizer.{key} is {rate:g}" in warning for warning in found)


def test_warmup_longer_than_the_run(recipe: Recipe):
    [warning] = validate(recipe.sft("policy.scheduler.warmup_steps=5")).warnings
    assert "warmup_steps is 5" in warning and "4 optimizer steps" in warning and "80%" in warning
    assert validate(recipe.sft("policy.scheduler.warmup_steps=4")).warnings == ()
    [warning] = validate(recipe.grpo("policy.scheduler.warmup_steps=9")).warnings
    assert "8 optimizer steps" in warning  # 4 steps of 32 rows in batches of 16


def test_averages_of_the_wrong_steps(recipe: Recipe):
    ema = ("policy.ema.enabled=true", "policy.ema.decay=0.99")
    [warning] = step_warnings(recipe.sft(*ema).policy, 100)
    assert "37% of the averaged weights come from its beginning" in warning
    assert "policy.ema.decay is 0.99" in warning
    assert list(step_warnings(recipe.sft(*ema).policy, 300)) == []


def test_rows_that_do_not_divide_over_replicas(recipe: Recipe):
    config = recipe.sft()
    cluster = replace(config.cluster, backend="ray", workers_per_node=3)
    [warning] = warnings_of(replace(config, cluster=cluster))
    assert (
        "train_global_batch_size 16" in warning and "3 workers" in warning and "15 or 18" in warning
    )
    even = replace(cluster, workers_per_node=4)
    assert warnings_of(replace(config, cluster=even)) == []
