"""A plan report as one HTML page: row lengths, strategies, timelines, memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from nemo_like.prediction.comparison import Outcome
from nemo_like.prediction.memory import GIB
from nemo_like.prediction.plan_report import PlanReport
from nemo_like.prediction.search import Candidate
from nemo_like.prediction.table import (
    FORMULAS,
    duration_lines,
    headline,
    logged_table,
    memory_budgets,
    memory_table,
    memory_unit,
    overrides_text,
    recommendation_lines,
    search_table,
    shared_lines,
    strategies_table,
    verdict,
)
from nemo_like.reports.charts import (
    COLORS,
    Chart,
    histogram,
    microbatch_starts,
    rank_timeline,
    stacked_bars,
)
from nemo_like.reports.page import render_content, render_page

_DRAWN = ("padded/microbatch", "packed/first_fit_decreasing/none", "ranks_first")
"""Strategies drawn beside the chosen one, one of each simple method."""
_PARTS = (
    *("weights", "gradients", "optimizer", "ema", "reference", "dequantized matrix"),
    *("gathered weights", "teacher", "activations", "logits"),
)
_PART_COLORS = {
    **{name: COLORS[index] for index, name in enumerate(_PARTS)},
    # Parts that are never in one bar with the ones above.
    "images": COLORS[_PARTS.index("teacher")],
    "teacher embeddings": COLORS[_PARTS.index("teacher")],
    "backward": COLORS[_PARTS.index("logits")],
}
"""Part of the memory -> color."""


def plan_page(report: PlanReport, found: list[Candidate]) -> str:
    """Return the HTML page of a report, with the candidates of the search before it."""
    comparison = report.comparison
    # If the chosen strategy is drawn for comparison anyway, the scheduler is the fourth.
    last = comparison.chosen_key
    if last in _DRAWN:
        last = "packed/balanced/flops"
    drawn = [comparison[key] for key in (*_DRAWN, last)]
    waits = report.spec.sync == "microbatch"
    values = {
        "headline": headline(report),
        "notes": report.notes,
        "verdict": [*shared_lines(report), verdict(report), *duration_lines(report)],
        "search": search_table(found) if found else None,
        "recommended": overrides_text(found[0]) if found else "",
        "recommendation": recommendation_lines(report),
        "num_steps": comparison.num_steps,
        "sync": "in every microbatch" if waits else "once, at the end of the step",
        "figures": _key_figures(report),
        "lengths": _length_chart(report),
        "timelines": list(_timelines(drawn, waits)),
        "memory": _memory_chart(report),
        "strategies": strategies_table(report),
        "memory_table": memory_table(report),
        "logged": logged_table(report),
        "formulas": FORMULAS,
    }
    return render_page(render_content("plan.html", "Batch plan", values))


def _key_figures(report: PlanReport) -> dict[str, str]:
    """Return label -> value of the numbers at the top of the page."""
    chosen = report.comparison.chosen
    unit, size = memory_unit(report)
    figures = {
        "padding": f"{chosen.padding_share:.1%}",
        "filled": f"{chosen.utilization:.1%}",
        "microbatches per step": f"{chosen.num_microbatches:.2f}",
        "max-loaded rank": f"{chosen.rank_flops:.3f}",
        "step time": f"{chosen.step_time:.3f}",
        "predicted peak": f"{report.peak_bytes(chosen) / size:.1f} {unit}",
    }
    if report.recommendation is not None and report.recommendation.max_tokens:
        figures["recommended budget"] = f"{report.recommendation.max_tokens:,} tokens"
    return figures


def _length_chart(report: PlanReport) -> Chart:
    """Return the histogram of row lengths, with the token budget if it is not far above them."""
    lengths = report.lengths
    marks = length_marks(lengths)
    if report.request.max_tokens <= 1.6 * lengths.max():
        marks["budget"] = float(report.request.max_tokens)
    return histogram("tokens per row", {"rows": lengths}, unit="tokens", marks=marks)


def length_marks(lengths: np.ndarray) -> dict[str, float]:
    """Return label -> number of tokens of the lines in a histogram of `lengths` [B]."""
    return {
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "p99": float(np.percentile(lengths, 99)),
        "longest": float(lengths.max()),
    }


def _timelines(outcomes: list[Outcome], waits: bool) -> Iterator[Chart]:
    """Yield a step over time with one bar per rank of each strategy.

    All have the same time axis, whose unit is the real work spread evenly over the ranks.
    """
    # The values [R, M] of the microbatches of the first optimizer step.
    sizes = [outcome.plan.step_offsets[1] for outcome in outcomes]
    last = outcomes[-1].real_work[:, : sizes[-1]]
    unit = float(last.sum()) / len(last)
    work = [each.work[:, :size] / unit for each, size in zip(outcomes, sizes, strict=True)]
    real = [each.real_work[:, :size] / unit for each, size in zip(outcomes, sizes, strict=True)]
    end = max(float((microbatch_starts(each, waits=waits) + each).max()) for each in work)
    for outcome, work_of, real_of in zip(outcomes, work, real, strict=True):
        note = (
            f"max-loaded rank {outcome.rank_flops:.3f} of the mean,"
            f" all steps {outcome.step_time:.3f}"
        )
        title = outcome.strategy.title
        yield rank_timeline(title, work_of, real_of, waits=waits, note=note, end=end)


def _memory_chart(report: PlanReport) -> Chart:
    """Return the memory of one device by part, one bar per number of tokens."""
    unit, size = memory_unit(report)
    marks = {}
    if report.recommendation is not None and report.request.memory_gib is not None:
        marks["usable"] = report.recommendation.usable_gib * GIB / size
        marks["device"] = report.request.memory_gib * GIB / size
    bars = {}
    notes = []
    for budget, description in memory_budgets(report).items():
        parts = report.parts(budget)
        bars[f"{budget:,} tokens"] = {name: number / size for name, number in parts.items()}
        peak = sum(parts.values()) / size
        notes.append(f"{budget:,} tokens ({description}): {peak:.1f} {unit}")
    title = ", ".join(notes)
    return stacked_bars(title, bars, unit=unit, colors=_PART_COLORS, marks=marks)
