"""A plan report as one HTML page: row lengths, microbatch utilization, timelines, memory."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from nemo_like import __version__
from nemo_like.prediction.comparison import Outcome
from nemo_like.prediction.grpo_step import GrpoStepPrediction
from nemo_like.prediction.memory import GIB
from nemo_like.prediction.plan_report import PlanReport
from nemo_like.reports.charts import (
    Microbatches,
    bin_fill,
    length_histogram,
    memory_stack,
    part_class,
    timeline,
)
from nemo_like.reports.grpo_step import COLUMNS, TITLE, cells, step_verdict
from nemo_like.reports.page import bullets, figures, legend, meter, page, section, table
from nemo_like.reports.terminal import (
    headline,
    memory_budgets,
    memory_unit,
    recommendation_lines,
    verdict,
)

_DRAWN = ("padded/microbatch", "packed/first_fit_decreasing/none", "verl")
"""Strategies drawn beside the chosen one: those of transformers, NeMo RL and verl."""
_COLUMNS = (
    "Over min: microbatches over their lower bound. Rank: the max-loaded rank over the mean."
    " Over bound: time over its lower bound. Step time: 1 is the work of the real tokens spread"
    " evenly. Speed: that of the fastest layout of another tool is 1. NeMo RL assigns bins to ranks"
    " round-robin."
)
_TIMELINE_LEGEND = (
    ("real", "work on tokens"),
    ("padding", "work on padding"),
    ("room", "idle"),
    ("--mean", "mean rank"),
    ("-budget", "end of the step"),
)
_STEP = 0
"""The optimizer step that is drawn."""


def plan_page(report: PlanReport) -> str:
    """Return the HTML page."""
    return page(
        "Batch plan",
        _body(report),
        f"nemo-like {__version__}. Predicted from row lengths; nothing was run.",
    )


def _body(report: PlanReport) -> Iterator[str]:
    request = report.request
    lines = headline(report)
    yield "<h1>Batch plan</h1>"
    # The second line is the caption of the length histogram.
    yield f'<p class="lead">{escape(lines[0])}. {escape(lines[2])}.</p>'
    yield from (f'<p class="note">{escape(_sentence(note))}</p>' for note in report.notes)
    yield figures(_figures(report))
    yield section(
        "Row lengths",
        f"{lines[1].capitalize()}. Uneven lengths cause padding and idle time.",
        length_histogram(report.lengths, report.max_tokens),
    )
    yield section(
        "Batching strategies", f"{_sentence(verdict(report))} {_COLUMNS}", _comparison(report)
    )
    drawn = _drawn(report)
    step = f"Optimizer step {_STEP + 1} of {report.comparison.num_steps}"
    yield section(
        "Microbatch utilization",
        f"{step}. Each bar is a microbatch; the line is the token budget.",
        legend(
            (
                ("real", "real tokens"),
                ("padding", "padding"),
                ("room", "unused"),
                ("-budget", "token budget"),
            )
        ),
        bin_fill([_tokens(outcome) for outcome in drawn], report.max_tokens),
    )
    sync_each = report.spec.sync == "microbatch"
    sync = "in every microbatch" if sync_each else "once, at the end of the step"
    yield section(
        "Timeline of the ranks",
        f"{step}. A row is a data-parallel rank; ranks synchronize {sync}. Time 1 is the work of"
        " the real tokens spread evenly.",
        legend(_TIMELINE_LEGEND),
        timeline(
            [_work(outcome) for outcome in drawn],
            _ideal(report.comparison.chosen),
            waits_at_microbatch=sync_each,
        ),
    )
    if report.memory is not None:
        yield _memory(report)
    if request.logged:
        yield section(
            "Metrics of the run",
            "Means over the steps whose lengths were recorded.",
            _logged(report),
        )
    if report.grpo is not None:
        yield section(
            "GRPO step",
            f"{_sentence(step_verdict(report.grpo))} Seconds; idle is the share of the replicas'"
            " time after their last row.",
            _grpo_step(report.grpo),
        )
    yield section("Assumptions", "Formulas of all numbers.", bullets(report.assumptions()))


def _figures(report: PlanReport) -> Iterator[tuple[str, str]]:
    comparison = report.comparison
    recommendation = report.recommendation
    chosen = comparison.chosen
    for outcome in comparison.others.values():
        yield f"{outcome.step_time / chosen.step_time:.3f}x", f"speed of {outcome.strategy.title}"
    yield f"{chosen.utilization:.1%}", f"of the budget filled by {chosen.strategy.title}"
    yield f"{max(chosen.step_time - 1, 0):.1%}", "of a step spent on padding and idle time"
    if report.memory is not None:
        unit, size = memory_unit(report)
        peak = report.memory.peak(chosen.largest_microbatch)
        yield f"{peak / size:.1f} {unit}", "predicted peak memory of one device"
    if recommendation is not None and recommendation.max_tokens:
        yield (
            f"{recommendation.max_tokens:,}",
            f"tokens per microbatch fit into {report.request.memory_gib:g} GiB",
        )


def _comparison(report: PlanReport) -> str:
    comparison = report.comparison
    heads = [
        "",
        "padding",
        "micro-batches",
        "fill",
        "over min",
        "rank tokens",
        "rank FLOPs",
        "over bound",
        "speed",
        "step time",
    ]
    unit, size = "", 1
    if report.memory is not None:
        unit, size = memory_unit(report)
        # Step time stays last: its cells have a bar.
        heads.insert(-1, f"peak {unit}")
    slowest = max(outcome.step_time for outcome in comparison.outcomes)
    rows = []
    for outcome in comparison.outcomes:
        cells = [
            escape(outcome.strategy.title),
            f"{outcome.padding_share:.1%}",
            f"{outcome.num_microbatches:.2f}",
            f"{outcome.utilization:.1%}",
            f"{outcome.num_microbatches / comparison.min_microbatches:.2f}",
            f"{outcome.rank_tokens:.3f}",
            f"{outcome.rank_flops:.3f}",
            "&ndash;" if outcome.over_bound is None else f"{outcome.over_bound:.3f}",
            f"{comparison.speedup(outcome):.2f}&times;",
            f"{outcome.step_time:.3f}{meter(outcome.step_time / slowest)}",
        ]
        if report.memory is not None:
            peak = report.memory.peak(outcome.largest_microbatch)
            cells.insert(-1, f"{peak / size:.1f}")
        rows.append((cells, outcome is comparison.chosen))
    return table(heads, rows)


def _grpo_step(prediction: GrpoStepPrediction) -> str:
    rows = []
    for times in prediction.splits:
        row = [escape(str(times.split)), *cells(times)]
        rows.append((row, times is prediction.configured))
    return table([TITLE, *COLUMNS], rows)


def _drawn(report: PlanReport) -> list[Outcome]:
    """Return the four outcomes that are drawn, the chosen one among them."""
    chosen = report.comparison.chosen_key
    # If the chosen strategy is drawn for comparison anyway, the scheduler is the fourth.
    last = "packed/balanced/flops" if chosen in _DRAWN else chosen
    return [report.comparison[key] for key in (*_DRAWN, last)]


def _tokens(outcome: Outcome) -> Microbatches:
    """Return the tokens of each microbatch of the step that is drawn."""
    start, stop = outcome.plan.step_offsets[_STEP : _STEP + 2]
    positions = outcome.plan.num_tokens[:, start:stop]
    real = outcome.real_tokens[:, start:stop]
    return Microbatches(
        title=outcome.strategy.title,
        note=f"{outcome.utilization:.1%} filled, {outcome.padding_share:.1%} padding",
        real=real.astype(float),
        padding=(positions - real).astype(float),
    )


def _work(outcome: Outcome) -> Microbatches:
    """Return the work of each microbatch of the step that is drawn."""
    start, stop = outcome.plan.step_offsets[_STEP : _STEP + 2]
    work = outcome.work[:, start:stop]
    real = outcome.real_work[:, start:stop]
    if outcome.plan.spec.sync == "step":
        # The order within a step does not matter then; the largest first is easier to compare.
        order = np.argsort(-work, axis=1, kind="stable")
        work = np.take_along_axis(work, order, axis=1)
        real = np.take_along_axis(real, order, axis=1)
    note = (
        f"max-loaded rank {outcome.rank_flops:.3f} of the mean, all steps {outcome.step_time:.3f}"
    )
    # Rounding errors of sums may make the difference slightly negative.
    padding = np.maximum(work - real, 0.0)
    return Microbatches(outcome.strategy.title, note, real, padding)


def _ideal(outcome: Outcome) -> float:
    """Return the real work of the step that is drawn, spread evenly over the ranks."""
    start, stop = outcome.plan.step_offsets[_STEP : _STEP + 2]
    step_work = outcome.real_work[:, start:stop]
    return float(step_work.sum()) / outcome.plan.spec.num_ranks


def _memory(report: PlanReport) -> str:
    assert report.memory is not None
    recommendation = report.recommendation
    gib = report.request.memory_gib
    unit, size = memory_unit(report)
    scaled: list[tuple[str, dict[str, float]]] = []
    names: dict[str, None] = {}
    for budget, description in memory_budgets(report).items():
        parts = report.memory.parts(budget)
        scaled_parts = {name: part / size for name, part in parts.items()}
        scaled.append((f"{budget:,} tokens, {description}", scaled_parts))
        names.update(dict.fromkeys(parts))
    limits: list[tuple[str, float]] = []
    if recommendation is not None and gib is not None:
        limits = [("usable", recommendation.usable_gib), ("device", gib)]
    lines = recommendation_lines(recommendation, report)
    if not lines:
        lines = ["Pass --memory-gb for a recommended token budget."]
    rows: list[tuple[list[str], bool]] = []
    for name in names:
        cells = [escape(name)]
        for _, parts in scaled:
            cells.append(f"{parts[name]:.2f}" if name in parts else "&ndash;")
        rows.append((cells, False))
    # Limits are given in GiB; the chart may be in MiB.
    scaled_limits = [(name, limit * GIB / size) for name, limit in limits]
    heads = [f"{unit}, microbatches of"]
    for label, _ in scaled:
        num_tokens, _, _ = label.partition(", ")
        heads.append(num_tokens)
    return section(
        "Memory of one device",
        " ".join(map(_sentence, lines)),
        legend([(part_class(name), name) for name in names]),
        memory_stack(scaled, scaled_limits, unit),
        table(heads, rows),
    )


def _sentence(line: str) -> str:
    """Capitalize the first letter and add a period. Example: `so it is` -> `So it is.`."""
    return f"{line[0].upper()}{line[1:]}."


def _logged(report: PlanReport) -> str:
    rows = []
    for name, (measured, planned) in report.request.logged.items():
        cells = [escape(name), f"{measured:.4f}", f"{planned:.4f}"]
        rows.append((cells, False))
    return table(["metric", "logged", "from the lengths alone"], rows)
