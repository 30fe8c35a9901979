"""Runs with rows whose loss is not finite: skipped, counted, recorded, stopped after too many, and
resumed behind them.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.environments.reward import RewardSample
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics, Sum
from nemo_like.policy.isolation import random_rows
from nemo_like.policy.policy import ShardedBatch
from nemo_like.run.directory import RunDirectory
from nemo_like.training.run import TrainingRun
from nemo_like.training.skipped_steps import SkippedStepsError, TrainedBatch, train_steps
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

BAD = "@"
_BATCH = 16
_LINES = range(_BATCH, 3 * _BATCH)
"""Steps 2 and 3 of a run that does not shuffle."""


def poisoned_model(demo: Path, out: Path) -> Path:
    """The demo's model with one more token, of finite weights, whose rows have a loss of NaN; other
    rows never notice.

    Only the token's embedding has dimension `last`, and only one neuron of the first MLP reads it,
    with weights whose product overflows.
    """
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    tokenizer.add_tokens([BAD])
    (bad_id,) = tokenizer.convert_tokens_to_ids([BAD])
    original = LlamaForCausalLM.from_pretrained(demo / "model")
    config = LlamaConfig.from_pretrained(demo / "model", vocab_size=bad_id + 400)
    assert bad_id not in np.concatenate(random_rows(config.vocab_size)), (
        "the isolation check must not see the token"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.load_state_dict(
        {
            name: value
            for name, value in original.state_dict().items()
            if "embed" not in name and "lm_head" not in name
        },
        strict=False,
    )
    last = config.hidden_size - 1
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:bad_id] = original.model.embed_tokens.weight[:bad_id]
        embedding[:, last] = 0.0
        embedding[bad_id, last] = 10.0
        model.model.norm.weight[last] = 0.0
        layers: Any = model.model.layers
        for layer in layers:
            attention, mlp = layer.self_attn, layer.mlp
            for reader in (
                attention.q_proj,
                attention.k_proj,
                attention.v_proj,
                mlp.gate_proj,
                mlp.up_proj,
            ):
                reader.weight[:, last] = 0.0
            for writer in (attention.o_proj, mlp.down_proj):
                writer.weight[last] = 0.0
        first = layers[0]
        first.post_attention_layernorm.weight[last] = 1e18
        for reader in (first.mlp.gate_proj, first.mlp.up_proj):
            reader.weight[0] = 0.0
            reader.weight[0, last] = 1e18
        first.mlp.down_proj.weight[:, 0] = 0.0
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


@pytest.fixture
def poisoned(recipe: Recipe) -> tuple[str, ...]:
    """Overrides of an SFT run of 4 steps, of which steps 2 and 3 each have one bad row: lines 20
    and 40.
    """
    lines = (recipe.demo / "sft_train.jsonl").read_text().splitlines()[: 4 * _BATCH]
    for number in (20, 40):
        row = json.loads(lines[number - 1])
        lines[number - 1] = json.dumps({**row, "prompt": row["prompt"] + BAD})
    data = recipe.folder / "poisoned.jsonl"
    data.write_text("\n".join(lines) + "\n")
    return (
        f"policy.model_name={poisoned_model(recipe.demo, recipe.folder / 'poisoned')}",
        f"data.train_path={data}",
        "data.shuffle=false",
        "sft.val_period=0",
        "sft.val_at_start=false",
        "policy.scheduler.warmup_steps=0",
    )


def records(run: Path, step: int) -> list[dict]:
    return [
        json.loads(line)
        for line in (run / "skipped" / f"step_{step}.jsonl").read_bytes().splitlines()
    ]


def test_sft_skips_records_and_counts_and_a_stopped_run_resumes_behind_the_bad_rows(
    recipe: Recipe, poisoned
):
    straight = run_sft(recipe.sft(*poisoned, "run_name=straight"))
    metrics = read_metrics(straight.directory.path)
    assert [line["policy/skipped_steps"] for line in metrics] == [0, 1, 1, 0]
    assert [line["progress/num_skipped_steps"] for line in metrics] == [0, 1, 2, 2]
    assert [line["policy/loss"] is None for line in metrics] == [False, True, True, False]
    for step, line_number in ((2, 20), (3, 40)):
        (record,) = records(straight.directory.path, step)
        assert record["source"].endswith(f"poisoned.jsonl:{line_number}")
        assert record["cause"] == "loss" and record["loss"] is None and BAD in record["text"]
        assert record["row"] == line_number - 1 - _BATCH * (step - 1)
    assert sorted(path.name for path in (straight.directory.path / "skipped").iterdir()) == [
        "step_2.jsonl",
        "step_3.jsonl",
    ]

    strict = (
        *poisoned,
        "run_name=strict",
        "policy.max_skipped_steps=0",
        "checkpointing.save_period=0",
    )
    run = recipe.folder / "strict"
    for step in (2, 3):
        with pytest.raises(
            SkippedStepsError, match=rf"up to step {step}, more than policy.max_skipped_steps=0"
        ) as error:
            run_sft(recipe.sft(*strict, *(("resume=true",) if step > 2 else ())))
        assert f"Step {step} was saved" in str(error.value)
        assert (run / "latest").read_text().strip() == f"checkpoints/step_{step}"
        assert not (run / "hf").exists()
    resumed = run_sft(recipe.sft(*strict, "resume=true"))
    names = (
        "policy/loss",
        "policy/grad_norm",
        "policy/lr",
        "progress/num_skipped_steps",
        "policy/num_tokens",
    )
    found = [{name: line[name] for name in names} for line in read_metrics(run)]
    assert found == [{name: line[name] for name in names} for line in metrics]
    assert (resumed.directory.hf / "model.safetensors").read_bytes() == (
        straight.directory.hf / "model.safetensors"
    ).read_bytes()


def large_reward(sample: RewardSample) -> float:
    """A finite reward that makes gradients overflow, for prompts of one leading digit."""
    return float(sum(map(ord, sample.completion))) * (
        1e25 if sample.prompt.startswith("1") else 1e-3
    )


def test_grpo_skips_an_update_with_gradients_that_overflow_and_lists_its_rows(recipe: Recipe):
    lines = [
        json.loads(line) for line in (recipe.demo / "grpo_train.jsonl").read_bytes().splitlines()
    ]
    starting = [row for row in lines if row["prompt"].startswith("1")]
    others = [row for row in lines if not row["prompt"].startswith("1")]
    chosen = others[:8] + starting[:1] + others[8:15] + others[15:23]
    data = recipe.folder / "large.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    result = run_grpo(
        recipe.grpo(
            f"data.train_path={data}",
            "data.shuffle=false",
            "grpo.max_num_steps=3",
            "policy.generation.max_new_tokens=6",
            "grpo.val_at_start=false",
            "grpo.val_period=0",
            "grpo.advantage.normalize=none",
            "reward.functions.digits.path=tests.training.test_skipped_steps.large_reward",
        )
    )
    metrics = read_metrics(result.directory.path)
    assert [line["policy/skipped_steps"] for line in metrics] == [0, 1, 0], (
        "one of the two updates of step 2"
    )
    assert metrics[2]["policy/loss"] is not None and metrics[2]["mismatch/gen_kl_k3"] < 1e-6
    rows = records(result.directory.path, 2)
    assert {row["update"] for row in rows} == {0} and {row["cause"] for row in rows} == {"gradient"}
    assert len(rows) == 16, "all rows of the update, as every loss is finite"
    assert {row["source"].rsplit(":", 1)[1] for row in rows} == {"9", "10", "11", "12"}
    assert max(abs(row["advantages"]) for row in rows) > 1e25
    assert all(math.isfinite(row["loss"]) for row in rows)


def test_weights_that_overflow_are_never_saved_pushed_or_exported(recipe: Recipe, capsys):
    options = (
        "checkpointing.save_period=1",
        "checkpointing.keep_latest=1",
        "grpo.val_at_start=false",
        "grpo.val_period=0",
        "grpo.num_prompts_per_step=4",
        "grpo.max_num_steps=3",
        "policy.generation.max_new_tokens=6",
        "data.validation_path=null",
    )
    run = run_grpo(recipe.grpo(*options, "grpo.max_num_steps=1")).directory.path
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_1"]
    config = recipe.grpo(*options)  # writes the YAML
    huge = (
        "policy.optimizer.lr=1e38",
        "policy.scheduler.kind=constant",
        "policy.scheduler.warmup_steps=0",
        "resume=true",
    )
    code = main(["grpo", "--config", str(recipe.folder / "grpo.yaml"), *options, *huge])
    shown = capsys.readouterr()
    assert code == 1
    assert (
        "error: step 2: the policy's weights are not finite" in shown.err
        and "Traceback" not in shown.err
    )
    assert f"resume=true continues from {run}/checkpoints/step_1." in shown.err
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_1"]
    assert not (run / "rollouts" / "step_2.jsonl").exists()
    resumed = run_grpo(recipe.grpo(*options, "resume=true"))
    assert resumed.step == config.grpo.max_num_steps
    _refuses_to_export(resumed.directory.path, recipe.folder / "out", capsys)
    assert (
        main(
            [
                "grpo",
                "--config",
                str(recipe.folder / "grpo.yaml"),
                *options,
                "grpo.max_num_steps=4",
                "resume=true",
            ]
        )
        == 1
    )
    error = capsys.readouterr().err
    assert (
        "step_3/policy has weights or optimizer moments that are not finite" in error
        and "Traceback" not in error
    )


def _refuses_to_export(run: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Put a NaN into the newest checkpoint; nothing is written of it."""
    (folder,) = (run / "checkpoints").iterdir()
    file = folder / "policy" / "rank_00000_000.safetensors"
    with file.open("r+b") as stream:
        (header_bytes,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(header_bytes))
        name = next(name for name in header if name.startswith("weight/") and "mlp" in name)
        assert header[name]["dtype"] == "F32"
        # In place: a checkpoint with a file of another size is refused as incomplete.
        stream.seek(8 + header_bytes + header[name]["data_offsets"][0])
        stream.write(struct.pack("<f", math.nan))
    assert main(["export", str(folder), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert "contains NaN or infinity" in error and "mlp" in error and "Traceback" not in error
    assert not out.exists() and not list(out.parent.glob("out*"))
    manifest = folder / "manifest.json"
    entries = json.loads(manifest.read_text())
    for entry_name, entry in entries["files"].items():
        entry["sha256"] = hashlib.sha256((folder / entry_name).read_bytes()).hexdigest()
    manifest.write_text(json.dumps(entries, indent=1))


def test_skipped_steps_of_an_earlier_pass_over_a_rollout_count(tmp_path: Path) -> None:
    passes = [[1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.0]]

    def train(*args: object, **kwargs: object) -> list[Metrics]:
        return [
            {"policy/skipped_steps": Sum(value), "policy/num_tokens": Sum(1.0)}
            for value in passes.pop(0)
        ]

    run = SimpleNamespace(
        policy=SimpleNamespace(train=train, skipped_steps=lambda sharded: []),
        log=SimpleNamespace(counters={}),
        num_skipped_in_a_row=0,
        files=SimpleNamespace(directory=RunDirectory(tmp_path)),
        encoder=SimpleNamespace(tokenizer=None),
        progress=SimpleNamespace(print_line=print),
    )
    for epoch, expected in ((0, 3), (1, 3)):
        batch = TrainedBatch(step=1, batch=BatchedDataDict(), locations=[], columns={}, epoch=epoch)
        train_steps(cast(TrainingRun, run), cast(ShardedBatch, None), batch, cast(Loss, None))
        assert run.num_skipped_in_a_row == expected
    assert run.log.counters == {
        "num_trained_tokens": 8.0,
        "num_skipped_steps": 4.0,
        "num_skipped_steps_in_a_row": 0.0,
    }
