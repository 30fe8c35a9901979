"""A plan report as one HTML page: row lengths, strategies, timelines, memory.

`page.html` has the layout and the colors. Charts are SVG paths of rectangles, one per color.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources

import numpy as np
from jinja2 import Environment

from nemo_like import __version__
from nemo_like.prediction.comparison import Outcome
from nemo_like.prediction.memory import GIB
from nemo_like.prediction.plan_report import PlanReport
from nemo_like.prediction.table import (
    FORMULAS,
    headline,
    logged_table,
    memory_budgets,
    memory_table,
    memory_unit,
    recommendation_lines,
    shared_lines,
    strategies_table,
    verdict,
)

_DRAWN = ("padded/microbatch", "packed/first_fit_decreasing/none", "verl")
"""Strategies drawn beside the chosen one: of transformers, NeMo RL and verl."""
_NUM_BARS = 72
_MAX_RANKS = 64


@dataclass(frozen=True)
class Chart:
    """Rectangles in a coordinate system from (0, 0) at the top left to (`width`, `height`)."""

    title: str
    note: str
    width: float
    height: float
    paths: dict[str, str]
    """Color class -> SVG path."""
    marks: dict[str, float]
    """Label -> position of a vertical line."""


def plan_page(report: PlanReport) -> str:
    """Return the HTML page."""
    template = resources.files("nemo_like.prediction").joinpath("page.html").read_text("utf-8")
    comparison = report.comparison
    # If the chosen strategy is drawn for comparison anyway, the scheduler is the fourth.
    last = comparison.chosen_key
    if last in _DRAWN:
        last = "packed/balanced/flops"
    drawn = [comparison[key] for key in (*_DRAWN, last)]
    waits = report.spec.sync == "microbatch"
    part_names = {name for budget in memory_budgets(report) for name in report.memory.parts(budget)}
    return (
        Environment(autoescape=True, trim_blocks=True)
        .from_string(template)
        .render(
            version=__version__,
            headline=headline(report),
            notes=report.notes,
            verdict=". ".join([*shared_lines(report), verdict(report)]),
            recommendation=recommendation_lines(report),
            num_steps=comparison.num_steps,
            sync="in every microbatch" if waits else "once, at the end of the step",
            lengths=_length_chart(report),
            timeline=list(_timelines(drawn, waits)),
            memory=list(_memory_charts(report)),
            parts=[name for name in _PART_COLORS if name in part_names],
            colors=_PART_COLORS,
            strategies=strategies_table(report),
            memory_table=memory_table(report),
            logged=logged_table(report),
            formulas=FORMULAS,
        )
    )


def _boxes(x: np.ndarray, y: np.ndarray, width: np.ndarray | float, height: np.ndarray) -> str:
    """Return rectangles as one SVG path, without the empty ones; the arrays are broadcast."""
    path = ""
    for left, top, size_x, size_y in np.broadcast(x, y, width, height):
        if size_x > 0 and size_y > 0:
            path += f"M{left:.5g} {top:.5g}h{size_x:.4g}v{size_y:.4g}h{-size_x:.4g}z"
    return path


def _length_chart(report: PlanReport) -> Chart:
    """Return the histogram of row lengths, with the token budget if it is not far above them."""
    lengths = report.lengths
    longest = int(lengths.max())
    marks = {
        "median": float(np.median(lengths)),
        "mean": float(lengths.mean()),
        "p99": float(np.percentile(lengths, 99)),
        "longest": float(longest),
    }
    if report.request.max_tokens <= 1.6 * longest:
        marks["budget"] = float(report.request.max_tokens)
    width = 1.02 * max(marks.values())
    counts, edges = np.histogram(lengths, bins=_NUM_BARS, range=(0, width))
    bar = 0.9 * width / _NUM_BARS
    bars = _boxes(edges[:-1], counts.max() - counts, bar, counts)
    note = f"at most {counts.max():,} rows in a bar"
    return Chart("tokens per row", note, width, float(counts.max()), {"real": bars}, marks)


def _timelines(outcomes: list[Outcome], waits_at_microbatch: bool) -> Iterator[Chart]:
    """Yield a step over time with one bar per rank: real work, work on padding, idle time.

    All have the same time axis, whose unit is the real work spread evenly over the ranks.
    """
    panels = []
    for outcome in outcomes:
        # The values [R, M] of the microbatches of the first optimizer step.
        num_microbatches = outcome.plan.step_offsets[1]
        work = outcome.work[:, :num_microbatches]
        real = outcome.real_work[:, :num_microbatches]
        if waits_at_microbatch:
            # A microbatch starts when the slowest rank has finished the one before.
            starts = np.cumsum(work.max(axis=0)) - work.max(axis=0) + np.zeros_like(work)
        else:
            starts = np.cumsum(work, axis=1) - work
        panels.append((outcome, work, real, starts))
    ideal = float(panels[-1][2].sum()) / len(panels[-1][2])
    last_end = max(float((starts + work).max()) for _, work, _, starts in panels) / ideal
    for outcome, work, real, starts in panels:
        # A sample of the ranks, evenly spaced, if there are more than bars.
        ranks = np.linspace(0, len(work) - 1, min(len(work), _MAX_RANKS)).round().astype(int)
        y = np.arange(len(ranks))[:, None]
        start, end, middle = (
            values[ranks] / ideal for values in (starts, starts + work, starts + real)
        )
        # Real work is drawn first and work on padding after it, although they are mixed.
        height = np.full_like(start, 0.8)
        paths = {
            "real": _boxes(start, y, middle - start, height),
            "padding": _boxes(middle, y, end - middle, height),
        }
        marks = {"mean rank": float(work.sum()) / len(work) / ideal, "end": float(end.max())}
        note = (
            f"max-loaded rank {outcome.rank_flops:.3f} of the mean,"
            f" all steps {outcome.step_time:.3f}"
        )
        yield Chart(outcome.strategy.title, note, 1.01 * last_end, len(ranks), paths, marks)


_PART_COLORS = {
    "weights": "#2f5579",
    "gradients": "#4d7ca8",
    "optimizer": "#86a9c9",
    "ema": "#a8c3da",
    "reference": "#8a79a8",
    "dequantized matrix": "#7fb3ab",
    "gathered weights": "#4f8f86",
    "teacher": "#6f8f4a",
    "teacher embeddings": "#6f8f4a",
    "activations": "#d09a45",
    "logits": "#b9674b",
    "backward": "#b9674b",
}
"""Part of the memory -> color."""


def _memory_charts(report: PlanReport) -> Iterator[Chart]:
    """Yield the memory of one device by part, one bar per number of tokens, on the same scale."""
    unit, size = memory_unit(report)
    limits = {}
    if report.recommendation is not None and report.request.memory_gib is not None:
        limits["usable"] = report.recommendation.usable_gib * GIB / size
        limits["device"] = report.request.memory_gib * GIB / size
    bars = {
        f"{budget:,} tokens, {description}": report.memory.parts(budget)
        for budget, description in memory_budgets(report).items()
    }
    width = 1.02 * max(
        *(sum(parts.values()) / size for parts in bars.values()), 0, *limits.values()
    )
    for title, parts in bars.items():
        start = 0.0
        paths = {}
        for name, num_bytes in parts.items():
            paths[name] = f"M{start:.5g} 0h{num_bytes / size:.5g}v1H{start:.5g}z"
            start += num_bytes / size
        yield Chart(title, f"{start:.1f} {unit}", width, 1.0, paths, limits)
