"""Warnings about configs that are legal and probably not intended: they are reported, and the exit
code stays 0.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from nemo_like.commands.validate import validate
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import RunConfig
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
