"""A predicted step as a table, as lines and as a JSON record."""

from __future__ import annotations

from typing import Any

from nemo_like.config.errors import counted
from nemo_like.prediction.step_time import StepPrediction
from nemo_like.prediction.table import TextTable


def step_table(step: StepPrediction) -> TextTable:
    """Return the table with one phase of a step per row."""
    rows = [
        (each.name, f"{each.measured_s:.3g}", f"{each.predicted_s:.3g}", each.rule)
        for each in step.phases
    ]
    total = ("step", f"{step.measured_s:.3g}", f"{step.predicted_s:.3g}", "sum of the phases")
    heads = ("phase", "measured s", "predicted s", "grows with")
    return TextTable(heads, (*rows, total), marked=len(rows))


def step_line(step: StepPrediction) -> str:
    """Return the line about the predicted throughput, and what it is based on."""
    text = (
        f"predicted: {step.predicted_s:.3g} s per step, {step.tokens_per_s:,.0f} tokens/s,"
        f" {step.tokens_per_s / step.num_workers:,.0f} per policy worker ({step.num_workers:,});"
        f" measured: {counted(step.num_recorded, 'step')} of the past run"
    )
    return "; ".join((text, *step.notes))


def step_record(step: StepPrediction) -> dict[str, Any]:
    """Return the numbers that `step_table` and `step_line` show."""
    phases = {}
    for each in step.phases:
        seconds = {"measured_s": each.measured_s, "predicted_s": each.predicted_s}
        phases[each.name] = {**seconds, "costs": each.costs.tolist()}
    names = ("predicted_s", "measured_s", "tokens_per_s", "num_recorded", "notes")
    return {**{name: getattr(step, name) for name in names}, "phases": phases}
