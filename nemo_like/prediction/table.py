"""A plan report as sentences and tables, and on a terminal or in a pipe of 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nemo_like.config.errors import counted, printable
from nemo_like.prediction.comparison import Outcome
from nemo_like.prediction.duration import BYTES_PER_S
from nemo_like.prediction.lengths import BUBBLE
from nemo_like.prediction.memory import GIB, usable_bytes
from nemo_like.prediction.plan_report import PlanReport, PlanRequest, seconds_per_step
from nemo_like.prediction.search import KEYS, NODE_GPUS, Candidate, alternatives

FORMAT = 4
"""Format of the JSON record; within one value no key is renamed or removed."""
FORMULAS = "predicted from row lengths; docs/planner.md has the formulas and what they leave out"
_PIPE_WIDTH = 100
_MAX_WIDTH = 120
"""Max width of running text: longer lines are hard to read."""
_MIN_GAIN = 0.0005
"""Gain in speed that is shown as more than 0.0%."""

_STRATEGY_HEADS = (
    *("rows to microbatches", "pad-\nding", "micro-\nbatches", "\nfill", "over\nmin"),
    *("rank\ntokens", "rank\nFLOPs", "over\nbound", "step\ntime", "\nspeed"),
)


_OUTCOME_KEYS = (
    *("padding_share", "utilization", "rank_tokens", "rank_flops", "over_bound", "step_time"),
    *("largest_microbatch", "metrics"),
)


@dataclass(frozen=True)
class TextTable:
    """A table of texts; the first column has names, the others numbers."""

    heads: tuple[str, ...]
    """Heads of the columns, which may have two lines."""
    rows: tuple[tuple[str, ...], ...]
    marked: int | None = None
    """The row that is emphasized."""


def show(
    report: PlanReport, found: list[Candidate], step: tuple[TextTable, str] | None = None
) -> None:
    """Print the report of the best candidate of a search, or of a config without candidates.

    `step` is a table of the phases of a step, with the line below it.
    """
    console = Console(highlight=False)
    # Rich assumes 80 columns for a pipe, in which the tables do not fit.
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    for line in headline(report):
        _say(console, line)
    for note in report.notes:
        _say(console, f"note: {note}")
    if found:
        console.print(_rich(search_table(found)))
        _say(console, f"recommended: {overrides_text(found[0])}")
    # Narrow columns, so that all fit into the width of a pipe.
    console.print(_rich(strategies_table(report), padding=0))
    for line in shared_lines(report):
        _say(console, line)
    _say(console, verdict(report))
    for line in duration_lines(report):
        _say(console, line)
    if step is not None:
        console.print(_rich(step[0]))
        _say(console, step[1])
    console.print(_rich(memory_table(report)))
    for line in recommendation_lines(report):
        _say(console, line)
    if report.request.logged:
        console.print(_rich(logged_table(report)))
    _say(console, FORMULAS)


def _say(console: Console, line: str) -> None:
    text = textwrap.fill(
        # Names of files and models may have characters that the terminal cannot show.
        printable(line, console.encoding),
        min(console.width, _MAX_WIDTH),
        break_on_hyphens=False,
    )
    console.print(Text(text), soft_wrap=True)


def _rich(table: TextTable, padding: int | tuple[int, int] = (0, 1)) -> Table:
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, padding=padding)
    for index, head in enumerate(table.heads):
        shown.add_column(head, justify="right" if index else "left", no_wrap=True)
    for index, row in enumerate(table.rows):
        shown.add_row(*row, style="bold" if index == table.marked else None)
    return shown


def headline(report: PlanReport) -> list[str]:
    """Return the lines about what was planned: rows, lengths, model and layout."""
    lengths = report.lengths
    comparison = report.comparison
    request = report.request
    median, p99 = np.percentile(lengths, (50, 99))
    rows_per_step = counted(comparison.batch_size, "row")
    if comparison.chosen.strategy.stream is not None:
        mean_rows = len(lengths) / comparison.num_steps
        others = f"the other strategies: {rows_per_step}"
        rows_per_step = f"about {mean_rows:,.0f} rows as configured ({others})"
    return [
        (
            f"{counted(len(lengths), 'row')} from {request.rows.source}:"
            f" {counted(comparison.num_steps, 'step')} of {rows_per_step}"
        ),
        (
            f"tokens per row: mean {lengths.mean():,.0f}, median {median:,.0f}, p99 {p99:,.0f},"
            f" longest {lengths.max():,}"
        ),
        (
            f"{request.model.name} ({_count(request.model.num_params)} parameters),"
            f" {request.placement.parallel_layout}, {request.placement.precision}, microbatches of"
            f" at most {request.max_tokens:,} tokens, ranks synchronize once per {report.spec.sync}"
        ),
    ]


def _count(number: float) -> str:
    """Format a number of parameters. Example: 7615616512 is `7.62 B`, 134515008 is `134.5 M`."""
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def memory_unit(report: PlanReport) -> tuple[str, int]:
    """Return (name, bytes) of the unit in which memory is shown."""
    # A tiny model on the CPU would be 0.0 GiB.
    is_large = report.peak_bytes(report.comparison.chosen) >= GIB
    return ("GiB", GIB) if is_large else ("MiB", 1 << 20)


def memory_budgets(report: PlanReport) -> dict[int, str]:
    """Return max tokens -> description of the microbatches whose memory is shown."""
    budgets = {report.comparison.chosen.largest_microbatch: "the largest microbatch planned"}
    if report.recommendation is not None and report.recommendation.max_tokens:
        # If both are the same number of tokens it is one column, named by what was planned.
        budgets.setdefault(report.recommendation.max_tokens, "the max that fits")
    return budgets


def verdict(report: PlanReport) -> str:
    """Return one sentence about the speed of the chosen strategy."""
    comparison = report.comparison
    chosen = comparison.chosen
    speeds = []
    for method, outcome in sorted(comparison.by_method.items(), key=lambda item: item[1].step_time):
        if method == "padded batches":
            # A few rows at a time, each padded to the longest: nobody would choose it here.
            continue
        the_speed = "" if speeds else "the speed "
        speeds.append(f"{outcome.step_time / chosen.step_time:.3f}x {the_speed}of {method}")
    share = chosen.metrics.get(BUBBLE)
    bubble = "" if share is None else f", the pipeline bubble ({share:.1%} of the step) included"
    return (
        f"{chosen.strategy.title}: {', '.join(speeds)} (the fastest packer of each),"
        f" {chosen.above_ideal:.1%} above a step without padding and idle time{bubble}"
    )


def duration_lines(report: PlanReport) -> list[str]:
    """Return the lines about the time in seconds, with what it assumes; none without rates."""
    request = report.request
    if not request.has_seconds:
        return []
    comparison = report.comparison
    seconds = seconds_per_step(request, comparison.chosen)
    num_tokens = int(report.lengths.sum())
    total = seconds * comparison.num_steps
    speed = f"{seconds:.3g} s per step, {num_tokens / total:,.0f} tokens/s"
    time = f"as in the past run: {speed}; these rows take {total / 3600:.3g} hours"
    if request.num_gpus:
        gpu_hours = total * request.num_gpus / 3600
        model = "H100 GPU" if request.measured is None else "GPU"
        time = (
            f"{counted(request.num_gpus, model)}: {speed}, {gpu_hours / num_tokens * 1e9:,.0f} GPU"
            f" hours per billion tokens; these rows take {gpu_hours:.3g} GPU hours"
        )
    return [time, _source_of_rates(request)]


def _source_of_rates(request: PlanRequest) -> str:
    """Return what the times in seconds are based on."""
    scope = "training steps alone, without loading, checkpoints and generation"
    duration = request.duration
    if request.measured is not None:
        rate = request.measured
        share = (
            "" if request.num_gpus == 0 else f" ({duration.mfu / rate.scale:.0%} of 989 TFLOP/s)"
        )
        return (
            f"measured: the median training time of {counted(rate.num_steps, 'step')} of the past"
            f" run{share}; {scope}"
        )
    kernels = "compiled" if duration.is_compiled else "eager"
    return (
        f"assumed: {duration.mfu:.0%} of 989 TFLOP/s ({kernels} layers, measured on one"
        f" H200 with 1B and 8B shapes), collectives at {BYTES_PER_S / 1e9:.0f} GB/s per GPU;"
        f" {scope}"
    )


def search_table(found: list[Candidate]) -> TextTable:
    """Return the table with the best candidate and the best ones with other values."""
    best = found[0]
    rows = []
    for each in alternatives(found):
        layout = each.request.placement.parallel_layout
        ratio = each.seconds / best.seconds
        reason = "recommended" if each is best else f"{ratio:.2f}x the time"
        if each.is_bound:
            reason = f"at least {reason}"
        if not each.fits:
            reason = "the longest row does not fit"
        rows.append(
            (
                each.setting.checkpointing,
                *map(str, (*layout.shape, layout.ep)),
                f"{each.request.max_tokens:,}" if each.fits else "-",
                f"{each.peak_gib:.1f}",
                f"{each.seconds:.3g}" if each.fits else "-",
                reason,
            )
        )
    heads = ("checkpointing", "pp", "dp", "cp", "tp", "ep", "tokens", "GiB", "s/step", "")
    return TextTable(heads, tuple(rows), marked=0)


def overrides_text(candidate: Candidate) -> str:
    """Return the keys of a candidate as overrides of a command."""
    request = candidate.request
    num_nodes = max(request.num_gpus // NODE_GPUS, 1)
    values = {
        "cluster.num_nodes": num_nodes,
        "cluster.gpus_per_node": request.num_gpus // num_nodes,
        "policy.engine": request.placement.engine,
        **dict(zip(KEYS, candidate.setting, strict=True)),
        "parallel.sequence": str(candidate.setting.tensor > 1).lower(),
        request.budget_name: request.max_tokens,
    }
    return " ".join(f"{key}={value}" for key, value in values.items())


def search_record(found: list[Candidate]) -> list[dict[str, Any]]:
    """Return every candidate, the recommended one first."""
    return [
        {
            "overrides": overrides_text(each),
            "peak_gib": each.peak_gib,
            "seconds": each.seconds if each.fits else None,
            "is_lower_bound": each.is_bound,
        }
        for each in found
    ]


def shared_lines(report: PlanReport) -> list[str]:
    """Return the lines about what shared prefixes save, if rows have any."""
    comparison = report.comparison
    shared = comparison.shared
    if shared is None:
        return []
    separate = comparison.separate
    unit, size = memory_unit(report)
    num_tokens = int(shared.plan.lengths.sum())
    num_computed = int(shared.plan.computed_lengths.sum())
    peaks = [report.peak_bytes(outcome) / size for outcome in (shared, separate)]
    used = "" if comparison.chosen is shared else ", too little for policy.shared_prefix=auto"
    line = (
        f"shared prefixes: {num_computed:,} of {num_tokens:,} tokens computed"
        f" ({num_tokens / num_computed:.2f}x fewer), step time {shared.step_time:.3f} instead of"
        f" {separate.step_time:.3f}, peak {peaks[0]:.1f} instead of {peaks[1]:.1f} {unit};"
        f" {shared.metrics['packing/shared_work_share']:.1%} less work{used}"
    )
    return [line]


def recommendation_lines(report: PlanReport) -> list[str]:
    """Return the lines about the recommended token budget and its effect."""
    recommendation = report.recommendation
    if recommendation is None:
        return []
    max_tokens = report.request.max_tokens
    usable = f"{recommendation.usable_gib:.1f} of {report.request.memory_gib:g} GiB"
    if recommendation.max_tokens == 0:
        return [f"nothing fits: the weights alone exceed the usable {usable}; use more GPUs"]
    outcome = recommendation.outcome
    chosen = report.comparison.chosen
    gain = 0.0 if outcome is None else chosen.step_time / outcome.step_time - 1.0
    if outcome is not None and outcome.max_tokens > max_tokens and gain < _MIN_GAIN:
        fitting = f"up to {recommendation.max_tokens:,} tokens per microbatch fit into {usable}"
        return [f"{fitting}, but more than {max_tokens:,} make no step faster"]
    budget = f"recommended budget: {recommendation.max_tokens:,} tokens per microbatch"
    reason = "the max whose peak fits into"
    if recommendation.max_tokens == recommendation.max_useful_tokens:
        reason = "one microbatch per rank and step; its peak fits into"
    lines = [f"{budget}, {reason} {usable}"]
    if outcome is None:
        lines.append(
            f"the longest row ({report.lengths.max():,} tokens) does not fit into it; --gpus N"
            " searches all layouts"
        )
    elif outcome.max_tokens != max_tokens:
        lines.append(
            f"with {outcome.max_tokens:,} tokens: {outcome.num_microbatches:.2f} instead of"
            f" {chosen.num_microbatches:.2f} microbatches per step, step time"
            f" {outcome.step_time:.3f} instead of {chosen.step_time:.3f} ({gain:+.1%} speed)"
        )
    return lines


def strategies_table(report: PlanReport) -> TextTable:
    """Return the table with one strategy per row."""
    comparison = report.comparison
    unit, size = memory_unit(report)
    rows = []
    for outcome in comparison.outcomes:
        over_min = f"{outcome.num_microbatches / comparison.min_microbatches:.2f}"
        if outcome.strategy.shares_prefixes:
            # The bound is that of complete rows.
            over_min = "-"
        rows.append(
            (
                outcome.strategy.title,
                f"{outcome.padding_share:.1%}",
                f"{outcome.num_microbatches:.2f}",
                f"{outcome.utilization:.1%}",
                over_min,
                f"{outcome.rank_tokens:.3f}",
                f"{outcome.rank_flops:.3f}",
                "-" if outcome.over_bound is None else f"{outcome.over_bound:.3f}",
                f"{outcome.step_time:.3f}",
                f"{comparison.speedup(outcome):.2f}x",
                f"{report.peak_bytes(outcome) / size:.1f}",
            )
        )
    marked = comparison.outcomes.index(comparison.chosen)
    return TextTable((*_STRATEGY_HEADS, f"peak\n{unit}"), tuple(rows), marked)


def memory_table(report: PlanReport) -> TextTable:
    """Return the table with one part of the memory per row and one budget per column."""
    unit, size = memory_unit(report)
    budgets = list(memory_budgets(report))
    columns = [report.parts(budget) for budget in budgets]
    # A part may be missing for one budget: the peak is in the logits or in the backward pass.
    names = dict.fromkeys(name for parts in columns for name in parts)
    rows = []
    for name in names:
        cells = (f"{parts[name] / size:.2f}" if name in parts else "-" for parts in columns)
        rows.append((name, *cells))
    peaks = (f"{sum(parts.values()) / size:.2f}" for parts in columns)
    heads = (f"memory of one device, {unit}", *(f"{budget:,} tokens" for budget in budgets))
    return TextTable(heads, (*rows, ("peak", *peaks)), marked=len(rows))


def logged_table(report: PlanReport) -> TextTable:
    """Return the table of logged and planned metrics of a past run."""
    rows: Iterator[tuple[str, ...]] = (
        (name, f"{measured:.4f}", f"{planned:.4f}")
        for name, (measured, planned) in report.request.logged.items()
    )
    return TextTable(("the run", "logged", "from its lengths"), tuple(rows))


def to_record(report: PlanReport) -> dict[str, Any]:
    """Return everything that the table and the page show."""
    request = report.request
    comparison = report.comparison
    lengths = report.lengths
    placement = request.placement
    layout = placement.parallel_layout
    median, p90, p99 = np.percentile(lengths, (50, 90, 99)).tolist()
    return {
        "format": FORMAT,
        "rows": {
            "source": request.rows.source,
            "num_rows": len(lengths),
            "num_tokens": int(lengths.sum()),
            "mean": float(lengths.mean()),
            "p50": median,
            "p90": p90,
            "p99": p99,
            "max": int(lengths.max()),
        },
        "setting": {
            "max_tokens": request.max_tokens,
            "batch_size": comparison.batch_size,
            "num_steps": comparison.num_steps,
            "sync": report.spec.sync,
            "seed": report.spec.seed,
            "parallel": {**layout.shape._asdict(), "ep": layout.ep},
            "sequence_parallel": layout.sequence_parallel,
            "engine": placement.engine,
            "precision": placement.precision,
            "activation_checkpointing": placement.activation_checkpointing,
            "cost": asdict(report.spec.cost),
            "model": {"name": request.model.name, "num_params": request.model.num_params},
        },
        # The key keeps the name it had in the first version of the format.
        "least_microbatches": comparison.min_microbatches,
        "seconds_per_step": (
            seconds_per_step(request, comparison.chosen) if request.has_seconds else None
        ),
        "chosen": comparison.chosen_key,
        "baseline": comparison.baseline.strategy.key,
        "strategies": {
            outcome.strategy.key: _outcome(outcome, report) for outcome in comparison.outcomes
        },
        "memory": _memory(report),
        "logged": {
            name: {"logged": logged, "planned": planned}
            for name, (logged, planned) in request.logged.items()
        },
        "notes": list(report.notes),
    }


def _outcome(outcome: Outcome, report: PlanReport) -> dict[str, Any]:
    return {
        "title": outcome.strategy.title,
        "microbatches_per_step": outcome.num_microbatches,
        "speedup": report.comparison.speedup(outcome),
        "peak_gib": report.peak_bytes(outcome) / GIB,
        **{name: getattr(outcome, name) for name in _OUTCOME_KEYS},
    }


def _memory(report: PlanReport) -> dict[str, Any]:
    largest = report.comparison.chosen.largest_microbatch
    record: dict[str, Any] = {
        "tokens": largest,
        "bytes": report.parts(largest),
        "peak_bytes": report.memory.peak(largest),
    }
    recommendation = report.recommendation
    if recommendation is None or report.request.memory_gib is None:
        return record
    budget = recommendation.max_tokens
    outcome = recommendation.outcome
    return {
        **record,
        "device_gib": report.request.memory_gib,
        "usable_bytes": usable_bytes(report.request.memory_gib),
        "recommended_max_tokens": budget,
        "enough_max_tokens": recommendation.max_useful_tokens,
        # A budget of 0 means that nothing fits; then there are no bytes to show.
        "recommended_bytes": report.parts(budget) if budget else None,
        "recommended_step_time": outcome and outcome.step_time,
        "recommended_microbatches_per_step": outcome and outcome.num_microbatches,
    }
