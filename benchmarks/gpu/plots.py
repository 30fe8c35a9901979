"""Plots of the README as SVG files, drawn with `benchmarks.gpu.svg`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.svg import Drawing, Scale

_WIDTH = 860.0
_LEFT = 330.0
_BAR = 16.0
_PITCH = 24.0
_TOP = 40.0
_COLORS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#a463f2", "#97bbf5", "#9c6b4e")
_STYLE = (
    "text{font:12px sans-serif;fill:#222}.name{font-weight:600}"
    ".grid{stroke:#ddd}.axis{stroke:#888}.mark{stroke:#d33;stroke-width:2}"
)

Entry = Mapping[str, Any]


def mfu_plot(entries: Sequence[Entry]) -> str:
    """Draw one bar per cell of the step matrix with its MFU in percent."""
    bars = [(_matrix_label(entry), {"MFU": 100 * entry["values"]["mfu"]}) for entry in entries]
    return bar_plot("MFU of training steps, %", bars, {})


def memory_plot(entries: Sequence[Entry]) -> str:
    """Draw one bar per cell with its measured peak, and a mark at the predicted one, in GB."""
    bars = []
    marks = {}
    for entry in entries:
        label = _matrix_label(entry)
        bars.append((label, {"peak": entry["values"]["peak_gb"]}))
        marks[label] = entry["values"]["predicted_peak_gb"]
    return bar_plot("Peak memory, GB: measured (bar) and predicted (mark)", bars, marks)


def phases_plot(entries: Sequence[Entry]) -> str:
    """Draw one bar per GRPO step, divided into its phases, in seconds."""
    bars = [(entry["name"], entry["values"]["phases_s"]) for entry in entries]
    return bar_plot("Phases of a GRPO step, s", bars, {})


def bar_plot(
    title: str, bars: Sequence[tuple[str, Mapping[str, float]]], marks: Mapping[str, float]
) -> str:
    """Return an SVG of horizontal bars (label, part -> value), with marks by label."""
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    totals = [sum(parts.values()) for _, parts in bars]
    high = max([*totals, *marks.values(), 1e-9])
    num_legend_lines = len(names) if len(names) > 1 else 0
    bottom = _TOP + _PITCH * len(bars)
    drawing = Drawing(_WIDTH, bottom + 30 + 16 * num_legend_lines, title)
    drawing.text(2, 18, title, "name")
    x = Scale(1.05 * high, _LEFT, _WIDTH - 60)
    for tick in x.ticks():
        drawing.line(x(tick), _TOP - 6, x(tick), bottom, "grid")
        drawing.text(x(tick), bottom + 16, f"{tick:g}", anchor="middle")
    for index, (label, parts) in enumerate(bars):
        top = _TOP + _PITCH * index
        drawing.text(_LEFT - 8, top + 12, label, anchor="end")
        start = 0.0
        for name, value in parts.items():
            width = x(start + value) - x(start)
            kind = f"part{names.index(name) % len(_COLORS)}"
            drawing.rect(x(start), top, width, _BAR, kind, f"{name}: {value:.3g}")
            start += value
        drawing.text(x(start) + 6, top + 12, f"{start:.3g}")
        if label in marks:
            drawing.line(x(marks[label]), top - 2, x(marks[label]), top + _BAR + 2, "mark")
    drawing.line(_LEFT, _TOP - 6, _LEFT, bottom, "axis")
    for index, name in enumerate(names[: num_legend_lines or 0]):
        y = bottom + 34 + 16 * index
        drawing.rect(_LEFT, y - 10, 10, 10, f"part{index % len(_COLORS)}")
        drawing.text(_LEFT + 16, y, name)
    return _standalone(str(drawing))


def _standalone(svg: str) -> str:
    """Return the SVG of a page as a file of its own, with colors."""
    colors = "".join(f".part{index}{{fill:{color}}}" for index, color in enumerate(_COLORS))
    head, _, rest = svg.partition(">")
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ')
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f"{head}><style>{_STYLE}{colors}</style>{background}{rest}"


def _matrix_label(entry: Entry) -> str:
    settings = entry["settings"]
    return (
        f"{settings['model']}, {settings['budget']} tokens, {settings['checkpointing']},"
        f" {settings['rows']} rows"
    )
