"""The report of runs: one page from the files of one run directory, or a comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, counted, shown_path
from nemo_like.prediction.table import TextTable
from nemo_like.reports.charts import color_of
from nemo_like.reports.page import Content, render_content, render_page
from nemo_like.reports.rollouts import read_rollouts
from nemo_like.reports.run_charts import (
    group_charts,
    length_chart,
    rank_chart,
    specification,
    time_charts,
)
from nemo_like.reports.run_files import RunFiles
from nemo_like.run.files import write_text

NAME = "report.html"
"""The page in the directory of its run."""


def report_page(paths: Sequence[Path]) -> str:
    """Return the page of the runs in `paths`. Raises ConfigError for other directories."""
    return render_page(report_content(paths))


def write_report(run: Path) -> Path:
    """Write the page of a run into its directory. Raises ConfigError and WriteError."""
    path = run / NAME
    write_text(path, report_page([run]), "the report of the run")
    return path


def report_content(paths: Sequence[Path]) -> Content:
    """Return what the page shows. Raises ConfigError."""
    runs = [RunFiles(path) for path in paths]
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"the runs have equal names ({', '.join(names)}); rename a directory, or give one run"
        )
    is_one = len(runs) == 1
    title = runs[0].name if is_one else f"Comparison of {len(runs)} runs"
    values: dict[str, Any] = {
        "title": title,
        "runs": [_summary(run, color_of(index)) for index, run in enumerate(runs)],
        "is_one": is_one,
        "groups": list(group_charts(runs)),
        "time": time_charts(runs),
        "ranks": rank_chart(runs[0]) if is_one else None,
        "lengths": length_chart(runs),
        "rollouts": read_rollouts(runs[0]) if is_one else None,
        "config": runs[0].config_text if is_one else "",
        "differences": None if is_one else _config_differences(runs),
        "metrics": _metrics_table(runs[0]) if is_one else None,
    }
    return render_content("run.html", title, values)


def _summary(run: RunFiles, color: str) -> dict[str, Any]:
    """Return what the top of the page shows of a run."""
    model = run.config.get("policy.model_name", "")
    return {
        "name": run.name,
        "color": color,
        "state": run.state,
        "kind": run.kind,
        "model": shown_path(Path(model)) if model else "",
        "path": shown_path(run.directory.path),
        "figures": _key_figures(run),
        "warnings": run.warnings,
        "versions": run.versions,
    }


def _key_figures(run: RunFiles) -> dict[str, tuple[str, str]]:
    """Return label -> (value, remark) of the numbers at the top of the page."""
    figures = {}
    for spec in specification()["figures"]:
        if run.kind == spec.get("except"):
            continue
        label, name = spec["label"], spec["name"]
        steps, values = run.values(name)
        if len(values):
            first = f"from {values[0]:.4g} at step {steps[0]}" if len(values) > 1 else ""
            figures[label] = (f"{values[-1]:.4g}", first)
    _, speeds = run.values("performance/tokens_per_s")
    if len(speeds):
        figures["tokens/s"] = (f"{np.median(speeds):,.0f}", "median step")
    tokens = run.last("progress/num_tokens")
    if tokens is not None:
        figures["tokens"] = (f"{tokens:,.0f}", f"in {counted(int(run.steps[-1]), 'step')}")
    seconds = [
        run.values(f"timing/{name}_s")[1].sum() for name in ("step", "validation", "checkpoint")
    ]
    if len(run.steps):
        figures["duration"] = (duration(float(sum(seconds))), "all steps")
    for label, name in (("packed", "packing/utilization"), ("padding", "packing/padding_share")):
        _, values = run.values(name)
        if len(values):
            figures[label] = (f"{values.mean():.1%}", "mean")
    return figures


def duration(seconds: float) -> str:
    """Format a time. Examples: `8.2 s`, `4 min 05 s`, `2 h 10 min`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _config_differences(runs: Sequence[RunFiles]) -> TextTable:
    """Return the keys whose values differ between the runs."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    rows = []
    for key in keys:
        values = [str(run.config.get(key, "(not there)")) for run in runs]
        if len(set(values)) > 1:
            rows.append((key, *values))
    return TextTable(("key", *(run.name for run in runs)), tuple(rows))


def _metrics_table(run: RunFiles) -> TextTable:
    """Return first, last, lowest and highest value of every metric."""
    rows = []
    for name in sorted(run.metrics):
        steps, values = run.values(name)
        if len(values) and name != "unix_time_s":
            shown = (values[0], values[-1], values.min(), values.max())
            rows.append((name, str(len(steps)), *(f"{value:.6g}" for value in shown)))
    return TextTable(("metric", "steps", "first", "last", "lowest", "highest"), tuple(rows))
