"""Kills or stops generation replicas of a GRPO run at random times and checks what it did.

    python -m benchmarks.replica_failures --config CONFIG [KEY=VALUE ...] --kills 20

One replica is killed (SIGKILL) after a random time in each step of the run, or stopped (SIGSTOP)
with `--signal stop`. Afterwards the rollout of every step must have each row exactly once, with
tokens of allowed weight versions, and the run must have ended normally.
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
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_config

_LOCATION = re.compile(r"worker 0 of the (generation-\d+) group: pid (\d+)")
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


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
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
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
    environment: dict[str, str] | None = None,
) -> Outcome:
    """Run `command`, which trains in the directory `run`, and signal a replica in each step.

    The signals take turns in the order of `kinds`.
    """
    rng = random.Random(seed)
    outcome = Outcome()
    log = run.parent / f"{run.name}.out"
    deadline = time.monotonic() + timeout_s
    with log.open("w") as stream:
        process = subprocess.Popen(
            list(command), stdout=stream, stderr=subprocess.STDOUT, env=environment
        )
        signalled: set[int] = set()
        last_step = -1
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            step = num_steps(run)
            fresh = [pid for pid in replica_pids(run).values() if pid not in signalled]
            started = (run / "metrics.jsonl").exists()
            if outcome.num_signals >= kills or step == last_step or not started or not fresh:
                continue
            last_step = step
            time.sleep(rng.uniform(0.0, max_delay_s))
            pid = rng.choice(fresh)
            signalled.add(pid)
            with suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[kinds[outcome.num_signals % len(kinds)]])
                outcome.num_signals += 1
        if process.poll() is None:
            process.kill()
            outcome.problems.append(f"the run did not end within {timeout_s:g} s")
        outcome.exit_code = process.wait()
    outcome.output = log.read_text()
    return outcome


def rollout_problems(config: GrpoRunConfig, run: Path) -> list[str]:
    """Return what is wrong with the rollouts of a finished run."""
    problems = []
    seen: list[str] = []
    group_size = config.grpo.num_generations_per_prompt
    for step in range(1, config.grpo.max_num_steps + 1):
        path = run / "rollouts" / f"step_{step}.jsonl"
        if not path.exists():
            problems.append(f"step {step} has no rollout")
            continue
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        groups: dict[int, list[str]] = {}
        for row in rows:
            groups.setdefault(row["group"], []).append(row["prompt"])
            oldest = step - 1 - config.grpo.max_staleness
            for version in row["weight_versions"]:
                if not max(0, oldest) <= version <= step - 1:
                    problems.append(f"step {step} has tokens of weight version {version}")
        sizes = {len(prompts) for prompts in groups.values()}
        distinct = {len(set(prompts)) for prompts in groups.values()}
        if sizes != {group_size} or distinct != {1} or len(rows) != config.rows_per_step:
            problems.append(f"step {step} has {len(rows)} rows in groups of {sorted(sizes)}")
        seen += [prompts[0] for prompts in groups.values()]
    rows = Path(str(config.data.train_path)).read_text(encoding="utf-8").splitlines()
    available = Counter(json.loads(row)["prompt"] for row in rows)
    too_often = Counter(seen) - available
    if too_often:
        problems.append(f"{len(too_often)} prompts were trained more often than the file has them")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--signal", choices=sorted(_SIGNALS), default="kill")
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
        kinds=[arguments.signal],
        seed=arguments.seed,
        max_delay_s=arguments.max_delay_s,
        timeout_s=arguments.timeout_s,
    )
    outcome.problems += rollout_problems(config, run)
    print(
        f"{outcome.num_signals} replicas were sent SIG{arguments.signal.upper()} in"
        f" {time.monotonic() - start:.0f} s; exit code {outcome.exit_code}, steps"
        f" {num_steps(run)} of {config.grpo.max_num_steps}"
    )
    for problem in outcome.problems:
        print(f"problem: {problem}")
    return 1 if outcome.problems or outcome.exit_code else 0


if __name__ == "__main__":
    sys.exit(main())
