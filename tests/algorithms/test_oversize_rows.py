"""Rows and prompts that are too long or cannot be encoded: reported before the first step, cut or
left out as configured.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_like.algorithms.grpo import data as grpo_data
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.preferences.loop import run_rm
from nemo_like.algorithms.sft import data as sft_data
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from tests.algorithms.test_runs import read_metrics
from tests.exhaustive import usually
from tests.recipe import Recipe

NUM_ROWS = 30
LONG = 17


def prompts_file(recipe: Recipe, long_text: str = "1+" * 200 + "1") -> str:
    path = recipe.folder / "prompts.jsonl"
    rows = [
        {"prompt": long_text if index == LONG else f"{index}+{index}", "answer": str(2 * index)}
        for index in range(NUM_ROWS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train_path={path}"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("text", ["1+" * 200 + "1", "2+\ud83d"])
def test_a_bad_prompt_is_reported_with_its_line_before_the_run_starts(
    recipe: Recipe, num_workers: int, text: str
):
    """`num_workers=1` is a process of its own with the real tokenizer."""
    config = recipe.grpo(
        prompts_file(recipe, text),
        f"data.num_encoding_workers={num_workers}",
        "grpo.max_num_steps=50",
    )
    with pytest.raises(ConfigError, match=rf"prompts\.jsonl:{LONG + 1}: "):
        source = grpo_data.open_source(config)
        loader = source.loader()
        source.encode_ahead(loader.order.upcoming(config.grpo.max_num_steps * loader.batch_size))
    if num_workers == 0:
        report = validate(config)
        assert any(f"prompts.jsonl:{LONG + 1}" in problem for problem in report.problems), (
            report.problems
        )


def test_a_run_that_does_not_reach_a_bad_prompt_does_not_fail_for_it(recipe: Recipe):
    options = ("grpo.max_num_steps=1", "data.num_encoding_workers=0", "seed=1")
    source = grpo_data.open_source(recipe.grpo(prompts_file(recipe), *options))
    loader = source.loader()
    assert LONG not in loader.order.order[:8].tolist(), (
        "with this seed the bad prompt is not in the first step"
    )
    source.encode_ahead(loader.order.upcoming(loader.batch_size))
    assert len(next(loader)) == 8


def test_prompts_are_cut_at_the_beginning_or_left_out(recipe: Recipe):
    file = prompts_file(recipe)
    without_limit = recipe.grpo(
        file,
        "policy.max_total_sequence_length=2000",
        "policy.oversize_rows=truncate",
        "policy.sequence_packing.enabled=false",
    )
    full_row = grpo_data.open_source(without_limit).rows.fetch([LONG])[0]
    truncated = grpo_data.open_source(recipe.grpo(file, "policy.oversize_rows=truncate"))
    row = truncated.rows.fetch([LONG])[0]
    assert full_row is not None and row is not None
    assert np.array_equal(row.input_ids, full_row.input_ids[-(96 - 24) :]), (
        "max_new_tokens 24 fit behind it"
    )
    config = recipe.grpo(file, "policy.oversize_rows=drop", "grpo.max_num_steps=10")
    dropped = grpo_data.open_source(config)
    loader = dropped.loader()
    dropped.encode_ahead(loader.order.upcoming(10 * loader.batch_size))
    assert dropped.rows.num_kept == NUM_ROWS - 1
    batches = [next(loader) for _ in range(4)]
    assert [len(batch) for batch in batches] == [8, 8, 8, 5]
    assert sorted(prompt.text for batch in batches for prompt in batch) == sorted(
        f"{index}+{index}" for index in range(NUM_ROWS) if index != LONG
    )
    # 32 rows / 16 rows per optimizer step = 2; the fourth step of each epoch has 20 rows.
    assert grpo_data.num_optimizer_steps(config, dropped) == 20


def test_dropped_conversations_are_counted_and_the_run_has_fewer_steps(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
):
    path = recipe.folder / "conversations.jsonl"
    rows = [
        {"prompt": "1+1", "completion": "2" * (200 if index in (3, 4) else 1)}
        for index in range(18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run_sft(
        recipe.sft(
            f"data.train_path={path}",
            "policy.oversize_rows=drop",
            "sft.max_num_steps=null",
            "sft.val_period=0",
            "data.validation_path=null",
            "checkpointing.enabled=false",
            "checkpointing.export_hf=false",
        )
    )
    assert result.step == 1, "16 of 18 rows are one step"
    assert result.last["policy/num_rows"] == 16
    assert result.last["data/num_dropped"] <= 2
    assert "data_wait_s" in " ".join(result.last)
    shown = capsys.readouterr().out
    assert "leaves out 2 of 18 rows" in shown and "conversations.jsonl:4" in shown


def test_bad_rows_are_skipped_and_counted_in_the_metrics(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
):
    rows: list[object] = [{"prompt": "1+1", "completion": "2"}] * 16
    user_turn = {"role": "human", "content": "1+1"}
    answer = {"role": "assistant", "content": "2"}
    rows += [{"prompt": [user_turn], "completion": [answer]}, {"prompt": "1+1"}, [1]]
    path = recipe.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = (
        f"data.train_path={path}",
        f"data.validation_path={path}",
        "sft.max_num_steps=null",
        "checkpointing.enabled=false",
        "checkpointing.export_hf=false",
    )
    with pytest.raises(ConfigError, match="2 bad rows"):
        run_sft(recipe.sft(*keys))
    result = run_sft(recipe.sft(*keys, "data.on_bad_row=skip"))
    assert result.step == 1, "16 of 19 rows are one step"
    assert result.last["policy/num_rows"] == 16
    assert result.last["data/num_skipped_rows"] == 3
    shown = capsys.readouterr()
    for line, reason in ((17, "unknown role 'human'"), (18, "missing"), (19, "not an object")):
        assert re.search(rf"{reason}.*:\n +\S*rows.jsonl:{line}\n", shown.out)
        # Of the validation file, which is the same one.
        assert re.search(rf"{reason}.*:\n +\S*rows.jsonl:{line}\n", shown.err)


def test_a_run_whose_rows_are_all_dropped_is_an_error(recipe: Recipe):
    path = recipe.folder / "rows.jsonl"
    rows = [
        {"prompt": f"{index}+1", "completion": "2" * 40, "chosen": "2" * 40, "rejected": "3"}
        for index in range(18)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (f"data.train_path={path}", "policy.oversize_rows=drop")
    with pytest.raises(ConfigError, match=r"every row is dropped by policy\.oversize_rows=drop"):
        run_sft(recipe.sft(*options, "policy.max_total_sequence_length=20"))
    with pytest.raises(ConfigError, match="every row is dropped"):
        run_rm(recipe.rm(*options, "policy.max_total_sequence_length=20"))
    # Too few for one batch.
    rows[0]["completion"] = "2"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = (*options, "policy.max_total_sequence_length=20", "data.last_batch=drop")
    with pytest.raises(ConfigError, match="1 usable row, fewer than the 16 of one batch"):
        run_sft(recipe.sft(*options))
    assert not (recipe.folder / "sft").exists()


def test_rows_that_truncation_leaves_without_loss_are_reported(recipe: Recipe):
    path = recipe.folder / "rows.jsonl"
    rows = [{"prompt": "1+" * (90 if index == 3 else 1), "completion": "2"} for index in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = validate(recipe.sft(f"data.train_path={path}", "policy.oversize_rows=truncate"))
    [warning] = [text for text in report.warnings if "no token with loss" in text]
    assert warning.startswith("1 of the rows sampled") and "rows.jsonl:4" in warning


@pytest.mark.parametrize(
    "engine",
    usually(
        ["optimizer.name=adamw", "optimizer.name=muon", "engine=megatron"],
        "optimizer.name=adamw",
        "engine=megatron",
    ),
)
def test_steps_without_a_trained_token_warn_and_change_nothing(
    recipe: Recipe, engine: str, capsys: pytest.CaptureFixture[str]
):
    """The first step trains nothing; the second has one row with a trained token in 16."""
    path = recipe.folder / "rows.jsonl"
    rows = [{"prompt": "1+" * 90, "completion": "2"} for _ in range(32)]
    options = (
        f"data.train_path={path}",
        "data.shuffle=false",
        "policy.oversize_rows=truncate",
        "policy.max_total_sequence_length=64",
        "policy.optimizer.weight_decay=0.5",
        f"policy.{engine}",
        "policy.scheduler.warmup_steps=0",
        "policy.scheduler.kind=constant",
        "sft.val_at_start=false",
        "sft.val_period=0",
        "checkpointing.save_period=1",
        "checkpointing.keep_latest=5",
    )

    def write(last_prompt: str) -> None:
        rows[-1]["prompt"] = last_prompt
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("1+")
    run_sft(recipe.sft(*options, "sft.max_num_steps=2"))
    assert re.findall(r"WARNING: step (\d): 1 of 1 optimizer", capsys.readouterr().out) == ["1"]
    run = recipe.folder / "sft"
    assert [line["policy/num_tokens"] for line in read_metrics(run)] == [0, 2]
    before = load_file(recipe.demo / "model" / "model.safetensors")
    with open_checkpoint(run / "checkpoints/step_1/policy") as reader:
        assert reader.num_optimizer_steps == 0 and not reader.has_moments
        for name, weight in reader.full_weights(list(reader.shapes)):
            assert torch.equal(weight, before[name]), name
    # The second step is the first of the optimizer: the same as in a run of its last row alone.
    rows = rows[-1:]
    write("1+")
    run_sft(recipe.sft(*options, "sft.max_num_steps=1", "run_name=alone"))
    after = load_file(recipe.folder / "alone" / "hf" / "model.safetensors")
    found = load_file(run / "hf" / "model.safetensors")
    for name, weight in after.items():
        change = (weight - before[name]).norm()
        # A quarter of it, if moments and step count had advanced before.
        assert (found[name] - weight).norm() < 0.05 * change, name


def test_a_run_without_a_trained_token_is_an_error(recipe: Recipe):
    path = recipe.folder / "rows.jsonl"
    path.write_text(f'{{"prompt": "{"1+" * 90}", "completion": "2"}}\n' * 32)
    options = (
        f"data.train_path={path}",
        "data.validation_path=null",
        "sft.val_period=0",
        "sft.val_at_start=false",
        "policy.oversize_rows=truncate",
        "policy.max_total_sequence_length=64",
    )
    text = r"no step .* trained a token.* within policy\.max_total_sequence_length 64, to which pol"
    with pytest.raises(ConfigError, match=text):
        run_sft(recipe.sft(*options, "sft.max_num_steps=1", "run_name=short"))
    assert not (recipe.folder / "short" / "hf").exists()
    # At the end of the first epoch.
    with pytest.raises(ConfigError, match=text):
        run_sft(recipe.sft(*options, "sft.max_num_epochs=9", "sft.max_num_steps=9"))
    assert len(read_metrics(recipe.folder / "sft")) == 2
    # Every completion is as long as the limit, and left out.
    options = ("policy.generation.max_new_tokens=1", "grpo.overlong.filter=true")
    options += ("data.validation_path=null", "grpo.val_period=0", "grpo.val_at_start=false")
    with pytest.raises(ConfigError, match=r"all completions were left out: check reward\.on_er"):
        run_grpo(recipe.grpo("grpo.max_num_steps=1", *options))
    assert not (recipe.folder / "grpo" / "hf").exists()


def test_a_run_with_encoding_processes_equals_one_without(recipe: Recipe):
    """The rows of two epochs, with the real tokenizer in a process of its own."""
    batches = []
    for num_workers in (0, 2):
        source = sft_data.open_source(
            recipe.sft(f"data.num_encoding_workers={num_workers}", "data.max_train_rows=40")
        )
        loader = source.loader()
        source.encode_ahead(loader.order.upcoming(6 * loader.batch_size))
        batches.append([next(loader) for _ in range(6)])
    for straight, other in zip(*batches, strict=True):
        for a, b in zip(straight, other, strict=True):
            assert np.array_equal(a.input_ids, b.input_ids) and np.array_equal(
                a.token_mask, b.token_mask
            )


def test_a_grpo_run_trains_on_cut_prompts(recipe: Recipe):
    path = Path(prompts_file(recipe).partition("=")[2])
    path.write_text(path.read_text().splitlines()[LONG] + "\n")
    result = run_grpo(
        recipe.grpo(
            f"data.train_path={path}",
            "policy.oversize_rows=truncate",
            "grpo.max_num_steps=1",
            "grpo.val_period=0",
            "data.validation_path=null",
            "checkpointing.export_hf=false",
        )
    )
    assert result.last["generation/prompt_length_mean"] == 72
