"""Epochs of complete runs: how many rows each step has, how many steps there are, and what a
changed file means for resume.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

QUIET = ("logger.tensorboard=false", "logger.num_samples_shown=0", "checkpointing.export_hf=false")


def first_rows(recipe: Recipe, name: str, num_rows: int) -> Path:
    path = recipe.folder / f"{num_rows}_{name}"
    lines = (recipe.demo / name).read_text().splitlines()[:num_rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def rows_per_step(run: Path) -> list[int]:
    return [
        len(json.loads(line)["lengths"])
        for line in (run / "plan" / "lengths.jsonl").read_bytes().splitlines()
    ]


@pytest.mark.parametrize(
    ("num_rows", "epochs", "last_batch", "expected"),
    [(10, 2, "keep", [10, 10]), (20, 2, "keep", [16, 4, 16, 4]), (20, 2, "drop", [16, 16])],
)
def test_sft_steps_of_small_files(
    recipe: Recipe, num_rows: int, epochs: int, last_batch: str, expected: list[int]
):
    result = run_sft(
        recipe.sft(
            f"data.train_path={first_rows(recipe, 'sft_train.jsonl', num_rows)}",
            f"data.last_batch={last_batch}",
            f"sft.max_num_epochs={epochs}",
            "sft.max_num_steps=null",
            "sft.val_period=0",
            "data.validation_path=null",
            "checkpointing.enabled=false",
            "policy.scheduler.warmup_steps=0",
            *QUIET,
        )
    )
    assert rows_per_step(result.directory.path) == expected
    metrics = read_metrics(result.directory.path)
    assert [line["policy/num_rows"] for line in metrics] == expected
    assert [line["data/epoch"] for line in metrics] == [
        (step + 1) // (len(expected) // epochs) for step in range(len(expected))
    ]
    assert [line["policy/lr"] for line in metrics] == sorted(
        (line["policy/lr"] for line in metrics), reverse=True
    )


def test_fewer_rows_than_a_batch_and_drop_is_refused(recipe: Recipe):
    path = first_rows(recipe, "sft_train.jsonl", 10)
    with pytest.raises(ConfigError, match="10 usable rows, fewer than the 16 of one batch"):
        run_sft(recipe.sft(f"data.train_path={path}", "data.last_batch=drop"))
    path = first_rows(recipe, "grpo_train.jsonl", 5)
    with pytest.raises(ConfigError, match="5 usable rows, fewer than the 8 of one batch"):
        run_grpo(recipe.grpo(f"data.train_path={path}", "data.last_batch=drop"))


def test_grpo_has_short_steps_at_the_end_of_an_epoch_and_decays_over_its_optimizer_steps(
    recipe: Recipe,
):
    path = first_rows(recipe, "grpo_train.jsonl", 11)
    result = run_grpo(
        recipe.grpo(
            f"data.train_path={path}",
            "data.validation_path=null",
            "grpo.val_period=0",
            "grpo.max_num_steps=3",
            "policy.train_global_batch_size=8",
            "policy.scheduler.kind=linear",
            "policy.scheduler.warmup_steps=0",
            "checkpointing.enabled=false",
            *QUIET,
        )
    )
    assert rows_per_step(result.directory.path) == [32, 12, 32]
    first, second, third = (line["policy/lr"] for line in read_metrics(result.directory.path))
    # 4 + 2 + 4 optimizer steps: the mean share of the rate over steps 0-3, 4-5 and 6-9 of 10.
    assert [first, second, third] == pytest.approx([0.85e-3, 0.55e-3, 0.25e-3])


def test_a_changed_file_is_refused_or_begins_the_epoch_again(recipe: Recipe):
    path = first_rows(recipe, "sft_train.jsonl", 60)
    lines = path.read_text().splitlines()
    options = (
        f"data.train_path={path}",
        "data.validation_path=null",
        "sft.val_period=0",
        "policy.scheduler.kind=constant",
    )
    run = run_sft(recipe.sft(*options, "sft.max_num_steps=4")).directory.path
    assert rows_per_step(run) == [16, 16, 16, 12]
    interrupt_at(run, 2)
    path.write_text("\n".join(lines[1:50]) + "\n")
    with pytest.raises(ConfigError, match=r"data\.allow_changed_rows=true"):
        run_sft(recipe.sft(*options, "sft.max_num_epochs=1", "resume=true"))
    allowed = recipe.sft(
        *options, "sft.max_num_steps=6", "resume=true", "data.allow_changed_rows=true"
    )
    run_sft(allowed)
    assert rows_per_step(run) == [16, 16, 16, 16, 16, 1]
