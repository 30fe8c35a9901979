"""Reward model runs: learning, exact resume, the best checkpoint, files, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_like.algorithms.preferences.data import collate_pairs, open_source
from nemo_like.algorithms.preferences.loop import run_rm
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.commands.export import export_checkpoint
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe


def write_pairs(folder: Path, rows: list[dict]) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_resumed_run_equals_a_straight_one_and_the_accuracy_grows(recipe: Recipe, tmp_path: Path):
    options = (
        "policy.optimizer.lr=1e-3",
        "checkpointing.keep_latest=5",
        "checkpointing.keep_best=validation/accuracy",
    )
    straight = run_rm(recipe.rm(*options))
    run = straight.directory.path
    expected = read_metrics(run)
    weights = (straight.directory.hf / "model.safetensors").read_bytes()
    assert [line["step"] for line in expected] == [0, 1, 2, 3, 4]
    assert all(line["policy/num_rows"] == 16 for line in expected[1:])
    assert expected[-1]["validation/accuracy"] > 0.9
    assert expected[-1]["validation/margin"] > expected[0]["validation/margin"]
    assert expected[-1]["validation/loss"] < expected[0]["validation/loss"]
    accuracies = {line["step"]: line.get("validation/accuracy", 0.0) for line in expected[1:]}
    best = max(accuracies, key=lambda step: accuracies[step])
    assert (run / "best").read_text().strip() == f"checkpoints/step_{best}"
    assert_files(straight.directory.hf, expected[-1]["validation/accuracy"], recipe)
    exported = export_checkpoint(run, tmp_path / "exported")
    assert exported.name == "step_4"
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == weights
    interrupt_at(run, 2)
    resumed = run_rm(recipe.rm(*options, "resume=true"))
    assert read_metrics(resumed.directory.path) == expected
    assert (resumed.directory.hf / "model.safetensors").read_bytes() == weights
    continued = f"policy.model_name={straight.directory.hf}"
    more = run_rm(recipe.rm(continued, "run_name=more", "rm.max_num_steps=1"))
    first = read_metrics(more.directory.path)[0]
    assert first["validation/accuracy"] == expected[-1]["validation/accuracy"]
    with pytest.raises(ConfigError, match="a reward model, which has a score head"):
        run_sft(recipe.sft(continued))
    report = validate(recipe.sft(continued))
    assert any("a reward model" in problem for problem in report.problems)


def test_a_run_with_adapters_trains_them_and_the_score_head(recipe: Recipe, tmp_path: Path):
    options = (
        "policy.lora.enabled=true",
        "policy.lora.rank=4",
        "policy.lora.alpha=8",
        "policy.optimizer.lr=1e-2",
        "rm.max_num_steps=3",
        "checkpointing.save_period=2",
    )
    straight = run_rm(recipe.rm(*options))
    run = straight.directory.path
    expected = read_metrics(run)
    assert expected[-1]["validation/accuracy"] > 0.9
    assert_files(straight.directory.hf, expected[-1]["validation/accuracy"], recipe)
    files = ("model.safetensors", "adapter/adapter_model.safetensors")
    contents = [(straight.directory.hf / name).read_bytes() for name in files]
    settings = json.loads((straight.directory.hf / "adapter" / "adapter_config.json").read_text())
    assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
    export_checkpoint(run, tmp_path / "exported")
    assert [(tmp_path / "exported" / name).read_bytes() for name in files] == contents
    export_checkpoint(run, tmp_path / "adapter", adapter_only=True)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes() == contents[1]
    interrupt_at(run, 2)
    run_rm(recipe.rm(*options, "resume=true"))
    assert read_metrics(run) == expected
    assert [(straight.directory.hf / name).read_bytes() for name in files] == contents
    adapter = f"policy.lora.adapter_path={tmp_path / 'adapter'}"
    more = run_rm(recipe.rm(*options, adapter, "run_name=more", "rm.max_num_steps=1"))
    first = read_metrics(more.directory.path)[0]
    assert first["validation/accuracy"] == expected[-1]["validation/accuracy"]
    report = validate(recipe.sft(*options[:3], adapter))
    assert any("the adapter of a reward model" in problem for problem in report.problems)


@torch.no_grad()
def assert_files(directory: Path, accuracy: float, recipe: Recipe) -> None:
    """Transformers loads the model and has the run's validation accuracy on padded batches."""
    config = json.loads((directory / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    model = AutoModelForSequenceClassification.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id
    source = open_source(recipe.rm())
    num_right = 0
    num_pairs = 0
    for pairs in source.validation_batches()[""]:
        batch = collate_pairs(pairs)
        rows = [row.tolist() for row in batch["input_ids"]]
        padded = tokenizer.pad({"input_ids": rows}, return_tensors="pt")
        scores = model(**padded).logits[:, 0]
        num_right += int((scores[0::2] > scores[1::2]).sum())
        num_pairs += len(pairs)
    assert num_right / num_pairs == pytest.approx(accuracy)


def test_margins_are_read_and_checked(recipe: Recipe, tmp_path: Path):
    row = {"prompt": "1+1", "chosen": "#### 2", "rejected": "#### 3"}
    path = write_pairs(tmp_path, [{**row, "margin": 0.5}, row, {**row, "margin": 2}])
    keys = (f"data.train_path={path}", "policy.train_global_batch_size=3", "data.shuffle=false")
    source = open_source(recipe.rm(*keys))
    batch = collate_pairs(next(source.loader()))
    assert batch["margin"].dtype == np.float32
    assert batch["margin"].tolist() == [0.5, 0.5, 0, 0, 2, 2]
    # 1e300 is infinite in float32, and the last one does not fit into a float.
    for margin in ("high", "nan", True, [1], 1e300, float("nan"), 10**400):
        write_pairs(tmp_path, [row, {**row, "margin": margin}])
        with pytest.raises(ConfigError, match=r"pairs\.jsonl:2: column 'margin' is .*not a finite"):
            open_source(recipe.rm(*keys))


def test_margins_of_a_table_are_numbers_or_empty(recipe: Recipe, tmp_path: Path):
    path = tmp_path / "pairs.csv"
    start = "1+1,#### 2,#### 3"
    path.write_text(f"prompt,chosen,rejected,margin\n{start},0.5\n{start},\n{start},-2\n")
    keys = (f"data.train_path={path}", "policy.train_global_batch_size=3", "data.shuffle=false")
    batch = collate_pairs(next(open_source(recipe.rm(*keys)).loader()))
    assert batch["margin"].tolist() == [0.5, 0.5, 0, 0, -2, -2]


def test_commands_know_the_job(recipe: Recipe, capsys: pytest.CaptureFixture[str]):
    config = recipe.rm()
    assert not validate(config).problems
    assert main(["plan", "--config", str(recipe.folder / "rm.yaml")]) == 0, capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"quantization is nf4, which reward models do not have"):
        recipe.rm("policy.lora.enabled=true", "policy.lora.quantization=nf4")
    with pytest.raises(ConfigError, match=r"data\.train_on is all"):
        recipe.rm("data.train_on=all")
