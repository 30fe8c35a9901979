"""Kills or stops generation replicas of a GRPO run at random times and checks what it did.

    python -m benchmarks.replica_failures --config CONFIG [KEY=VALUE ...] --kills 20

One replica is killed (SIGKILL) after a random time in each step of the run, or stopped (SIGSTOP)
with `--signal stop`, or both in turn with `--signal both`. It may be one that is idle, that decodes
or that gets weights. Any backend may be chosen (policy.generation.backend=vllm).

Afterwards the run must have ended normally with all of its steps, the rollout of every step must
have the prompts that the data loader gives to that step, each answered exactly once, and all tokens
must be of allowed weight versions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.data import open_source
from nemo_like.algorithms.registry import load_config

_LOCATION = re.compile(r"worker 0 of the (generation-\d+) group: pid (\d+)")
_POLL_S = 0.02
_RESTART = "of the generator failed and is restarted"
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_KINDS = {"kill": ("kill",), "stop": ("stop",), "both": ("kill", "stop")}


@dataclass
class Outcome:
    """What a run did that lost replicas."""

    num_signals: int = 0
    exit_code: int = 0
    problems: list[str] = field(default_factory=list)
    output: str = ""


def replica_pids(run: Path) -> dict[str, int]:
    """Return the latest process of each replica, by the name of its group."""
    log = run / "logs" / "driver.log"
    if not log.exists():
        return {}
    return {name: int(pid) for name, pid in _LOCATION.findall(log.read_text())}


def num_steps(run: Path) -> int:
    """Return the number of logged steps."""
    metrics = run / "metrics.jsonl"
    if not metrics.exists():
        return 0
    steps = [json.loads(line)["step"] for line in metrics.read_bytes().splitlines()]
    return max(steps, default=0)


def run_with_failures(
    command: Sequence[str],
    run: Path,
    *,
    kills: int,
    kinds: Sequence[str],
    seed: int,
    max_delay_s: float,
    timeout_s: float,
) -> Outcome:
    """Run `command`, which trains in the directory `run`, and signal a replica in each step."""
    outcome = Outcome()
    log = run.parent / f"{run.name}.out"
    deadline = time.monotonic() + timeout_s
    with log.open("w") as stream:
        process = subprocess.Popen(list(command), stdout=stream, stderr=subprocess.STDOUT)

        def is_running() -> bool:
            return process.poll() is None and time.monotonic() < deadline

        outcome.num_signals = signal_replicas(
            run, is_running, kills=kills, kinds=kinds, seed=seed, max_delay_s=max_delay_s
        )
        while is_running():
            time.sleep(_POLL_S)
        if process.poll() is None:
            process.kill()
            outcome.problems.append(f"the run did not end within {timeout_s:g} s")
        outcome.exit_code = process.wait()
    outcome.output = log.read_text()
    return outcome


def signal_replicas(
    run: Path,
    is_running: Callable[[], bool],
    *,
    kills: int,
    kinds: Sequence[str],
    seed: int,
    max_delay_s: float,
) -> int:
    """Signal a replica in each step of the run in the directory `run`, `kills` times in total.

    The signals take turns in the order of `kinds`. Returns the number of signals, which is less
    than `kills` if the run ends first.
    """
    rng = random.Random(seed)
    num_signals = 0
    signalled: set[int] = set()
    last_step = -1
    while is_running() and num_signals < kills:
        time.sleep(_POLL_S)
        step = num_steps(run)
        fresh = [pid for pid in replica_pids(run).values() if pid not in signalled]
        started = (run / "metrics.jsonl").exists()
        if step == last_step or not started or not fresh:
            continue
        last_step = step
        time.sleep(rng.uniform(0.0, max_delay_s))
        pid = rng.choice(fresh)
        signalled.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, _SIGNALS[kinds[num_signals % len(kinds)]])
            num_signals += 1
    return num_signals


def expected_prompts(config: GrpoRunConfig) -> list[list[str]]:
    """Return the prompts of every step, in the order of the data loader."""
    source = open_source(config)
    loader = source.loader()
    steps = []
    for _ in range(config.grpo.max_num_steps):
        steps.append([prompt.text for prompt in next(loader)])
    return steps


def rollout_problems(config: GrpoRunConfig, run: Path) -> list[str]:
    """Return what is wrong with the rollouts of a finished run."""
    problems = []
    group_size = config.grpo.num_generations_per_prompt
    if num_steps(run) != config.grpo.max_num_steps:
        problems.append(f"{num_steps(run)} of {config.grpo.max_num_steps} steps were logged")
    for step, prompts in enumerate(expected_prompts(config), start=1):
        path = run / "rollouts" / f"step_{step}.jsonl"
        if not path.exists():
            problems.append(f"step {step} has no rollout")
            continue
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        expected = [prompt for prompt in prompts for _ in range(group_size)]
        if [row["prompt"] for row in rows] != expected:
            problems.append(f"step {step} has {len(rows)} rows that do not belong to its prompts")
        if any(row["completion_tokens"] == 0 for row in rows):
            problems.append(f"step {step} has prompts without a completion")
        oldest = max(0, step - 1 - config.grpo.max_staleness)
        versions = {version for row in rows for version in row["weight_versions"]}
        if not versions <= set(range(oldest, step)):
            problems.append(f"step {step} has tokens of weight versions {sorted(versions)}")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=sorted(_KINDS), default="kill")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-delay-s", type=float, default=2.0)
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args(argv)
    config = load_config(GrpoRunConfig, arguments.config, arguments.overrides)
    run = Path(config.output_dir, config.run_name)
    run.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "nemo_like", "grpo", "--config", str(arguments.config)]
    start = time.monotonic()
    outcome = run_with_failures(
        [*command, *arguments.overrides],
        run,
        kills=arguments.kills,
        kinds=_KINDS[arguments.signal],
        seed=arguments.seed,
        max_delay_s=arguments.max_delay_s,
        timeout_s=arguments.timeout_s,
    )
    outcome.problems += rollout_problems(config, run)
    if outcome.num_signals < arguments.kills:
        outcome.problems.append(
            f"only {outcome.num_signals} of {arguments.kills} signals were sent"
        )
    if outcome.exit_code:
        outcome.problems.append(f"the run failed: {outcome.output[-2000:]}")
    print(
        f"{outcome.num_signals} signals ({arguments.signal}) to replicas,"
        f" {outcome.output.count(_RESTART)} restarts, {num_steps(run)} of"
        f" {config.grpo.max_num_steps} steps in {time.monotonic() - start:.0f} s, exit code"
        f" {outcome.exit_code}"
    )
    for problem in outcome.problems:
        print(f"problem: {problem}")
    return 1 if outcome.problems or outcome.exit_code else 0


if __name__ == "__main__":
    sys.exit(main())
