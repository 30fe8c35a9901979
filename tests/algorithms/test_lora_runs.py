"""Runs with LoRA: exact resume from checkpoints that have the adapters only, exports of adapter and
merged model, replay, and runs that start from an adapter.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.grpo.replay import replay_step
from nemo_like.algorithms.preferences.loop import run_dpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.policy.checkpoint.sharded_reader import open_checkpoint
from nemo_like.run.directory import RunDirectory
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.exhaustive import usually
from tests.recipe import Recipe

LORA = (
    "policy.lora.enabled=true",
    "policy.lora.rank=4",
    "policy.lora.alpha=8",
    "policy.optimizer.lr=1e-2",
    "policy.scheduler.warmup_steps=0",
    "checkpointing.save_period=1",
    "checkpointing.keep_latest=5",
)
SHORT = {
    "sft": (
        "sft.max_num_steps=2",
        "sft.val_at_start=false",
        "checkpointing.keep_best=validation/loss",
    ),
    "dpo": ("dpo.max_num_steps=2", "dpo.val_at_start=false"),
    "grpo": (
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "grpo.val_at_start=false",
        "grpo.val_period=2",
        "data.max_validation_rows=2",
        "policy.train_global_batch_size=8",
        "policy.generation.max_new_tokens=8",
        "logger.keep_rollout_tokens=1",
        # The run that continues sends merged weights.
        "policy.lora.weight_sync=adapter",
    ),
}
RUNS: dict[str, Any] = {"sft": run_sft, "dpo": run_dpo, "grpo": run_grpo}


@pytest.mark.parametrize("job", usually(RUNS, "grpo"))
def test_a_lora_run_from_its_start_to_a_run_that_continues_from_its_adapter(
    recipe: Recipe, job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = (recipe.demo / f"{job}_train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows.jsonl").write_text("".join(rows[:100]))
    config = getattr(recipe, job)(*LORA, *SHORT[job], f"data.train_path={tmp_path}/rows.jsonl")

    def run(*, resume: bool = False, run_name: str = job, **lora: Any) -> RunDirectory:
        policy = replace(config.policy, lora=replace(config.policy.lora, **lora))
        changed = replace(config, resume=resume, run_name=run_name, policy=policy)
        return RUNS[job](changed).directory

    directory = run()
    assert "20,480 of 449,792 parameters are trained" in capsys.readouterr().out
    expected = read_metrics(directory.path)
    assert all(line["policy/grad_norm"] > 0 for line in expected)
    files = contents(directory.hf)
    adapter = check_exports(recipe.demo / "model", directory, tmp_path)
    if job == "grpo":
        check_replay(directory)
        # Float32 matrices; the completions of the second step are from the adapters of the first.
        assert sent_bytes(directory) == [4 * 20_480] * 2
        assert max(line["mismatch/gen_kl_k3"] for line in expected) < 1e-6
    check_changed_settings(directory, run)
    if job == "sft":
        check_changed_model(config, directory, tmp_path)

    interrupt_at(directory.path, 1)
    resumed = run(resume=True)
    assert read_metrics(resumed.path) == expected
    assert contents(resumed.hf) == files

    continued = run(
        run_name="continued", adapter_path=f"{resumed.hf}/adapter", weight_sync="merged"
    )
    check_continued(job, continued, expected)
    before = adapter["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    after = adapter_of(continued.hf)["base_model.model.model.layers.0.mlp.down_proj.lora_B.weight"]
    # Up to four more steps of AdamW, each of which changes a value by about the learning rate.
    assert 0 < float((after - before).abs().max()) < 4.4e-2


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[path.relative_to(folder)] = path.read_bytes()
    return files


def adapter_of(hf: Path) -> dict[str, torch.Tensor]:
    return load_file(hf / "adapter" / "adapter_model.safetensors")


def check_exports(base: Path, directory: RunDirectory, folder: Path) -> dict[str, torch.Tensor]:
    """Of the run, and of the command: adapter and merged model, the adapter alone, another step."""
    adapter = adapter_of(directory.hf)
    with open_checkpoint(directory.path / "checkpoints/step_2/policy") as reader:
        assert {f"base_model.model.{name}" for name in reader.shapes} == adapter.keys()
    check_merged(base, directory.hf, adapter)
    # The command merges full matrices, a run the shards of its ranks: here they are the same.
    assert main(["export", str(directory.path), "--out", str(folder / "exported")]) == 0
    check_merged(base, folder / "exported", adapter)
    alone = ["export", str(directory.path), "--adapter", "--out", str(folder / "alone")]
    # The model is not needed.
    assert main([*alone, "policy.model_name=/moved/elsewhere"]) == 0
    exported = contents(folder / "alone")
    assert exported[Path("adapter_model.safetensors")] == (
        (directory.hf / "adapter/adapter_model.safetensors").read_bytes()
    )
    assert json.loads(exported[Path("adapter_config.json")])["r"] == 4
    best = "best" if (directory.path / "best").exists() else "1"
    command = ["export", str(directory.path), "--step", best, "--out", str(folder / "best")]
    assert main([*command, "--adapter"]) == 0
    assert load_file(folder / "best" / "adapter_model.safetensors").keys() == adapter.keys()
    return adapter


def check_merged(base: Path, exported: Path, adapter: dict[str, torch.Tensor]) -> None:
    """The exported weights are those of `base` plus the adapters."""
    settings = json.loads((exported / "adapter" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    weights = load_file(base / "model.safetensors")
    merged = load_file(exported / "model.safetensors")
    num_adapted = 0
    for name, weight in merged.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = weights[name].double()
        if f"{layer}.lora_A.weight" in adapter:
            num_adapted += 1
            matrix_a = adapter[f"{layer}.lora_A.weight"].double()
            matrix_b = adapter[f"{layer}.lora_B.weight"].double()
            assert matrix_b.any()
            wanted = wanted + scale * matrix_b @ matrix_a
        torch.testing.assert_close(weight.double(), wanted, rtol=1e-5, atol=1e-6)
    assert 2 * num_adapted == len(adapter)


def check_replay(directory: RunDirectory) -> None:
    """The recorded second step has its loss and its KL to the base model again."""
    report = replay_step(directory.path, 2)
    for name in ("policy/loss", "policy/grad_norm", "policy/reference_kl_k3"):
        assert report.replayed[name] == pytest.approx(report.logged[name], rel=1e-6, abs=1e-12)
    assert report.replayed["policy/reference_kl_k3"] > 0


def sent_bytes(directory: RunDirectory) -> list[float]:
    """Bytes that the generator received in each step."""
    lines = directory.metrics.read_text().splitlines()
    return [json.loads(line)["weight_sync/bytes"] for line in lines]


def check_changed_settings(directory: RunDirectory, run: Any) -> None:
    """A resume with other adapters is refused before any worker starts, and changes no file."""
    before = directory.metrics.read_bytes()
    for changes, message in (
        (
            {"alpha": 16.0, "rank": 8},
            r"lora\.rank was 4 and is 8; .*lora\.alpha was 8\.0 and is 16",
        ),
        ({"enabled": False}, r"policy\.lora\.enabled was True and is False"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(resume=True, **changes)
    assert directory.metrics.read_bytes() == before


def check_changed_model(config: Any, directory: RunDirectory, folder: Path) -> None:
    """Adapters are not combined with other frozen weights, which no checkpoint has."""
    changed = folder / "changed"
    shutil.copytree(config.policy.model_name, changed)
    weights = changed / "model.safetensors"
    values = load_file(weights)
    save_file({name: each * 1.01 for name, each in values.items()}, weights)
    policy = replace(config.policy, model_name=str(changed))
    with pytest.raises(ConfigError, match=r"changed', whose weights differ .*step_2"):
        run_sft(replace(config, resume=True, policy=policy))
    command = ["export", str(directory.path), "--out", str(folder / "other")]
    assert main([*command, f"policy.model_name={changed}"]) == 2
    # A copy at another place is the same model.
    shutil.copy(Path(config.policy.model_name) / "model.safetensors", weights)
    assert main([*command, f"policy.model_name={changed}"]) == 0


def check_continued(job: str, continued: RunDirectory, first: list[dict[str, float]]) -> None:
    """The run starts with the adapter, in the policy and in the generator; the reference of it is
    the model without adapter.
    """
    line = read_metrics(continued.path)[0]
    if job == "grpo":
        # The generator has the merged weights in the first rollout already.
        assert line["mismatch/gen_kl_k3"] < 1e-6
        assert sent_bytes(continued)[0] > 4 * 400_000
        assert line["policy/reference_kl_k3"] > first[0]["policy/reference_kl_k3"]
    else:
        assert line["policy/loss"] < 0.95 * first[0]["policy/loss"]


def test_peft_and_transformers_load_what_a_run_exports(recipe: Recipe):
    """Logits of base model with adapter, and of the merged model, are equal."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    rslora = ("policy.lora.use_rslora=true", "policy.lora.target_modules=[q_proj,mlp.down_proj]")
    options = ("sft.max_num_steps=1", "sft.val_period=0", "data.validation_path=null")
    config = recipe.sft(*LORA, *rslora, *options, "sft.val_at_start=false")
    hf = run_sft(config).directory.hf
    ids = torch.arange(6, 16)[None]
    base = AutoModelForCausalLM.from_pretrained(recipe.demo / "model")
    initial = base(ids).logits
    model = peft.PeftModel.from_pretrained(base, str(hf / "adapter"))
    adapted = model(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(hf)(ids).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(adapted, initial, atol=1e-3)
    # The other direction: an adapter that PEFT has saved.
    saved = hf.parent / "saved_by_peft"
    model.save_pretrained(str(saved))
    changed = replace(config.policy.lora, adapter_path=str(saved))
    config = replace(config, run_name="continued", policy=replace(config.policy, lora=changed))
    assert run_sft(config).last["policy/grad_norm"] > 0
