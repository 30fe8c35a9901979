"""Asynchronous GRPO on Ray: version gaps, prompts of a resumed run, replicas that die or stop."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.replica_failures import num_steps, replica_pids, rollout_problems, signal_replicas
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.rollouts import RolloutPipeline
from nemo_like.algorithms.registry import load_config
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.metrics import Timers, metric_values
from tests.algorithms.test_runs import read_rollout
from tests.recipe import Recipe
from tests.rollout.test_rollout import rollout_of

ON_RAY = (
    "cluster.backend=ray",
    "cluster.workers_per_node=2",
    "cluster.cpus_per_worker=0.5",
    "policy.train_global_batch_size=32",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
    "checkpointing.keep_latest=9",
)


def _in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


@pytest.mark.exhaustive
def test_a_lost_replica_stops_the_run_and_a_resume_repeats_no_prompt(
    recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """With `drain` rollouts run ahead by max_staleness. A replica may not be restarted."""
    options = [
        *ON_RAY,
        "grpo.max_staleness=1",
        "cluster.max_restarts=0",
        "checkpointing.export_hf=false",
    ]
    run = recipe.folder / "grpo"

    def kill_after_step_4() -> None:
        while num_steps(run) < 4:
            time.sleep(0.02)
        os.kill(replica_pids(run)["generation-1"], signal.SIGKILL)

    recipe.grpo(*options)
    command = ["grpo", "--config", str(recipe.folder / "grpo.yaml"), *options]
    killer = _in_thread(kill_after_step_4)
    assert main([*command, "grpo.max_num_steps=200"]) == 1
    killer.join()
    output, errors = capfd.readouterr()
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "cluster.max_restarts=0" in line
    assert "Traceback" not in output + errors
    saved = int((run / "latest").read_text().rpartition("_")[2])
    assert saved >= 4
    # The rollout of the next step had been started when this one was saved.
    last = f"grpo.max_num_steps={saved + 2}"
    assert main([*command, last, "resume=true"]) == 0, capfd.readouterr().err
    config = load_config(GrpoRunConfig, recipe.folder / "grpo.yaml", [*options, last])
    assert rollout_problems(config, run) == []
    steps = range(1, saved + 3)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    gaps = {line["step"]: (line["staleness/mean"], line["staleness/max"]) for line in metrics}
    # The first rollout of each process has no earlier weights; every later one is one behind.
    first = (1, saved + 1)
    assert gaps == {step: (0.0, 0.0) if step in first else (1.0, 1.0) for step in steps}
    versions = [read_rollout(run, step)[0]["weight_versions"] for step in steps]
    assert versions == [[step - 1 if step in first else step - 2] for step in steps]


@pytest.mark.exhaustive
def test_the_completions_of_lost_replicas_are_sampled_by_others(
    recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """One replica is killed, later one is stopped; updates in flight go on."""
    options = [
        *ON_RAY,
        "grpo.max_num_steps=6",
        "grpo.max_staleness=2",
        "grpo.weight_update=in_flight",
        "policy.generation.progress_timeout_s=5",
        "checkpointing.enabled=false",
        "checkpointing.export_hf=false",
    ]
    config = recipe.grpo(*options)
    run = recipe.folder / "grpo"
    has_ended = threading.Event()
    num_signals: list[int] = []

    def signal_two() -> None:
        num = signal_replicas(
            run,
            lambda: not has_ended.is_set(),
            kills=2,
            kinds=("kill", "stop"),
            seed=1,
            max_delay_s=0.2,
        )
        num_signals.append(num)

    thread = _in_thread(signal_two)
    code = main(["grpo", "--config", str(recipe.folder / "grpo.yaml"), *options])
    has_ended.set()
    thread.join()
    output, errors = capfd.readouterr()
    assert code == 0 and num_signals == [2], (output + errors)[-3000:]
    assert "failed and is restarted (restart 1 of at most 10)" in output + errors
    assert rollout_problems(config, run) == []


class _Loader:
    """Two prompts per step."""

    epoch = batch_epoch = num_dropped = 0
    rows = SimpleNamespace(num_skipped=0)
    mixture = None
    position = selector = None

    def __next__(self) -> list[None]:
        return [None, None]

    def batch_locations(self) -> list[str]:
        return ["data.jsonl:1", "data.jsonl:2"]

    def batch_sources(self) -> None:
        return None


def test_rows_older_than_allowed_are_dropped_and_counted(recipe: Recipe) -> None:
    """Started = trained + dropped, at every step; with `grpo.max_staleness=1`."""
    versions = {
        0: [[0], [0, 0], [0], [0]],
        1: [[0, 1], [1], [0], [1]],
        2: [[0, 1, 2], [1, 2], [0], [2]],
        3: [[2], [3, 3], [2], [1, 1]],
    }
    started: list[int] = []
    pending: dict[str, Any] = {}

    def start(*_: Any, **__: Any) -> SimpleNamespace:
        started.append(len(started))
        return SimpleNamespace(step=started[-1], generation_s=0.0, reward_s=0.0)

    log = SimpleNamespace(timers=Timers(), pending=pending, add=pending.update)
    run: Any = SimpleNamespace(
        log=log,
        rollouts=SimpleNamespace(
            collector=SimpleNamespace(start=start),
            finish=lambda job: rollout_of(versions[job.step]),
        ),
    )
    config = recipe.grpo(*ON_RAY, "cluster.generation_workers=1", "grpo.max_staleness=1")
    loader: Any = _Loader()
    pipeline = RolloutPipeline(run, config, loader, 0)
    dropped = []
    for step in range(4):
        pipeline.start(step)
        taken = pipeline.take(step)
        num_trained = int(taken.rollout.batch["row_mask"].sum())
        metrics = metric_values({**pending, **taken.metrics()})
        dropped.append(metrics["staleness/num_dropped"])
        pending.clear()
        assert num_trained + metrics["reward/num_dropped"] == 4
        gaps = taken.rollout.batch["version_gap"]
        for row in range(4):
            assert taken.rollout.batch["row_mask"][row] == (gaps[row].max() <= 1)
    assert dropped == [0, 0, 2, 1]


def test_asynchronous_rollouts_need_processes_of_their_own(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match=r"is 1, but with cluster\.backend local generation"):
        recipe.grpo("grpo.max_staleness=1")
    with pytest.raises(
        ConfigError, match=r"grpo\.max_staleness is 1, but cluster\.generation_work"
    ):
        recipe.grpo("grpo.max_staleness=1", "cluster.backend=ray", "cluster.gpus_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.weight_update=in_flight"], r"in_flight, which has no effect with grpo\.max_stal"),
        (["grpo.weight_update=restart"], r"restart, which has no effect with grpo\.max_staleness"),
    ],
)
def test_keys_without_effect_are_refused(
    recipe: Recipe, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.grpo(*overrides)
