"""The charts of the report of one run, or of several with a color each.

A chart names its metrics; a run that logs none of them has no such chart, and a section without
charts is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import numpy as np
import yaml

from nemo_like.prediction.comparison import Outcome, Strategy
from nemo_like.reports.charts import (
    Chart,
    Series,
    color_of,
    curves,
    histogram,
    rank_timeline,
    stacked_areas,
    stacked_bars,
)
from nemo_like.reports.plan_page import length_marks
from nemo_like.reports.run_files import RunFiles

_STEP_S = "timing/step_s"
_PHASES = (
    *(
        "data_wait",
        "rollout_wait",
        "generation",
        "drain",
        "plan",
        "shard",
        "logprobs",
        "teacher",
        "train",
    ),
    *("reference_update", "weight_sync", "rollout_record", "validation", "checkpoint"),
)
"""Timers that do not contain each other, in the order of a step."""
_OUTSIDE = ("rollout_record", "validation", "checkpoint")
"""Phases that are not a part of the time of the step."""


@cache
def specification() -> dict[str, Any]:
    """Return what run_charts.yaml has: sections with their charts, and key figures."""
    path = resources.files("nemo_like.reports").joinpath("run_charts.yaml")
    return yaml.safe_load(path.read_text("utf-8"))


def group_charts(runs: Sequence[RunFiles]) -> Iterator[dict[str, Any]]:
    """Yield title, description and charts of each section that has charts."""
    for group in specification()["groups"]:
        charts = []
        for spec in group["charts"]:
            names = list(dict.fromkeys(name for run in runs for name in _names(spec, run)))
            if not names:
                continue
            note = names[0] if len(names) == 1 else _area(names[0])
            series = list(_series(spec, runs))
            is_share = spec.get("share", False)
            charts.append(curves(spec["title"], series, note=note, percent=is_share))
        if charts:
            yield {"title": group["title"], "about": group.get("about", ""), "charts": charts}


def _series(spec: Mapping[str, Any], runs: Sequence[RunFiles]) -> Iterator[Series]:
    """Yield the metrics of each run that have values. Validation values are points."""
    is_one = len(runs) == 1
    for number, run in enumerate(runs):
        for index, name in enumerate(_names(spec, run)):
            kind = "line" if is_one or index == 0 else "dashed"
            label = name.partition("/")[2]
            if _area(name) == "validation":
                kind = "point"
                label = f"validation {label}"
            if not is_one:
                label = f"{run.name} {label}"
            yield Series(label, *run.values(name), color_of(index if is_one else number), kind)


def _area(name: str) -> str:
    """Return the first part of the name of a metric."""
    return name.partition("/")[0]


def _names(spec: Mapping[str, Any], run: RunFiles) -> list[str]:
    """Return the metrics of a chart that a run has values of, in the order of the chart."""
    found: list[str] = []
    for pattern in spec["names"]:
        if pattern == "each_reward":
            found += _reward_names(run)
        else:
            found += [name for name in run.metrics if re.fullmatch(pattern, name)]
    return [name for name in dict.fromkeys(found) if np.isfinite(run.metrics[name]).any()]


def _reward_names(run: RunFiles) -> list[str]:
    """Return the means of the single rewards; none for one, which is the reward itself."""
    # Only rewards have a standard deviation beside their mean.
    rewards = [name for name in run.metrics if re.fullmatch(r"reward/.+_mean", name)]
    rewards = [name for name in rewards if f"{name.removesuffix('_mean')}_std" in run.metrics]
    validation = [name.replace("reward/", "validation/") for name in rewards]
    names = [*rewards, *(name for name in validation if name in run.metrics)]
    return names if len(rewards) > 1 else []


def time_charts(runs: Sequence[RunFiles]) -> list[Chart]:
    """Return the time of a step by phase: over all steps and of a few steps of one run, or of the
    mean step of each run.
    """
    phases_of = {run.name: phases for run in runs if (phases := _phases(run))}
    if len(runs) > 1:
        bars = {
            name: {phase: float(values.mean()) for phase, values in phases.items()}
            for name, phases in phases_of.items()
        }
        return [stacked_bars("mean step of each run", bars, unit="s")] if bars else []
    if not phases_of:
        return []
    phases = phases_of[runs[0].name]
    steps, _ = runs[0].values(_STEP_S)
    bars = {}
    for index in (0, len(steps) // 2, len(steps) - 1):
        bars[f"step {steps[index]}"] = {name: float(each[index]) for name, each in phases.items()}
    return [
        stacked_areas("seconds of each step", steps, phases),
        stacked_bars("time line of single steps", bars, unit="s"),
    ]


def _phases(run: RunFiles) -> dict[str, np.ndarray]:
    """Return phase -> its seconds in each timed step, [n]; empty if steps are not timed."""
    step_s = run.metrics.get(_STEP_S)
    if step_s is None or not np.isfinite(step_s).any():
        return {}
    seconds = {
        phase: np.nan_to_num(run.metrics[f"timing/{phase}_s"])
        for phase in _PHASES
        if f"timing/{phase}_s" in run.metrics
    }
    # In GRPO it is a part of the wait for the rollout, or overlaps with training.
    if "rollout_wait" in seconds:
        seconds.pop("generation", None)
    inner = sum(values for phase, values in seconds.items() if phase not in _OUTSIDE)
    seconds["other"] = np.maximum(np.nan_to_num(step_s) - inner, 0.0)
    is_timed = np.isfinite(step_s)
    return {phase.replace("_", " "): values[is_timed] for phase, values in seconds.items()}


def rank_chart(run: RunFiles) -> Chart | None:
    """Return the microbatches of each rank in the first step; None without its plan."""
    plan = run.first_plan
    if plan is None or not len(plan.rows):
        return None
    outcome = Outcome(Strategy("", "", plan.spec), plan, plan.spec.max_tokens or 0)
    waits = plan.spec.sync == "microbatch"
    size = plan.step_offsets[1]
    real = outcome.real_work[:, :size]
    # Time 1 is the real work spread evenly over the ranks.
    unit = float(real.sum()) / len(real)
    return rank_timeline(
        "first optimizer step of the run",
        outcome.work[:, :size] / unit,
        real / unit,
        waits=waits,
        note=f"{plan}; ranks synchronize once per {plan.spec.sync}",
    )


def length_chart(runs: Sequence[RunFiles]) -> Chart | None:
    """Return the histogram of the lengths of all rows; None if no run has recorded them."""
    lengths = {run.name: run.lengths for run in runs if len(run.lengths)}
    if not lengths:
        return None
    marks = {}
    if len(lengths) == 1:
        marks = length_marks(next(iter(lengths.values())))
    return histogram("tokens per row, all steps", lengths, unit="tokens", marks=marks)
