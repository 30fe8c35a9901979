"""`nemo-like export`: any checkpoint of a run becomes the model that the run itself would have
exported.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from tests.recipe import Recipe


def test_a_run_and_a_step_of_it_export_to_the_bit(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = (
        "sft.max_num_steps=2",
        "checkpointing.save_period=1",
        "policy.ema.enabled=true",
        "policy.ema.decay=0.5",
        "policy.freeze=[model.embed_tokens.*]",
    )
    run = run_sft(recipe.sft(*options)).directory
    assert main(["export", str(run.path), "--out", str(tmp_path / "latest")]) == 0
    expected = {path.name: path.read_bytes() for path in run.hf.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "latest").iterdir()} == expected
    assert main(["export", str(run.path), "--ema", "--out", str(tmp_path / "averaged")]) == 0
    averaged = {path.name: path.read_bytes() for path in run.hf_ema.iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "averaged").iterdir()} == averaged
    assert averaged["model.safetensors"] != expected["model.safetensors"]
    assert (
        main(["export", str(run.path / "checkpoints/step_1"), "--out", str(tmp_path / "first")])
        == 0
    )
    assert (tmp_path / "first/model.safetensors").read_bytes() != expected["model.safetensors"]
    capsys.readouterr()

    victim = tmp_path / "victim"
    victim.mkdir()
    (tmp_path / "linked.tmp").symlink_to(victim)
    assert main(["export", str(run.path), "--out", str(tmp_path / "linked")]) == 0
    assert not list(victim.iterdir()) and (tmp_path / "linked" / "model.safetensors").is_file()
    capsys.readouterr()
    (tmp_path / "file").write_text("x")
    assert main(["export", str(run.path), "--out", str(tmp_path / "file" / "model")]) == 2
    assert (
        f"--out {tmp_path}/file/model cannot be written: Not a directory" in capsys.readouterr().err
    )
    assert main(["export", str(run.path), "--out", str(tmp_path / "latest")]) == 2
    assert "exists already; choose another --out" in capsys.readouterr().err
    assert main(["export", str(run.path / "hf"), "--out", str(tmp_path / "other")]) == 2
    assert "is neither a run directory nor a step folder; give" in capsys.readouterr().err
    next((run.path / "checkpoints/step_1/policy").glob("rank_*")).unlink()
    assert (
        main(["export", str(run.path / "checkpoints/step_1"), "--out", str(tmp_path / "other")])
        == 2
    )
    assert "is missing; the checkpoint in" in capsys.readouterr().err
    alone = ["--adapter", "--out", str(tmp_path / "other")]
    assert main(["export", str(run.path), *alone]) == 2
    assert "was trained without LoRA (policy.lora.enabled is false)" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_run_that_continues_without_averages_leaves_no_old_ones(recipe: Recipe):
    first = run_sft(recipe.sft("sft.max_num_steps=1", "policy.ema.enabled=true")).directory
    assert first.hf_ema.is_dir()
    last = run_sft(recipe.sft("sft.max_num_steps=2", "resume=true")).directory
    assert last.path == first.path
    assert last.hf.is_dir()
    assert not last.hf_ema.exists()
