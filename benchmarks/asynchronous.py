"""Seconds per step of synchronous and asynchronous GRPO with equal settings, alternating.

    python -m nemo_like.demo --prepare-only
    nemo-like sft --config examples/configs/demo_sft.yaml
    python -m benchmarks.asynchronous --config examples/configs/demo_grpo.yaml \
        grpo.num_prompts_per_step=64 policy.train_global_batch_size=512

Every run is a process of its own on Ray, with one policy worker and one generation replica, which
have one thread each. They overlap fully only where each has a core of its own. Choose the settings
so that generation and training take about the same time: the ratio of seconds per step can then
reach 0.5. The first `--warmup` steps of a run are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PHASES = ("generation", "train", "weight_sync", "rollout_wait")


@dataclass(frozen=True, slots=True)
class Summary:
    """Medians over the counted steps of all runs with one value of `grpo.max_staleness`."""

    staleness: int
    num_steps: int
    seconds: float
    """Median time between the ends of two steps, in seconds."""
    phases: dict[str, float]
    """Median seconds of `PHASES`; in an asynchronous run generation overlaps with the others."""
    mean_gap: float
    """Mean version gap of the trained tokens."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run both variants `--rounds` times and print a table."""
    arguments = _parser().parse_args(argv)
    if arguments.warmup < 1:
        raise SystemExit("--warmup: must be at least 1, because the first step has no start time")
    records: dict[int, list[dict[str, float]]] = {0: [], arguments.staleness: []}
    with tempfile.TemporaryDirectory() as temporary:
        for index in range(arguments.rounds):
            for staleness in records:
                name = f"staleness_{staleness}_{index}"
                records[staleness] += run(arguments, Path(temporary), name, staleness)
    summaries = [summarize(staleness, steps) for staleness, steps in records.items()]
    headings = ["max_staleness", "steps", "s/step", *(f"{name} s" for name in PHASES), "mean gap"]
    print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}")
    for summary in summaries:
        cells = [str(summary.staleness), str(summary.num_steps), f"{summary.seconds:.2f}"]
        cells += [f"{summary.phases[name]:.2f}" for name in PHASES]
        cells.append(f"{summary.mean_gap:.2f}")
        print(f"| {' | '.join(cells)} |")
    print(f"\nratio of s/step: {summaries[1].seconds / summaries[0].seconds:.3f}")


def run(
    arguments: argparse.Namespace, folder: Path, name: str, staleness: int
) -> list[dict[str, float]]:
    """Run `nemo-like grpo` and return the records of its counted steps, `seconds` added."""
    command = [sys.executable, "-m", "nemo_like", "grpo", "--config", str(arguments.config)]
    command += [
        f"output_dir={folder}",
        f"run_name={name}",
        f"grpo.max_staleness={staleness}",
        f"grpo.max_num_steps={arguments.warmup + arguments.steps}",
        "grpo.val_period=0",
        "cluster.backend=ray",
        "cluster.cpus_per_worker=1",
        "cluster.workers_per_node=1",
        "cluster.generation_workers=1",
        "checkpointing.enabled=false",
        "checkpointing.export_hf=false",
        "logger.tensorboard=false",
        "logger.save_rollouts=false",
        *arguments.overrides,
    ]
    log = folder / f"{name}.out"
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        end = log.read_text(encoding="utf-8", errors="replace")[-3000:]
        raise SystemExit(f"{name} ended with code {done.returncode}:\n{end}")
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if "timing/step_s" in record]
    for before, step in pairwise(steps):
        step["seconds"] = step["unix_time_s"] - before["unix_time_s"]
    return steps[arguments.warmup :]


def summarize(staleness: int, steps: Sequence[dict[str, float]]) -> Summary:
    """Summarize the counted steps of all runs of a variant."""
    phases = {}
    for name in PHASES:
        phases[name] = statistics.median(step.get(f"timing/{name}_s", 0.0) for step in steps)
    return Summary(
        staleness=staleness,
        num_steps=len(steps),
        seconds=statistics.median(step["seconds"] for step in steps),
        phases=phases,
        mean_gap=statistics.fmean(step.get("staleness/mean", 0.0) for step in steps),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--config", type=Path, required=True, help="config of GRPO")
    add("--staleness", type=int, default=1, help="grpo.max_staleness of the asynchronous runs")
    add("--rounds", type=int, default=2, help="runs of each variant")
    add("--steps", type=int, default=8, help="counted steps per run")
    add("--warmup", type=int, default=3, help="steps at the beginning of a run, not counted")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="config keys of both variants")
    return parser


if __name__ == "__main__":
    main()
