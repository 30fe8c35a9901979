"""A Ray cluster whose head, without CPUs, does not share the run directory with the workers."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from nemo_like.cli import main
from nemo_like.config.load import to_yaml
from tests.distributed.ray_cluster import cluster_of
from tests.recipe import Recipe


def can_unshare() -> bool:
    return shutil.which("unshare") is not None and (
        subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True
        ).returncode
        == 0
    )


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """The cluster's address. Its workers have an empty file system of their own in
    `<tmp_path>/separate`.
    """
    if not can_unshare():
        pytest.skip("needs unshare and the permission to mount")
    (tmp_path / "separate").mkdir()
    with cluster_of({"num_cpus": 0}, {"num_cpus": 2}, separate=tmp_path / "separate") as cluster:
        yield str(cluster.address)


def contents(run: Path) -> dict[str, bytes]:
    paths = (path for path in run.rglob("*") if path.is_file() and path.name != "driver.log")
    return {str(path.relative_to(run)): path.read_bytes() for path in paths}


@pytest.mark.exhaustive
def test_a_head_that_does_not_share_the_workers_disk_refuses_and_loses_nothing(
    recipe: Recipe, address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shared, separate = recipe.folder / "shared", recipe.folder / "separate"
    config = recipe.folder / "two_nodes.yaml"
    options = ("cluster.backend=ray", "cluster.cpus_per_worker=1", "cluster.workers_per_node=2")
    steps = (
        "sft.val_period=0",
        "sft.val_at_start=false",
        "checkpointing.save_period=1",
        "checkpointing.export_hf=false",
    )
    config.write_text(
        to_yaml(recipe.sft(*options, *steps, f"output_dir={shared}", "sft.max_num_steps=2"))
    )
    monkeypatch.setenv("RAY_ADDRESS", address)

    def run(*overrides: str) -> int:
        try:
            return main(["sft", "--config", str(config), *overrides])
        finally:
            ray.shutdown()

    assert run() == 0, capfd.readouterr().err
    assert (shared / "sft" / "latest").read_text() == "checkpoints/step_2\n"
    weights = sorted(path.name for path in (shared / "sft/checkpoints/step_2/policy").iterdir())
    assert weights == ["manifest.json", "rank_00000_000.safetensors", "rank_00001_000.safetensors"]

    shutil.copytree(shared / "sft", separate / "sft")
    before = contents(separate / "sft")
    capfd.readouterr()
    one_worker = "cluster.workers_per_node=1"
    code = run(f"output_dir={separate}", "resume=true", "sft.max_num_steps=4", one_worker)
    errors = capfd.readouterr().err
    assert code == 2, errors
    error = next(line for line in errors.splitlines() if line.startswith("error: "))
    for part in (
        "output_dir: policy worker 0 on node ",
        f"do not share {separate}/sft",
        "mount at the same path",
    ):
        assert part in error
    assert "Traceback" not in errors
    assert contents(separate / "sft") == before, (
        "both checkpoints, latest, metrics and config.yaml are as they were"
    )
