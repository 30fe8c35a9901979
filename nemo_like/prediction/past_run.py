"""Row lengths and packing metrics of a past run, read from its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.prediction.lengths import RowLengths

COMPARED = (
    "packing/padding_share",
    "packing/utilization",
    "packing/num_microbatches",
    "packing/rank_imbalance_flops",
)
"""Metrics that are determined by lengths and plan alone."""


@dataclass(frozen=True)
class PastRun:
    """The recorded lengths and metrics of a run."""

    path: Path
    steps: dict[int, np.ndarray]
    """Step -> int64 [B] row lengths, in the order they were planned."""
    metrics: dict[int, dict[str, float]]
    """Step -> metric -> value, from metrics.jsonl."""

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def rows(self) -> RowLengths:
        """Return the rows of all full steps in order.

        The last step of an epoch may have fewer rows; it would not be a typical batch.
        """
        max_rows = max(map(len, self.steps.values()))
        full = [lengths for lengths in self.steps.values() if len(lengths) == max_rows]
        steps = "steps" if len(full) > 1 else "step"
        source = f"{len(full):,} {steps} of the run {shown_path(self.path)}"
        return RowLengths(np.concatenate(full), source, is_ordered=True)

    def compare(self, spec: PlanSpec) -> dict[str, tuple[float, float]]:
        """Return metric -> (logged mean, mean planned from the lengths with `spec`).

        The means are over the steps that have both; without such a step the result is empty.
        """
        steps = []
        for step in self.steps:
            # A run that was killed may have planned a step without logging it.
            logged = self.metrics.get(step, {})
            if all(name in logged for name in COMPARED):
                steps.append(step)
        if not steps:
            return {}
        planned = [plan_batch(self.steps[step], spec).metrics() for step in steps]
        compared: dict[str, tuple[float, float]] = {}
        for name in COMPARED:
            logged_values = [self.metrics[step][name] for step in steps]
            planned_values = [metrics[name] for metrics in planned]
            compared[name] = (fmean(logged_values), fmean(planned_values))
        return compared


def read_run(path: Path) -> PastRun:
    """Read the run of `path`, its metrics.jsonl or its directory.

    Raises ConfigError if the run has no row lengths.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise ConfigError(f"there is no {str(path)!r}; give the metrics.jsonl in a run's directory")
    recorded = folder / "plan" / "lengths.jsonl"
    first = folder / "plan" / "step_0.json"
    steps: dict[int, np.ndarray] = {}
    if recorded.is_file():
        for line in _lines(recorded):
            # A resumed run plans some steps again; the last record counts.
            steps[int(line["step"])] = np.array(line["lengths"], dtype=np.int64)
    elif first.is_file():
        # A run that has recorded no lengths still has the plan of its first step.
        plan = BatchPlan.from_json(first.read_text(encoding="utf-8"))
        lengths = np.zeros(plan.num_rows, dtype=np.int64)
        lengths[plan.rows] = plan.lengths
        # Dropped rows are not in the plan, and their lengths are not known.
        steps[1] = lengths[lengths > 0]
    if not any(len(lengths) for lengths in steps.values()):
        raise ConfigError(
            f"{shown_path(folder)} has no row lengths: there is neither {shown_path(recorded)} nor"
            f" {shown_path(first)}; give the metrics.jsonl of a run that trained a step"
        )
    logged = folder / "metrics.jsonl"
    metrics: dict[int, dict[str, float]] = {}
    if logged.is_file():
        metrics = {int(line["step"]): line for line in _lines(logged)}
    return PastRun(folder, dict(sorted(steps.items())), metrics)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file; an incomplete last line, left by a kill, is skipped."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"{shown_path(path)}:{number}: not valid JSON: {error.msg}"
                ) from error
