"""Runs with models of the hub: all roles, the same result as with directories, resume, export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from nemo_like.algorithms.distillation.loop import run_distill
from nemo_like.commands.export import export_checkpoint
from nemo_like.config.paths import hub_name
from tests.algorithms.test_runs import read_metrics
from tests.hub_server import COMMIT, Hub, Repository
from tests.recipe import Recipe


@pytest.fixture
def tiny(recipe: Recipe, hub: Hub) -> Repository:
    """The model of the demo."""
    model = recipe.demo / "model"
    files = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    hub.repositories["models/room/tiny"] = Repository(files)
    return hub.repositories["models/room/tiny"]


def test_a_run_with_models_of_the_hub_equals_one_with_directories(
    recipe: Recipe, tiny: Repository, hub: Hub, tmp_path: Path
) -> None:
    def run(model: str, *overrides: str) -> Path:
        return run_distill(
            recipe.distill(
                f"policy.model_name={model}",
                f"policy.tokenizer_name={model}",
                f"distill.teacher={model}",
                "distill.max_num_steps=2",
                "distill.on_policy_fraction=0.5",
                "policy.lora.enabled=true",
                *overrides,
            )
        ).directory.path

    expected = read_metrics(run(f"{recipe.demo}/model", "run_name=directories"))
    found = run("room/tiny")
    assert read_metrics(found) == expected
    downloads = hub.downloads()
    assert len(downloads) == len(set(downloads)), (
        "policy, teacher, tokenizer and sampler share files"
    )

    # The run names the commit, which a resume and an export on another machine use.
    saved = yaml.safe_load((found / "config.yaml").read_text())
    assert Path(saved["policy"]["model_name"]).name == COMMIT
    adapter = json.loads((found / "hf" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "room/tiny"
    shutil.rmtree(tmp_path / "hub_cache")
    run(saved["policy"]["model_name"], "resume=true", "distill.max_num_steps=3")
    shutil.rmtree(tmp_path / "hub_cache")
    export_checkpoint(found, tmp_path / "exported")
    exported = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert exported == (found / "hf" / "model.safetensors").read_bytes()
    assert hub_name(saved["distill"]["teacher"]) == "room/tiny"
