"""A run on Ray that loses a node and continues without a person."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_like.algorithms.restart import run_with_restarts
from nemo_like.config.load import to_yaml
from nemo_like.config.schema import RunConfig
from nemo_like.distributed.errors import WorkerDied
from nemo_like.training.run import RunResult
from nemo_like.training.stopping import RunStopped, StopRequests
from tests.algorithms.test_ray_runs import RESTARTS, wait_for, wait_for_step
from tests.algorithms.test_runs import read_metrics
from tests.distributed.ray_cluster import cluster_of
from tests.recipe import Recipe


@pytest.mark.exhaustive
def test_a_run_continues_with_fewer_nodes_and_with_all_when_they_return(recipe: Recipe) -> None:
    config = recipe.folder / "config.yaml"
    options = (
        "cluster.num_nodes=2",
        "cluster.restart.min_nodes=1",
        "cluster.placement_timeout_s=15",
        "sft.max_num_steps=4000",
        "checkpointing.save_period=5",
    )
    config.write_text(to_yaml(recipe.sft(*RESTARTS, *options)))
    run = recipe.folder / "sft"
    command = [sys.executable, "-m", "nemo_like", "sft", "--config", str(config)]

    def wait_for_workers(number: int) -> None:
        def has_workers(text: str) -> bool:
            assert driver.poll() is None, text
            return text.count("of the policy group: pid") >= number

        wait_for(run / "logs" / "driver.log", has_workers)

    with cluster_of({"num_cpus": 1}, {"num_cpus": 1}) as cluster:
        environment = os.environ | {"RAY_ADDRESS": str(cluster.address)}
        driver = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        wait_for_workers(2)
        wait_for_step(run, 6)
        cluster.remove_node(cluster.list_all_nodes()[1], allow_graceful=False)
        wait_for_workers(3)
        cluster.add_node(num_cpus=1)
        wait_for_workers(5)
        returned = len(read_metrics(run))
        wait_for_step(run, returned + 2)
        driver.send_signal(signal.SIGTERM)
        errors = driver.communicate()[1]
    assert driver.returncode == 75, errors
    assert "on 1 of 2 nodes" in errors and "nodes have returned" in errors
    steps = [line["step"] for line in read_metrics(run)]
    assert steps == list(range(1, len(steps) + 1))


def test_a_signal_in_the_step_in_which_nodes_return_ends_the_run(recipe: Recipe) -> None:
    stop = StopRequests(None)
    stop.finish_steps(enabled=True)
    starts: list[bool] = []

    def run_job(config: RunConfig) -> RunResult:
        starts.append(config.resume)
        assert len(starts) <= 2
        stop.has_returned_nodes = True
        if len(starts) == 2:
            stop.on_signal(signal.SIGTERM, None)
        raise RunStopped(f"stopped by {stop.reason}", stop.exit_code)

    with pytest.raises(RunStopped, match="SIGTERM"):
        run_with_restarts(run_job, recipe.sft(), stop)
    assert starts == [False, True]


def test_the_loss_of_a_node_is_one_line_with_what_happened_and_what_follows(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    config = recipe.sft("cluster.restart.backoff_s=0")
    run = recipe.folder / "sft"
    starts: list[bool] = []

    def run_job(config: RunConfig) -> RunResult:
        starts.append(config.resume)
        if config.resume:
            raise RunStopped("the test ends", 75)
        run.mkdir()
        now = time.time() + 1
        steps = [{"step": step, "unix_time_s": now} for step in range(1, 16)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
        (run / "latest").write_text("checkpoints/step_10\n")
        text = "worker 1 of the policy group died in `train`: its node left the cluster."
        raise WorkerDied(text, group="policy", rank=1, method="train")

    with pytest.raises(RunStopped, match="the test ends"):
        run_with_restarts(run_job, config, StopRequests(None))
    assert starts == [False, True]
    assert capsys.readouterr().err == (
        "failed after step 15: worker 1 of the policy group died in `train`: its node left the"
        " cluster. No result is lost: the run continues from step_10 and repeats 5 steps. It starts"
        " in 0 s (restart 1 of at most 3 in 3600 s; cluster.restart).\n"
    )


def test_a_failed_start_knows_whether_another_follows(recipe: Recipe) -> None:
    """It then leaves a running upload to the next start."""
    stop = StopRequests(None)
    config = recipe.sft("cluster.restart.backoff_s=0", "cluster.restart.max_restarts=1")
    died = WorkerDied("killed", group="policy", rank=0, method="train")
    seen: list[list[bool]] = []

    def run_job(config: RunConfig) -> RunResult:
        directory = Path(config.output_dir) / config.run_name
        directory.mkdir(exist_ok=True)
        step = len(seen) + 1
        with (directory / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"step": step, "unix_time_s": time.time()}) + "\n")
        # Twice: the first answer is no decision.
        seen.append([stop.restarts_after(error) for error in (died, died, ValueError("x"))])
        raise died

    with pytest.raises(WorkerDied):
        run_with_restarts(run_job, config, stop)
    assert seen == [[True, True, False], [False, False, False]]
    stop.unhealthy = "rule"
    assert not stop.restarts_after(died)
