"""`nemo-like chaos`: runs a config undisturbed, then with faults, and compares what they leave."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from nemo_like.algorithms.registry import detect_kind, load_config
from nemo_like.commands.arguments import FAULT_KINDS, FAULT_TARGETS
from nemo_like.commands.faults import Fault, FaultyRun, Outcome
from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.load import to_dict
from nemo_like.console import say
from nemo_like.run.comparison import differences, prompt_differences
from nemo_like.run.files import read_json_lines

_MIN_TIMEOUT_S = 30.0
_STEPS_OF_TIMEOUT = 5
_STARTS_OF_TIMEOUT = 2
"""A worker hangs that makes no progress for so many times the slowest step, or the start of the
workers, and at least 30 s."""
_DAMAGING = ("kill", "full_disk")
"""Faults that are also injected during a save."""


def run(arguments: argparse.Namespace) -> int:
    """Run, print the table, and return 1 if a run did not recover or differs.

    Raises ConfigError.
    """
    chaos = _Chaos(arguments)
    chaos.run_undisturbed()
    chaos.run_faulty()
    _print_table(chaos.outcomes)
    for problem in chaos.problems:
        say(f"problem: {problem}")
    say("equal to the undisturbed run" if not chaos.problems else f"{len(chaos.problems)} problems")
    return 1 if chaos.problems else 0


class _Chaos:
    """The undisturbed run, the runs with faults, and what they found."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Check the config and create the folder of the runs. Raises ConfigError."""
        kind = arguments.kind or detect_kind(arguments.config, arguments.overrides)
        config = load_config(kind, arguments.config, arguments.overrides)
        self._cluster = cluster = config.cluster
        if cluster.backend != "ray":
            raise ConfigError("chaos needs cluster.backend=ray: without Ray a run is one process")
        if cluster.num_nodes > 1 and cluster.gpus_per_node:
            raise ConfigError(
                f"chaos starts the cluster.num_nodes={cluster.num_nodes} nodes on this machine,"
                " where they would share its GPUs; set cluster.num_nodes=1"
            )
        job = to_dict(config)[kind]
        self._is_exact = not job.get("max_staleness") and not config.environment.is_used
        """Equal runs are equal bit for bit: rows do not depend on the order of events."""
        self._arguments = arguments
        self._folder = Path(config.output_dir) / f"{config.run_name}_chaos"
        if self._folder.exists():
            raise ConfigError(
                f"{shown_path(self._folder)} exists; remove it, or set another run_name"
            )
        self._folder.mkdir(parents=True)
        self._command = [
            *(sys.executable, "-m", "nemo_like", kind, "--config", str(arguments.config)),
            *arguments.overrides,
            *("resume=true", f"output_dir={self._folder}"),
            f"cluster.restart.max_restarts={arguments.kills + 1}",
            "cluster.restart.backoff_s=0.1",
            f"cluster.max_restarts={max(cluster.max_restarts, arguments.kills)}",
        ]
        self._rng = random.Random(arguments.seed)
        self._step_s = 0.0
        self._targets: set[str] = set()
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []

    def run_undisturbed(self) -> None:
        """Run without faults; its groups and times determine the faults. Raises ConfigError."""
        started = time.monotonic()
        run = self._start("undisturbed")
        problem = "it was interrupted"
        try:
            problem = run.finish()
        finally:
            problems = [problem, *run.close()]
        if any(problems):
            raise ConfigError(f"the undisturbed run failed: {'; '.join(filter(None, problems))}")
        self._targets = {"driver", "raylet", "head", *run.groups()}
        records = list(read_json_lines(run.path / "metrics.jsonl"))
        times = [record["timing/step_s"] for record in records if "timing/step_s" in record]
        self._step_s = fmean(times)
        start_s = sum(record.get("timing/start_workers_s", 0.0) for record in records)
        timeout_s = max(
            _MIN_TIMEOUT_S, _STEPS_OF_TIMEOUT * max(times), _STARTS_OF_TIMEOUT * start_s
        )
        say(
            f"undisturbed: {len(times)} steps of {self._step_s:.2f} s in"
            f" {time.monotonic() - started:.0f} s; a worker hangs after {timeout_s:.0f} s without"
            " progress"
        )
        for section in ("cluster", "policy.generation"):
            self._command.append(f"{section}.progress_timeout_s={timeout_s:.0f}")

    def run_faulty(self) -> None:
        """Run with faults until all were injected; compare each run with the undisturbed one."""
        plan = make_plan(self._faults(), self._arguments.kills, self._rng)
        number = 0
        while plan:
            number += 1
            run = self._start(f"faults_{number}")
            num_left = len(plan)
            try:
                problem = self._inject(run, plan)
            finally:
                left = run.close()
            found = [problem, *left] if problem else [*left, *self._differences(run.path)]
            if not problem and len(plan) == num_left:
                found.append(f"it ended before {plan.pop(0).name}: the run needs more steps")
            self.problems += [f"{run.path.name}: {each}" for each in found]
            self._write_report()

    def _inject(self, run: FaultyRun, plan: list[Fault]) -> str:
        """Inject faults of `plan`, which loses them, until the run ends; return a problem."""
        while plan:
            outcome = run.inject(plan[0], self._rng, self._step_s)
            if outcome is None:
                break
            plan.pop(0)
            self.outcomes.append(outcome)
            say(f"{len(self.outcomes)}. {_line(outcome)}")
            if outcome.problem:
                return outcome.problem
        return run.finish()

    def _differences(self, path: Path) -> Iterator[str]:
        expected = self._folder / "undisturbed"
        return differences(expected, path) if self._is_exact else prompt_differences(expected, path)

    def _faults(self) -> list[Fault]:
        """Return each combination of the selected kinds and targets that the run has."""
        kinds = self._arguments.kinds or FAULT_KINDS
        named = self._arguments.targets or FAULT_TARGETS
        pairs = [(kind, target) for kind in kinds for target in named if target in self._targets]
        # A worker writes its part of a checkpoint; the limit applies to all writers.
        faults = [
            Fault(kind, target, during_save=kind == "full_disk")
            for kind, target in pairs
            if kind != "full_disk" or target == "policy"
        ]
        if not faults:
            raise ConfigError(
                f"no fault is possible with --kinds {','.join(kinds)} and --targets"
                f" {','.join(named)}: the run has {', '.join(sorted(self._targets))}, and full_disk"
                " is for policy"
            )
        return faults

    def _start(self, name: str) -> FaultyRun:
        cluster = self._cluster
        num_workers = cluster.workers_per_node + cluster.generation_workers
        return FaultyRun(
            [*self._command, f"run_name={name}"],
            self._folder / name,
            num_nodes=cluster.num_nodes,
            num_cpus=max(1, round(num_workers * cluster.cpus_per_worker + 0.5)),
            timeout_s=self._arguments.timeout_s,
        )

    def _write_report(self) -> None:
        report = {
            "seed": self._arguments.seed,
            "outcomes": [asdict(each) for each in self.outcomes],
            "problems": self.problems,
        }
        (self._folder / "chaos.json").write_text(json.dumps(report, indent=1) + "\n")


