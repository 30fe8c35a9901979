"""Charts of a batch plan from plain arrays: row lengths, microbatch fill, timeline, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.config.text import counted
from nemo_like.integer_math import ceil_div
from nemo_like.reports.svg import Drawing, Scale, spread_labels

WIDTH = 960
_LEFT = 46
_CHARACTER = 6.3
"""Width of a character of small text."""


@dataclass(frozen=True, eq=False)
class Microbatches:
    """One optimizer step of one strategy; R data-parallel ranks with M microbatches each."""

    title: str
    note: str
    """A number or two beside the title."""
    real: np.ndarray
    """Real tokens, or their work, float64 [R, M]."""
    padding: np.ndarray
    """Padding tokens, or their work, float64 [R, M]."""


def length_histogram(lengths: np.ndarray, max_tokens: int, num_bins: int = 72) -> Drawing:
    """Draw a histogram of row lengths int64 [B], with mean, median, p99 and the token budget.

    The budget is left out if it is far above the longest row.
    """
    longest = int(lengths.max())
    # A distant budget would leave most of the chart empty.
    shows_budget = max_tokens <= 1.6 * longest
    high = 1.02 * max(longest, max_tokens if shows_budget else 0)
    counts, edges = np.histogram(lengths, bins=num_bins, range=(0, high))
    drawing = Drawing(WIDTH, 236, f"Histogram of {len(lengths)} row lengths")
    x = Scale(high, _LEFT, WIDTH - 8)
    # SVG counts y downward, so the axis starts at the bottom.
    y = Scale(float(counts.max()), 196, 34)
    _value_axis(drawing, y, x, [f"{tick:,.0f}" for tick in y.ticks(4)], y.ticks(4))
    for count, low, up in zip(counts.tolist(), edges[:-1], edges[1:], strict=True):
        share = f"{counted(count, 'row')} of {low:,.0f} to {up:,.0f} tokens"
        drawing.rect(x(low) + 0.5, y(count), x(up) - x(low) - 1, y(0) - y(count), "real", share)
    drawing.line(_LEFT, 196, WIDTH - 8, 196, "axis")
    for tick in x.ticks(8):
        drawing.text(x(tick), 212, f"{tick:,.0f}", anchor="middle")
    drawing.text(WIDTH - 8, 230, "tokens per row", anchor="end")
    marks = [
        ("median", float(np.median(lengths))),
        ("mean", float(lengths.mean())),
        ("p99", float(np.percentile(lengths, 99))),
        ("longest", float(longest)),
    ]
    if shows_budget:
        marks.append(("budget", float(max_tokens)))
    _draw_marks(drawing, x, marks)
    return drawing


def _draw_marks(drawing: Drawing, x: Scale, marks: list[tuple[str, float]]) -> None:
    """Draw a vertical line with a label for each (name, value), labels without overlap."""
    # `spread_labels` needs positions from left to right.
    marks.sort(key=lambda mark: mark[1])
    labels = [f"{name} {value:,.0f}" for name, value in marks]
    positions = [x(value) for _, value in marks]
    widths = [len(label) * _CHARACTER + 10 for label in labels]
    centers = spread_labels(positions, widths, _LEFT, WIDTH)
    for (name, value), label, center in zip(marks, labels, centers, strict=True):
        kind = "budget" if name == "budget" else "mark"
        drawing.line(x(value), 30, x(value), 196, kind)
        # A short line leads from the label to its mark, because labels are moved apart.
        drawing.line(center, 18, x(value), 30, kind)
        drawing.text(center, 13, label, "label", "middle")


def bin_fill(panels: Sequence[Microbatches], capacity: int) -> Drawing:
    """Draw each microbatch as a bar of real tokens and padding, fullest first, with the budget.

    Two panels are side by side.
    """
    width = (WIDTH - 32) / 2
    height = 112
    gap = 56
    drawing = Drawing(
        WIDTH,
        (height + gap) * ceil_div(len(panels), 2) - 8,
        "Tokens of each microbatch against the budget",
    )
    for index, panel in enumerate(panels):
        row, column = divmod(index, 2)
        left = column * (width + 32)
        top = row * (height + gap) + 26
        drawing.text(left, top - 10, panel.title, "name")
        drawing.text(left + width, top - 10, panel.note, "label", "end")
        _fill_panel(drawing, panel, capacity, left, top, width, height)
    return drawing


def _fill_panel(
    drawing: Drawing,
    panel: Microbatches,
    capacity: int,
    left: float,
    top: float,
    width: float,
    height: float,
) -> None:
    """Draw the microbatches of one panel into a rectangle of the drawing."""
    real = panel.real.ravel()
    padding = panel.padding.ravel()
    # Fullest first; of equally full ones those with less padding.
    order = np.lexsort((padding, -real - padding))
    real = real[order]
    padding = padding[order]
    # More bars than can be seen are thinned out evenly.
    num_shown = min(len(real), int(width))
    shown = np.linspace(0, len(real) - 1, num_shown).round().astype(int)
    # A single row above the budget may make a microbatch larger than the capacity.
    largest = float((real + padding).max())
    y = Scale(max(largest, capacity), top + height, top)
    pitch = width / len(shown)
    # A gap is only visible between wide bars.
    bar = pitch - (1 if pitch > 3 else 0)
    drawing.rect(left, y(capacity), width, y(0) - y(capacity), "room")
    real_boxes = []
    padding_boxes = []
    for position, i in enumerate(shown):
        x = left + position * pitch
        real_top = y(float(real[i]))
        padding_top = y(float(real[i] + padding[i]))
        real_boxes.append((x, real_top, bar, y(0) - real_top))
        padding_boxes.append((x, padding_top, bar, real_top - padding_top))
    drawing.rects(real_boxes, "real")
    drawing.rects(padding_boxes, "padding")
    drawing.line(left, y(capacity), left + width, y(capacity), "budget")
    drawing.line(left, y(0), left + width, y(0), "axis")
    thinned = "" if len(shown) == len(real) else f", {len(shown):,} of them drawn"
    drawing.text(
        left,
        y(0) + 15,
        f"{counted(len(real), 'microbatch', 'microbatches')} of"
        f" {counted(panel.real.shape[0], 'rank')}, fullest first{thinned}",
    )
    drawing.text(left + width, y(0) + 15, f"budget {capacity:,}", anchor="end")


def timeline(
    panels: Sequence[Microbatches], ideal: float, *, waits_at_microbatch: bool, max_ranks: int = 64
) -> Drawing:
    """Draw one step over time with one bar per rank: real work, work on padding, idle time.

    All panels have the same time axis; its unit `ideal` is the real work spread evenly. The dashed
    line is the work of the mean rank, the solid line the end of the step.
    """
    num_ranks = min(panels[0].real.shape[0], max_ranks)
    # Few ranks get thick bars, many ranks thin ones that are still visible.
    pitch = max(2.4, min(11.0, 96 / num_ranks))
    height = num_ranks * pitch
    gap = 42.0
    drawing = Drawing(WIDTH, len(panels) * (height + gap) + 26, "Work of each rank over time")
    ends = [_ends(panel, waits_at_microbatch) for panel in panels]
    # One scale for all panels, so that their lengths can be compared.
    last_end = max(float(end.max()) for end in ends)
    x = Scale(last_end / ideal * 1.01, 2, WIDTH - 2)
    for index, (panel, end) in enumerate(zip(panels, ends, strict=True)):
        top = index * (height + gap) + 26
        drawing.text(2, top - 10, panel.title, "name")
        drawing.text(WIDTH - 2, top - 10, panel.note, "label", "end")
        _rank_bars(drawing, panel, end, ideal, x, top, pitch, num_ranks)
    base = len(panels) * (height + gap) + 4
    drawing.line(2, base - 8, WIDTH - 2, base - 8, "axis")
    for tick in x.ticks(8):
        drawing.text(x(tick), base + 8, f"{tick:g}", anchor="start" if tick == 0 else "middle")
    return drawing


def _ends(panel: Microbatches, waits_at_microbatch: bool) -> np.ndarray:
    """Return the end time of each microbatch of each rank, float64 [R, M]."""
    work = panel.real + panel.padding
    if not waits_at_microbatch:
        return np.cumsum(work, axis=1)
    # A microbatch starts when the slowest rank has finished the one before.
    slowest = work.max(axis=0)
    starts = np.concatenate([[0.0], np.cumsum(slowest)[:-1]])
    return starts + work


def _rank_bars(
    drawing: Drawing,
    panel: Microbatches,
    ends: np.ndarray,
    ideal: float,
    x: Scale,
    top: float,
    pitch: float,
    num_ranks: int,
) -> None:
    """Draw one bar per rank; `ends` float64 [R, M] are the end times of the microbatches."""
    work = panel.real + panel.padding
    # A sample of the ranks, evenly spaced, if there are more than bars.
    ranks = np.linspace(0, len(work) - 1, num_ranks).round().astype(int)
    bar = pitch - (1.0 if pitch > 4 else 0.4)
    finish = float(ends.max())
    drawing.rect(x(0), top, x(finish / ideal) - x(0), num_ranks * pitch, "room")
    real = []
    padding = []
    for position, rank in enumerate(ranks):
        y = top + position * pitch
        microbatches = zip(
            ends[rank].tolist(), work[rank].tolist(), panel.real[rank].tolist(), strict=True
        )
        for end_time, total_work, real_work in microbatches:
            # Real work is drawn first and work on padding after it, although they are mixed.
            start_time = end_time - total_work
            start = x(start_time / ideal)
            middle = x((start_time + real_work) / ideal)
            stop = x(end_time / ideal)
            # A gap separates microbatches; a very short one keeps most of its length.
            inset = min(0.6, (stop - start) / 4)
            real.append((start, y, max(middle - start - inset, 0.2), bar))
            padding.append((middle, y, stop - middle - inset, bar))
    drawing.rects(real, "real")
    drawing.rects(padding, "padding")
    mean_work = float(work.sum()) / len(work)
    bottom = top + num_ranks * pitch + 1
    for kind, value in (("mean", mean_work), ("budget", finish)):
        position = x(value / ideal)
        drawing.line(position, top - 3, position, bottom, kind)


def memory_stack(
    bars: Sequence[tuple[str, Mapping[str, float]]], limits: Sequence[tuple[str, float]], unit: str
) -> Drawing:
    """Draw the memory of one device by part, one bar per (label, parts), with (name, limit) lines.

    All sizes are in `unit`.
    """
    pitch = 58
    max_total = max(sum(parts.values()) for _, parts in bars)
    max_limit = max((limit for _, limit in limits), default=0.0)
    height = pitch * len(bars) + 54
    drawing = Drawing(WIDTH, height, "Memory of one device by part")
    x = Scale(1.02 * max(max_total, max_limit), 2, WIDTH - 2)
    for index, (label, parts) in enumerate(bars):
        top = 44 + index * pitch
        drawing.text(2, top - 7, f"{label}: {sum(parts.values()):.1f} {unit}", "name")
        _memory_bar(drawing, x, top, parts, unit)
    for name, limit in limits:
        drawing.line(x(limit), 18, x(limit), height - 22, "budget" if name == "usable" else "mark")
        drawing.text(x(limit), 14, f"{name} {limit:,.1f} {unit}", "label", "end")
    base = height - 20
    drawing.line(2, base, WIDTH - 2, base, "axis")
    for tick in x.ticks(8):
        drawing.text(x(tick), base + 15, f"{tick:g}", anchor="start" if tick == 0 else "middle")
    return drawing


def _memory_bar(
    drawing: Drawing, x: Scale, top: float, parts: Mapping[str, float], unit: str
) -> None:
    """Draw the parts of one device side by side, labelled where the label fits."""
    start = 0.0
    for name, size in parts.items():
        left = x(start)
        right = x(start + size)
        tooltip = f"{name}: {size:.2f} {unit}"
        # A part too small to see keeps a thin line, so that its tooltip can be found.
        width = max(right - left - 1, 0.3)
        drawing.rect(left, top, width, 26, f"part-{part_class(name)}", tooltip)
        text = f"{name} {size:.1f}"
        if len(text) * _CHARACTER + 8 < right - left:
            drawing.text((left + right) / 2, top + 17, text, "on-part", "middle")
        start += size


def part_class(name: str) -> str:
    """Return the color class of a memory part. Example: `gathered weights` -> `gathered`."""
    return name.split(maxsplit=1)[0]


def _value_axis(
    drawing: Drawing, y: Scale, x: Scale, labels: Sequence[str], ticks: Sequence[float]
) -> None:
    """Draw horizontal grid lines at the ticks, with their labels at the left."""
    for label, tick in zip(labels, ticks, strict=True):
        # The line at 0 is the axis, which is drawn over the bars.
        if tick:
            drawing.line(x.start, y(tick), x.stop, y(tick), "grid")
            drawing.text(x.start - 8, y(tick) + 4, label, anchor="end")
