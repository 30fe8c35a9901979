"""Row lengths and packing metrics of a past run, read from its directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, plan_batch
from nemo_like.prediction.grpo_request import MeasuredTimes, Phase, RolloutLengths
from nemo_like.prediction.lengths import RowLengths

COMPARED = (
    "packing/padding_share",
    "packing/utilization",
    "packing/num_microbatches",
    "packing/rank_imbalance_flops",
)
"""Metrics that are determined by lengths and plan alone."""
_TIMES: dict[Phase, str] = {
    "rollout": "timing/generation_s",
    "reward_model": "timing/reward_model_s",
    "logprobs": "timing/logprobs_s",
    "train": "timing/train_s",
    "weight_sync": "timing/weight_sync_s",
}
"""Metric of each phase of a GRPO step."""
_NEEDED_TIMES = ("timing/generation_s", "timing/train_s")


@dataclass(frozen=True)
class PastRun:
    """The recorded lengths and metrics of a run."""

    path: Path
    steps: dict[int, np.ndarray]
    """Step -> int64 [B] row lengths, in the order they were planned."""
    num_trained: dict[int, np.ndarray]
    """Step -> int64 [B] tokens with loss of each row, for the steps where they were recorded."""
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
        full = [step for step, lengths in self.steps.items() if len(lengths) == max_rows]
        steps = "steps" if len(full) > 1 else "step"
        source = f"{len(full):,} {steps} of the run {shown_path(self.path)}"
        lengths = np.concatenate([self.steps[step] for step in full])
        num_trained = None
        if all(step in self.num_trained for step in full):
            num_trained = np.concatenate([self.num_trained[step] for step in full])
        return RowLengths(lengths, source, is_ordered=True, num_trained=num_trained)

    def rollouts(self) -> tuple[list[RolloutLengths], str]:
        """Return the lengths of prompts and completions of every full step, and their source.

        They are those of `rollouts/step_<N>.jsonl`. Without that file the logged mean of the
        prompts is taken for every row; steps with neither are left out.
        """
        max_rows = max(map(len, self.steps.values()))
        rollouts = []
        num_recorded = 0
        for step, lengths in self.steps.items():
            if len(lengths) < max_rows:
                continue
            completions = self._recorded_completions(step, lengths)
            num_recorded += completions is not None
            if completions is None:
                completions = self._estimated_completions(step, lengths)
            if completions is not None:
                rollouts.append(RolloutLengths(lengths - completions, completions))
        source = f"{len(rollouts):,} steps of the run {shown_path(self.path)}"
        if num_recorded < len(rollouts):
            source += " (rows minus the mean prompt, as not all rollouts were saved)"
        return rollouts, source

    def _recorded_completions(self, step: int, lengths: np.ndarray) -> np.ndarray | None:
        """Return the saved lengths of completions, int64 [B]; None without a file that fits."""
        path = self.path / "rollouts" / f"step_{step}.jsonl"
        if not path.is_file():
            return None
        records = list(_lines(path))
        if len(records) != len(lengths):
            return None
        completions = np.array([record["completion_tokens"] for record in records], dtype=np.int64)
        is_valid = (completions >= 1) & (completions < lengths)
        return completions if is_valid.all() else None

    def _estimated_completions(self, step: int, lengths: np.ndarray) -> np.ndarray | None:
        """Return the rows minus the mean prompt, int64 [B]; None if the mean was not logged."""
        mean_prompt = self.metrics.get(step, {}).get("generation/prompt_length_mean")
        if mean_prompt is None:
            return None
        prompts = np.clip(round(mean_prompt), 1, np.maximum(lengths - 1, 1))
        return np.maximum(lengths - prompts, 1)

    def measured_times(self) -> MeasuredTimes | None:
        """Return the mean times of the phases of a GRPO step; None if none were logged.

        The first step is left out if there are others: it contains warm-up.
        """
        timed = [
            metrics
            for step, metrics in self.metrics.items()
            if step in self.steps and all(name in metrics for name in _NEEDED_TIMES)
        ]
        timed = timed[1:] or timed
        if not timed:
            return None
        seconds: dict[Phase, float] = {}
        for phase, name in _TIMES.items():
            values = _values(timed, name)
            if values:
                seconds[phase] = fmean(values)
        return MeasuredTimes(
            seconds=seconds,
            reward_s=fmean(metrics.get("timing/reward_s", 0.0) for metrics in timed),
            num_steps=len(timed),
            source=f"the run {shown_path(self.path)}",
        )

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
        planned = []
        for step in steps:
            plan = plan_batch(self.steps[step], spec, num_trained=self.num_trained.get(step))
            planned.append(plan.metrics())
        compared: dict[str, tuple[float, float]] = {}
        for name in COMPARED:
            logged_values = [self.metrics[step][name] for step in steps]
            planned_values = [metrics[name] for metrics in planned]
            compared[name] = (fmean(logged_values), fmean(planned_values))
        return compared


def _values(timed: Sequence[Mapping[str, float]], name: str) -> list[float]:
    """Return the values of a metric in the steps that have it."""
    having = [metrics for metrics in timed if name in metrics]
    if name == _TIMES["reward_model"]:
        # It includes the answers of a validation.
        alone = [each for each in having if not any(key.startswith("validation/") for key in each)]
        having = alone or having
    return [metrics[name] for metrics in having]


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
    num_trained: dict[int, np.ndarray] = {}
    if recorded.is_file():
        for line in _lines(recorded):
            # A resumed run plans some steps again; the last record counts.
            step = int(line["step"])
            steps[step] = np.array(line["lengths"], dtype=np.int64)
            if "num_trained" in line:
                num_trained[step] = np.array(line["num_trained"], dtype=np.int64)
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
    return PastRun(folder, dict(sorted(steps.items())), num_trained, metrics)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file; an incomplete last line, left by a kill, is skipped."""
    with path.open(encoding="utf-8") as file:
        lines = list(file)
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"{shown_path(path)}:{number}: not valid JSON: {error.msg}"
                ) from error