def make_plan(faults: Sequence[Fault], num: int, rng: random.Random) -> list[Fault]:
    """Return `num` faults in random order, each of `faults` as often as the others, but for one.

    A third of those that can damage a checkpoint are injected during a save.
    """
    plan: list[Fault] = []
    while len(plan) < num:
        plan += rng.sample(faults, len(faults))
    return [
        fault._replace(during_save=fault.during_save or rng.random() < 1 / 3)
        if fault.kind in _DAMAGING
        else fault
        for fault in plan[:num]
    ]


def _line(outcome: Outcome) -> str:
    result = outcome.problem or (
        f"recovered in {outcome.recovery_s:.1f} s, {outcome.num_lost_steps} steps repeated"
        f" ({outcome.num_restarts} restarts, {outcome.num_starts} starts of the driver)"
    )
    return f"{outcome.fault} after step {outcome.step}: {result}"


def _print_table(outcomes: Sequence[Outcome]) -> None:
    say("fault                    count recovered by itself  mean s   max s steps repeated (max)")
    for name in sorted({each.fault for each in outcomes}):
        group = [each for each in outcomes if each.fault == name]
        done = [each for each in group if not each.problem]
        seconds = [each.recovery_s for each in done] or [float("nan")]
        num_alone = sum(each.num_starts == 0 for each in done)
        num_lost = max((each.num_lost_steps for each in done), default=0)
        say(
            f"{name:<24}{len(group):>6}{len(done):>10}{num_alone:>10}{fmean(seconds):>8.1f}"
            f"{max(seconds):>8.1f}{num_lost:>21}"
        )
