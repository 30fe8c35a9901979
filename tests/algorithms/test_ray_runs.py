"""Runs of the command on a local Ray cluster, two policy workers: the main job, a killed worker,
and no room.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_like.config.load import to_yaml
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe

_REPOSITORY = Path(__file__).parents[2]


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "nemo_like", "grpo", "--config", str(config), *overrides]


def environment() -> dict[str, str]:
    """Rewards of the tests must be importable in the workers too."""
    hidden = {"RAY_ADDRESS"}
    return {name: value for name, value in os.environ.items() if name not in hidden} | {
        "PYTHONPATH": str(_REPOSITORY)
    }


@pytest.fixture
def config(recipe: Recipe) -> Path:
    """GRPO on Ray with two policy workers of half a core each, and packing on."""
    path = recipe.folder / "ray.yaml"
    path.write_text(
        to_yaml(
            recipe.grpo(
                "cluster.backend=ray",
                "cluster.workers_per_node=2",
                "cluster.cpus_per_worker=0.5",
                "grpo.max_num_steps=6",
                "grpo.val_period=0",
                "grpo.val_at_start=false",
            )
        )
    )
    return path


def policy_pids(run: Path) -> list[int]:
    """Processes of the policy's workers, as the run's own log names them."""
    log = (run / "logs" / "driver.log").read_text()
    return [int(pid) for pid in re.findall(r"of the policy group: pid (\d+)", log)]


def wait_for_step(
    process: subprocess.Popen[str], metrics: Path, step: int, timeout_s: float = 240
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= step:
            return
        time.sleep(0.1)
    process.kill()
    raise AssertionError(f"step {step} was not reached: {process.communicate()}")


def test_a_killed_worker_stops_the_run_with_one_paragraph_and_resume_goes_on(
    config: Path, recipe: Recipe
):
    run = recipe.folder / "grpo"
    process = subprocess.Popen(
        command(config),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_step(process, run / "metrics.jsonl", 3)
    victims = policy_pids(run)
    assert len(victims) == 2
    os.kill(victims[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    paragraph = next(line for line in errors.splitlines() if line.startswith("error: "))
    for word in ("worker", "policy", "pid", "resume=true"):
        assert word in paragraph, errors
    assert "Traceback" not in errors.split("The last lines of its log")[0]

    resumed = subprocess.run(
        command(config, "resume=true"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert resumed.returncode == 0, resumed.stderr
    metrics = read_metrics(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert all(line["packing/utilization"] > 0 and line["policy/grad_norm"] > 0 for line in metrics)
    assert json.loads((run / "hf" / "config.json").read_text())["model_type"]
    assert "packed" in resumed.stdout, "the packing efficiency of each step is in the log"


def test_more_workers_than_the_cluster_has_is_one_message(config: Path):
    cores = len(os.sched_getaffinity(0))
    too_many = (
        "cluster.workers_per_node=64",
        f"cluster.cpus_per_worker={cores}",
        "cluster.placement_timeout_s=5",
    )
    done = subprocess.run(
        command(config, *too_many, "run_name=crowded"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "cluster.workers_per_node" in done.stderr and "Traceback" not in done.stderr
