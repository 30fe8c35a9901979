"""What a past run left in its directory: the row lengths of every step, and the packing it
logged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
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
"""Metrics that follow from lengths and plan alone."""


@dataclass(frozen=True)
class PastRun:
    """A run directory, read."""

    path: Path
    steps: dict[int, np.ndarray]
    """Step -> int64 [B] row lengths, in the order they were planned."""
    metrics: dict[int, dict[str, float]]
    """Step -> what metrics.jsonl has of it."""

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def rows(self) -> RowLengths:
        """The rows of all whole steps, step after step: the last step of an epoch may have fewer
        rows than the others.
        """
        size = max(map(len, self.steps.values()))
        whole = [lengths for lengths in self.steps.values() if len(lengths) == size]
        source = f"{len(whole):,} step{'s' * (len(whole) > 1)} of the run {shown_path(self.path)}"
        return RowLengths(np.concatenate(whole), source, is_ordered=True)

    def compare(self, spec: PlanSpec) -> dict[str, tuple[float, float]]:
        """Metric -> (what the run logged, what its lengths under `spec` come to), means over the
        steps that have both.
        """
        steps = [
            step
            for step in self.steps
            if all(name in self.metrics.get(step, {}) for name in COMPARED)
        ]
        planned = [plan_batch(self.steps[step], spec).metrics() for step in steps]
        return {
            name: (
                _mean(self.metrics[step][name] for step in steps),
                _mean(metrics[name] for metrics in planned),
            )
            for name in (COMPARED if steps else ())
        }


def read_run(path: Path) -> PastRun:
    """The run that `path` (its metrics.jsonl, or its directory) belongs to. Raises ConfigError
    where lengths are missing.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists():
        raise ConfigError(f"there is no {str(path)!r}; give the metrics.jsonl in a run's directory")
    recorded = folder / "plan" / "lengths.jsonl"
    first = folder / "plan" / "step_0.json"
    if recorded.is_file():
        # A resumed run plans some steps again; the last time counts.
        steps = {
            int(line["step"]): np.array(line["lengths"], dtype=np.int64)
            for line in _lines(recorded)
        }
    elif first.is_file():
        plan = BatchPlan.from_json(first.read_text(encoding="utf-8"))
        lengths = np.zeros(plan.num_rows, dtype=np.int64)
        lengths[plan.rows] = plan.lengths
        steps = {1: lengths[lengths > 0]}
    else:
        steps = {}
    if not any(len(lengths) for lengths in steps.values()):
        raise ConfigError(
            f"{shown_path(folder)} has no row lengths: there is neither {shown_path(recorded)} nor"
            f" {shown_path(first)}; give the"
            " metrics.jsonl of a run that trained a step"
        )
    logged = folder / "metrics.jsonl"
    metrics = {int(line["step"]): line for line in _lines(logged)} if logged.is_file() else {}
    return PastRun(folder, dict(sorted(steps.items())), metrics)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSONL file; the last one may have been cut by a kill."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"{shown_path(path)}:{number}: not valid JSON: {error.msg}"
                ) from error


def _mean(values: Iterator[float]) -> float:
    return float(np.mean(list(values)))
