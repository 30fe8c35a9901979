"""SFT with each `data.batching.kind`: resume, ends of epochs, the loss, and messages."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_like.algorithms.sft.data import open_loader, open_source
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.data.streaming.planner import StreamLoader
from nemo_like.training.model_files import open_model_spec
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

KINDS = ("pool", "online", "token_budget", "dyn_bsz")
# A streaming loader needs the length of every row before the first step; without a limit, encoding
# the 20,000 rows of the demo takes most of the time of a run.
OPTIONS = (
    "data.max_train_rows=200",
    "data.max_validation_rows=8",
    "sft.val_at_start=false",
    "sft.val_period=0",
    "checkpointing.export_hf=false",
    "checkpointing.keep_latest=9",
)


def options(kind: str, *more: str) -> tuple[str, ...]:
    return (*OPTIONS, f"data.batching.kind={kind}", "data.batching.microbatches_per_step=2", *more)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "packed") for kind in KINDS),
        ("pool", "padded"),
        pytest.param("online", "padded", marks=pytest.mark.exhaustive),
    ],
)
def test_a_resumed_run_logs_the_metrics_of_the_uninterrupted_one(
    recipe: Recipe, kind: str, layout: str
) -> None:
    changes = options(kind, "data.batching.window_rows=24")
    if layout == "padded":
        changes += ("policy.sequence_packing.enabled=false", "policy.dynamic_batching.enabled=true")
        # The rows of the window, of about 60 tokens, have the tokens of four microbatches.
        changes += ("policy.dynamic_batching.train_mb_tokens=320",)
    run = run_sft(recipe.sft(*changes)).directory
    expected = read_metrics(run.path)
    lengths = run.lengths.read_bytes()
    interrupt_at(run.path, 2)
    resumed = run_sft(recipe.sft(*changes, "resume=true")).directory
    assert read_metrics(resumed.path) == expected
    assert resumed.lengths.read_bytes() == lengths
    assert [line["step"] for line in expected] == [1, 2, 3, 4]
    for line in expected:
        assert line["packing/num_microbatches"] == 2
        assert line["packing/num_deferred"] <= (24 if layout == "packed" else 64)


@pytest.mark.parametrize("tail", ["emit", "drop"])
def test_a_run_over_epochs_ends_after_its_last_step(
    recipe: Recipe, tail: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = options(
        "online",
        f"data.batching.tail={tail}",
        "data.max_train_rows=50",
        "sft.max_num_steps=null",
        "sft.max_num_epochs=2",
        "policy.scheduler.kind=constant",
    )
    result = run_sft(recipe.sft(*changes))
    lines = read_metrics(result.directory.path)
    records = [json.loads(line) for line in result.directory.lengths.read_bytes().splitlines()]
    num_rows = sum(len(record["lengths"]) for record in records)
    assert result.step == len(lines) == len(records)
    assert "validation/loss" in lines[-1], "the last step was recognized as the last"
    assert (result.directory.path / f"checkpoints/step_{result.step}").exists()
    if tail == "emit":
        assert num_rows == 2 * 50
    else:
        # The rest of the last epoch has no step that could log it.
        num_dropped = int(sum(line["packing/num_dropped"] for line in lines))
        num_left = 2 * 50 - num_rows - num_dropped
        assert num_left > 0
        assert f"leaves out {num_left} rows of the last epoch" in capsys.readouterr().out
        assert {line["packing/num_dummies"] for line in lines} == {0}
    # A finished run has nothing to resume.
    again = run_sft(recipe.sft(*changes, "resume=true"))
    assert again.step == result.step
    assert read_metrics(again.directory.path) == lines


def test_wrapped_epochs_reach_the_number_of_steps(recipe: Recipe) -> None:
    changes = options("pool", "data.batching.tail=wrap", "data.max_train_rows=20")
    lines = read_metrics(run_sft(recipe.sft(*changes)).directory.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[-1]["data/epoch"] >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_token_mean_of_the_rows_of_the_step(recipe: Recipe, kind: str) -> None:
    """The same rows as one batch of the fixed kind have the same loss and gradient norm."""
    changes = options(kind, "sft.max_num_steps=1")
    config = recipe.sft(*changes)
    source = open_source(config)
    loader = open_loader(config, source, open_model_spec(config.policy))
    assert isinstance(loader, StreamLoader)
    next(loader)
    rows = [source.data.train[row] for row in loader.planned.rows]
    streamed = read_metrics(run_sft(config).directory.path)[-1]
    path = recipe.folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fixed = recipe.sft(
        *OPTIONS,
        "run_name=fixed",
        "sft.max_num_steps=1",
        f"data.train_path={path}",
        f"policy.train_global_batch_size={len(rows)}",
    )
    complete = read_metrics(run_sft(fixed).directory.path)[-1]
    for name in ("policy/loss", "policy/grad_norm", "validation/loss"):
        assert np.isclose(streamed[name], complete[name], rtol=2e-5), name


@pytest.mark.parametrize("method", ["sqrt", "linear"])
def test_the_learning_rate_follows_the_batch_size(recipe: Recipe, method: str) -> None:
    changes = options(
        "online",
        f"policy.scheduler.batch_size_scaling={method}",
        "policy.scheduler.base_batch_size=10",
        "policy.scheduler.kind=constant",
        "policy.scheduler.warmup_steps=0",
    )
    lines = read_metrics(run_sft(recipe.sft(*changes)).directory.path)
    sizes = [line["policy/num_rows"] for line in lines]
    for line, size in zip(lines, sizes, strict=True):
        scale = size / 10 if method == "linear" else (size / 10) ** 0.5
        assert np.isclose(line["policy/lr"], 1e-3 * scale, rtol=1e-9)


def test_scaling_needs_a_base_batch_size(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="batch size for which"):
        recipe.sft("policy.scheduler.batch_size_scaling=linear")


def test_checkpoints_of_fixed_and_streamed_batches_are_not_mixed(recipe: Recipe) -> None:
    run_sft(recipe.sft(*OPTIONS, "sft.max_num_steps=2"))
    with pytest.raises(ConfigError, match=r"written with data\.batching\.kind=fixed"):
        run_sft(recipe.sft(*options("online"), "resume=true"))
    run_sft(recipe.sft(*options("online"), "sft.max_num_steps=2", "run_name=streamed"))
    with pytest.raises(ConfigError, match=r"another data\.batching\.kind than fixed"):
        run_sft(recipe.sft(*OPTIONS, "resume=true", "run_name=streamed"))


def test_rows_above_the_budget_follow_the_oversize_policy(recipe: Recipe) -> None:
    changes = options(
        "dyn_bsz", "policy.sequence_packing.train_mb_tokens=32", "sft.max_num_steps=2"
    )
    with pytest.raises(ConfigError, match="would stop the run"):
        recipe.sft(*changes)
    lines = read_metrics(
        run_sft(recipe.sft(*changes, "policy.oversize_rows=singleton")).directory.path
    )
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("policy.sequence_packing.enabled=false", "fills microbatches up to a token budget"),
        ("sft.max_num_steps=null", "number of steps is not known in advance"),
        ("data.batching.count_mode=effective", "dyn_bsz supports"),
        ("data.last_batch=drop", r"set data\.batching\.tail to drop"),
        ("data.batching.window_rows=0", "window_rows"),
        ("data.batching.kind=odb", "one of fixed, pool, online"),
    ],
)
def test_wrong_keys_are_named(recipe: Recipe, change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.sft(*options("online"), change)


def test_keys_without_effect_are_errors(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"data\.batching\.window_rows is 8"):
        recipe.sft("data.batching.window_rows=8")
