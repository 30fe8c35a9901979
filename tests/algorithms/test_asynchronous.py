"""Asynchronous GRPO on Ray: version gaps, prompts of a resumed run, replicas that die or stop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.replica_failures import rollout_problems, run_with_failures
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_config
from nemo_like.config.errors import ConfigError
from tests.algorithms.test_ray_runs import environment
from tests.algorithms.test_runs import interrupt_at
from tests.recipe import Recipe

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
STEPS = 6


def _config(recipe: Recipe, *overrides: str) -> tuple[GrpoRunConfig, list[str]]:
    """The config and the command that runs it."""
    options = [*ON_RAY, f"grpo.max_num_steps={STEPS}", *overrides]
    recipe.grpo(*options)
    path = recipe.folder / "grpo.yaml"
    config = load_config(GrpoRunConfig, path, options)
    return config, [sys.executable, "-m", "nemo_like", "grpo", "--config", str(path), *options]


def _run(command: list[str]) -> str:
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def _rollout(run: Path, step: int) -> list[dict]:
    path = run / "rollouts" / f"step_{step}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def _prompts(run: Path) -> list[str]:
    return [row["prompt"] for step in range(1, STEPS + 1) for row in _rollout(run, step)]


def test_rollouts_run_ahead_by_max_staleness_and_a_resume_repeats_no_prompt(
    recipe: Recipe,
) -> None:
    config, command = _config(recipe, "grpo.max_staleness=1", "run_name=ahead")
    _run(command)
    run = recipe.folder / "ahead"
    assert rollout_problems(config, run) == []
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = {line["step"]: (line["staleness/mean"], line["staleness/max"]) for line in metrics}
    # The first rollout has no earlier weights; with `drain` every later one is one version behind.
    assert gaps == {1: (0.0, 0.0)} | dict.fromkeys(range(2, STEPS + 1), (1.0, 1.0))
    versions = [_rollout(run, step)[0]["weight_versions"] for step in range(1, STEPS + 1)]
    assert versions == [[0], [0], [1], [2], [3], [4]]
    prompts = _prompts(run)
    # The rollout of step 5 had been started when step 4 was saved.
    interrupt_at(run, 4)
    _run([*command, "resume=true"])
    assert _prompts(run) == prompts
    assert rollout_problems(config, run) == []


def test_the_completions_of_lost_replicas_are_sampled_by_others(recipe: Recipe) -> None:
    """One replica is killed, later one is stopped; updates in flight go on."""
    config, command = _config(
        recipe,
        "grpo.max_staleness=2",
        "grpo.weight_update=in_flight",
        "policy.generation.progress_timeout_s=5",
        "checkpointing.enabled=false",
        "checkpointing.export_hf=false",
        "run_name=lost",
    )
    run = recipe.folder / "lost"
    outcome = run_with_failures(
        command,
        run,
        kills=2,
        kinds=("kill", "stop"),
        seed=1,
        max_delay_s=0.2,
        timeout_s=240.0,
        environment=environment(),
    )
    assert outcome.exit_code == 0 and outcome.num_signals == 2, outcome.output[-3000:]
    assert "failed and is restarted (restart 1 of at most 10)" in outcome.output
    assert outcome.problems == [] and rollout_problems(config, run) == []


def test_a_replica_that_may_not_be_restarted_stops_the_run_with_one_message(recipe: Recipe) -> None:
    _, command = _config(recipe, "policy.generation.max_restarts=0", "run_name=limit")
    outcome = run_with_failures(
        command,
        recipe.folder / "limit",
        kills=1,
        kinds=("kill",),
        seed=1,
        max_delay_s=0.2,
        timeout_s=240.0,
        environment=environment(),
    )
    assert outcome.exit_code not in (0, -9)
    (line,) = [line for line in outcome.output.splitlines() if line.startswith("error: ")]
    assert "policy.generation.max_restarts=0" in line
    assert "Traceback" not in outcome.output


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
        (["grpo.partial_completions=restart"], r"restart, which has no effect with grpo\.weight_"),
    ],
)
def test_keys_without_effect_are_refused(
    recipe: Recipe, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.grpo(*overrides)
