"""Warnings about configs that are legal and probably not intended: they are reported, and the exit
code stays 0.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.training import run_warnings
from nemo_like.training.run_warnings import config_warnings, precision_warnings, step_warnings
from tests.recipe import Recipe

INTEL = {"avx2", "avx512f"}


def write_rows(path: Path, *completions: str) -> str:
    rows = [
        {"prompt": f"{n}+1", "completion": text, "answer": "1"}
        for n, text in enumerate(completions)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_sound_config_has_none(recipe: Recipe):
    for config in (recipe.sft(), recipe.grpo()):
        assert list(config_warnings(config)) == [] and validate(config).warnings == ()


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


def test_empty_assistant_turns_and_the_exit_code(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    empty = write_rows(tmp_path / "empty.jsonl", *["", "  \n"] * 8)
    override = f"data.train_path={empty}"
    recipe.sft(override)
    code = main(
        [
            "validate",
            "--config",
            str(recipe.folder / "sft.yaml"),
            override,
            "policy.scheduler.warmup_steps=0",
        ]
    )
    shown = capsys.readouterr().out
    assert code == 0
    assert f"warning: every assistant turn of {empty} is empty" in shown
    one = write_rows(tmp_path / "one.jsonl", *[""] * 15, "2")
    assert (
        validate(recipe.sft(f"data.train_path={one}", "policy.scheduler.warmup_steps=0")).warnings
        == ()
    )


def test_warmup_longer_than_the_run(recipe: Recipe):
    [warning] = validate(recipe.sft("policy.scheduler.warmup_steps=5")).warnings
    assert "warmup_steps is 5" in warning and "4 optimizer steps" in warning and "80%" in warning
    assert validate(recipe.sft("policy.scheduler.warmup_steps=4")).warnings == ()
    [warning] = validate(recipe.grpo("policy.scheduler.warmup_steps=9")).warnings
    assert "8 optimizer steps" in warning  # 4 steps of 32 rows in batches of 16


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("kind=wsd", "wsd_decay_steps=9"), "wsd_decay_steps is 9, but the run has 8 "),
        (("kind=wsd", "wsd_decay_steps=8"), None),
        (("kind=cosine_restarts", "num_cycles=9"), "num_cycles is 9, but the run has 8 "),
    ],
)
def test_decays_and_cycles_longer_than_the_run(recipe: Recipe, keys, text):
    config = recipe.sft(*(f"policy.scheduler.{key}" for key in keys))
    found = list(step_warnings(config, 10))  # two of them are the warm-up
    assert len(found) == (text is not None)
    assert text is None or text in found[0]


def test_averages_of_the_wrong_steps(recipe: Recipe):
    ema = ("policy.ema.enabled=true", "policy.ema.decay=0.99")
    [warning] = step_warnings(recipe.sft(*ema), 100)
    assert "37% of the averaged weights come from its beginning; set it to 0.9" in warning
    assert list(step_warnings(recipe.sft(*ema), 300)) == []


@pytest.mark.parametrize("place", ["a file", "below a file", "a kernel file system"])
def test_an_output_directory_that_cannot_be_written(recipe: Recipe, tmp_path: Path, place: str):
    (tmp_path / "file").write_text("")
    path = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "runs"}.get(
        place, Path("/proc/runs")
    )
    [warning] = config_warnings(recipe.sft(f"output_dir={path}"))
    assert str(path) in warning and "cannot be written" in warning


def test_the_check_of_a_writable_directory_leaves_nothing(recipe: Recipe, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    config = recipe.sft(f"output_dir={tmp_path}/new/runs")
    assert list(config_warnings(config)) == []
    assert {path for path in tmp_path.rglob("*") if path not in before} <= {
        recipe.folder / "sft.yaml"
    }


def test_rows_that_do_not_divide_over_replicas(recipe: Recipe):
    config = recipe.sft()
    cluster = replace(config.cluster, backend="ray", workers_per_node=3)
    [warning] = config_warnings(replace(config, cluster=cluster))
    assert (
        "train_global_batch_size 16" in warning and "3 workers" in warning and "15 or 18" in warning
    )
    even = replace(cluster, workers_per_node=4)
    assert list(config_warnings(replace(config, cluster=even))) == []


def test_bfloat16_without_instructions_for_it(recipe: Recipe):
    config = recipe.sft("policy.precision=bfloat16")
    [warning] = precision_warnings(config, INTEL)
    assert (
        "policy.precision is bfloat16" in warning and "float32" in warning and "20 times" in warning
    )
    for flags in ({*INTEL, "avx512_bf16"}, {*INTEL, "amx_bf16"}, {"asimd", "bf16"}, set()):
        assert list(precision_warnings(config, flags)) == []
    assert list(precision_warnings(recipe.sft(), INTEL)) == []
    on_gpu = replace(config, cluster=replace(config.cluster, gpus_per_node=1))
    assert list(precision_warnings(on_gpu, INTEL)) == []


def test_lora_updates_that_bfloat16_weights_of_the_generator_lose(recipe: Recipe):
    keys = ("policy.precision=bfloat16", "policy.lora.enabled=true")
    merged = recipe.grpo(*keys, "policy.lora.weight_sync=merged")
    [warning] = precision_warnings(merged, set())
    assert "policy.lora.weight_sync is merged" in warning and "to adapter" in warning
    # `auto` sends merged weights above the largest rank of vLLM, which refuses adapters then.
    [warning] = precision_warnings(recipe.grpo(*keys, "policy.lora.rank=513"), set())
    assert "weight_sync is auto, with policy.lora.rank 513" in warning
    assert warning.endswith("; set policy.lora.weight_sync to adapter")
    vllm = recipe.grpo(*keys, "policy.lora.rank=513", "policy.generation.backend=vllm")
    [warning] = precision_warnings(vllm, set())
    assert "set policy.lora.rank to at most 512" in warning
    for config in (
        recipe.grpo(*keys),
        recipe.grpo(*keys, "policy.lora.weight_sync=adapter"),
        recipe.grpo(*keys, "policy.lora.quantization=nf4"),
        recipe.grpo("policy.lora.enabled=true"),
        recipe.grpo("policy.precision=bfloat16"),
        recipe.sft(*keys),
    ):
        assert list(precision_warnings(config, set())) == []


def test_validate_and_the_run_report_slow_bfloat16(
    recipe: Recipe, monkeypatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(run_warnings, "_cpu_flags", lambda: INTEL)
    config = recipe.sft(
        "policy.precision=bfloat16",
        "sft.max_num_steps=1",
        "sft.val_at_start=false",
        "sft.val_period=0",
        "data.validation_path=null",
    )
    config = replace(
        config,
        policy=replace(config.policy, scheduler=replace(config.policy.scheduler, warmup_steps=0)),
    )
    assert any("bfloat16" in warning for warning in validate(config).warnings)
    with caplog.at_level(logging.WARNING):
        result = run_sft(config)
    assert any("no bfloat16 instructions" in record.message for record in caplog.records)
    assert "no bfloat16 instructions" in (result.directory.logs / "driver.log").read_text()
