"""`nemo-like chaos`: what it injects, and that runs with faults equal the undisturbed one."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from nemo_like.cli import main
from nemo_like.commands.chaos import make_plan
from nemo_like.commands.faults import Fault
from nemo_like.config.load import to_yaml
from tests.recipe import Recipe


def write(recipe: Recipe, *overrides: str) -> str:
    path = recipe.folder / "config.yaml"
    path.write_text(to_yaml(recipe.sft(*overrides)))
    return str(path)


def test_every_fault_is_injected_about_as_often_and_some_during_a_save() -> None:
    kinds = [("kill", "policy"), ("stop", "policy"), ("kill", "driver"), ("full_disk", "policy")]
    faults = [Fault(*each, during_save=each[0] == "full_disk") for each in kinds]
    plan = make_plan(faults, 50, random.Random(0))
    counts = [sum(each[:2] == kind for each in plan) for kind in kinds]
    assert sum(counts) == 50 and max(counts) - min(counts) <= 1
    during_save = [each for each in plan if each.during_save]
    assert {each.kind for each in during_save} == {"kill", "full_disk"}
    assert all(each.during_save for each in plan if each.kind == "full_disk")


def test_a_run_without_ray_or_of_gpus_on_several_nodes_is_refused(
    recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["chaos", write(recipe), "--kills", "1"]) == 2
    assert "chaos needs cluster.backend=ray" in capfd.readouterr().err
    gpus = ("cluster.backend=ray", "cluster.num_nodes=2", "cluster.gpus_per_node=1")
    assert main(["chaos", write(recipe, *gpus), "--kills", "1"]) == 2
    assert "set cluster.num_nodes=1" in capfd.readouterr().err
    (recipe.folder / "sft_chaos").mkdir()
    assert main(["chaos", write(recipe, "cluster.backend=ray")]) == 2
    assert "sft_chaos exists; remove it, or set another run_name" in capfd.readouterr().err


def test_unknown_kinds_of_faults_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["chaos", "config.yaml", "--kinds", "kill,burn"])
    assert "'burn' is not one of kill, stop, delay, full_disk" in capfd.readouterr().err


@pytest.mark.exhaustive
def test_a_run_with_faults_equals_the_undisturbed_one(
    recipe: Recipe, capfd: pytest.CaptureFixture[str]
) -> None:
    options = (
        "cluster.backend=ray",
        "cluster.cpus_per_worker=0.5",
        "sft.max_num_steps=12",
        "sft.val_period=0",
        "sft.val_at_start=false",
        "logger.tensorboard=false",
    )
    command = ["chaos", write(recipe, *options), "--kills", "2", "--kinds", "kill"]
    code = main([*command, "--targets", "policy,driver"])
    output = capfd.readouterr()
    assert code == 0, output
    folder: Path = recipe.folder / "sft_chaos"
    report = json.loads((folder / "chaos.json").read_text())
    assert report["problems"] == []
    starts = {each["fault"]: each["num_starts"] for each in report["outcomes"]}
    assert starts == {"kill driver": 1, "kill policy": 0}
    assert "equal to the undisturbed run" in output.out
