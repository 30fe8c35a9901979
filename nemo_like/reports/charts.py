"""Charts of a page, drawn by Bokeh in the browser. They know nothing of runs and plans.

Text that comes from users is in the HTML around a chart, where the templates escape it; the drawing
has numbers and names of phases only. Colors are legible on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nemo_like.config.errors import printable

if TYPE_CHECKING:
    from bokeh.plotting import figure

COLORS = (
    *("#4c82c4", "#e08a3c", "#3fa07a", "#c8556b", "#8b6cc4", "#a9843f", "#3fa3b8", "#d070b0"),
    *("#7d8f3c", "#7f8794"),
)
"""Colors of series, in their order; more series begin again."""
PADDING_COLOR = "#e0a458"
MARK_COLORS = ("#c8556b", "#3fa07a", "#8b6cc4", "#a9843f", "#3fa3b8")
"""Colors of vertical lines, none of which is the color of the bars."""
MAX_POINTS = 1000
"""Points of a curve; longer ones show the extremes of equal parts."""
_MAX_RANKS = 64
_NUM_BARS = 72
_LARGE = 10_000


def color_of(index: int) -> str:
    """Return the color of series number `index`."""
    return COLORS[index % len(COLORS)]


@dataclass(frozen=True)
class Legend:
    """One entry below the title of a chart."""

    label: str
    color: str
    kind: Literal["line", "dashed", "point", "box", "mark"] = "line"


@dataclass(frozen=True, eq=False)
class Chart:
    """A drawing with the text around it."""

    title: str
    drawing: figure
    note: str = ""
    legend: Sequence[Legend] = ()
    marks: Sequence[Legend] = ()
    """Label and value of each vertical line."""
    is_wide: bool = False


@dataclass(frozen=True, eq=False)
class Series:
    """The values of one curve. Points that are not finite are gaps."""

    label: str
    x: np.ndarray
    y: np.ndarray
    color: str
    kind: Literal["line", "dashed", "point"] = "line"


class ChartIds:
    """Gives each chart of a page its element id, and collects what the browser draws."""

    def __init__(self) -> None:
        self._drawings: dict[str, Any] = {}

    def add(self, chart: Chart) -> str:
        """Return the id of the element into which `chart` is drawn. Called by the templates."""
        name = f"chart-{len(self._drawings)}"
        self._drawings[name] = chart.drawing
        return name

    def to_json(self) -> dict[str, Any]:
        """Return id -> drawing, as plain JSON values."""
        from bokeh.embed import json_item
        from bokeh.themes import Theme

        theme = Theme(filename=str(Path(__file__).with_name("theme.yaml")))
        return {name: json_item(each, theme=theme) for name, each in self._drawings.items()}


def curves(title: str, series: Sequence[Series], *, note: str = "", percent: bool = False) -> Chart:
    """Return curves over steps."""
    drawing = _figure(height=210, tools="xbox_zoom,reset,hover", has_steps=True)
    drawing.hover.tooltips = [("step", "@x"), ("", f"@y{{{'0.0%' if percent else '0.0[00000]'}}}")]
    for each in series:
        x, y = downsampled(each.x, each.y)
        data = {"x": x.astype(np.int32), "y": y.astype(np.float32)}
        style: dict[str, Any] = {"color": each.color, "source": _source(data)}
        if each.kind != "point":
            dash = "dashed" if each.kind == "dashed" else "solid"
            drawing.line("x", "y", line_width=1.6, line_dash=dash, **style)
        if each.kind == "point" or len(x) == 1:
            drawing.scatter("x", "y", size=6, **style)
    values = np.concatenate([each.y[np.isfinite(each.y)] for each in series])
    low, high = float(values.min()), float(values.max())
    if low == high:
        # The range that the library chooses around one value has no relation to it.
        end = max(1.2 * high, 0.0) or 1.0
        drawing.y_range.update(start=min(1.2 * low, -0.05 * end), end=end)
    is_plain = not percent and max(abs(low), abs(high)) < _LARGE
    _number_axis(drawing.yaxis, percent=percent, is_plain=is_plain)
    legend = [Legend(each.label, each.color, each.kind) for each in series]
    return Chart(title, drawing, note, legend if len(legend) > 1 else ())


def downsampled(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `MAX_POINTS` points [n]: the smallest and the largest of each equal part."""
    if len(x) <= MAX_POINTS:
        return x, y
    kept = []
    for part in np.array_split(np.arange(len(x)), MAX_POINTS // 2):
        values = np.nan_to_num(y[part], nan=float(np.nan_to_num(y[part[0]])))
        kept += sorted({int(part[values.argmin()]), int(part[values.argmax()])})
    return x[kept], y[kept]


def histogram(
    title: str,
    values: Mapping[str, np.ndarray],
    *,
    unit: str,
    marks: Mapping[str, float] | None = None,
) -> Chart:
    """Return the histogram of the values of each name, as shares where there are several."""
    marks = dict(marks or {})
    longest = max(*(float(each.max()) for each in values.values()), 1.0)
    width = 1.02 * max([longest, *marks.values()])
    drawing = _figure(height=220, tools="hover")
    is_single = len(values) == 1
    for index, each in enumerate(values.values()):
        counts, edges = np.histogram(each, bins=_NUM_BARS, range=(0, width))
        heights = counts if is_single else counts / len(each)
        data = {"left": edges[:-1], "right": edges[1:], "top": heights}
        style = {"fill_color": color_of(index), "line_color": None, "source": _source(data)}
        alpha = 0.85 if is_single else 0.45
        drawing.quad("left", "right", "top", bottom=0, fill_alpha=alpha, **style)
    count = "@top{0,0}" if is_single else "@top{0.0%}"
    drawing.hover.tooltips = [(unit, "@left{0,0} to @right{0,0}"), ("rows", count)]
    _number_axis(drawing.yaxis, percent=not is_single)
    _number_axis(drawing.xaxis)
    drawing.y_range.update(start=0)
    legend = [Legend(name, color_of(index), "box") for index, name in enumerate(values)]
    shown = _draw_marks(drawing, marks, ",.0f")
    return Chart(title, drawing, "", () if is_single else legend, shown, is_wide=True)


def stacked_areas(title: str, x: np.ndarray, parts: Mapping[str, np.ndarray]) -> Chart:
    """Return the parts of a sum over steps, the first at the bottom."""
    drawing = _figure(height=240, tools="xbox_zoom,reset", has_steps=True)
    # The same steps in all parts, so they are not downsampled by value.
    chosen = np.unique(np.linspace(0, len(x) - 1, min(len(x), MAX_POINTS)).round().astype(int))
    data = {"x": x[chosen].astype(np.int32)}
    data |= {f"y{index}": values[chosen] for index, values in enumerate(parts.values())}
    names = [f"y{index}" for index in range(len(parts))]
    colors = [color_of(index) for index in range(len(parts))]
    drawing.varea_stack(names, x="x", color=colors, alpha=0.85, source=_source(data))
    drawing.y_range.update(start=0)
    _number_axis(drawing.yaxis)
    legend = [Legend(name, color, "box") for name, color in zip(parts, colors, strict=True)]
    return Chart(title, drawing, "", legend, is_wide=True)


def stacked_bars(
    title: str,
    bars: Mapping[str, Mapping[str, float]],
    *,
    unit: str,
    colors: Mapping[str, str] | None = None,
    marks: Mapping[str, float] | None = None,
) -> Chart:
    """Return one horizontal bar per name, of consecutive parts: name -> part -> size."""
    from bokeh.models import FixedTicker

    names = list(dict.fromkeys(part for parts in bars.values() for part in parts))
    colors = {name: color_of(index) for index, name in enumerate(names)} | dict(colors or {})
    boxes: dict[str, list[Any]] = {key: [] for key in ("left", "right", "bar", "part", "color")}
    for index, parts in enumerate(bars.values()):
        ends = np.cumsum(list(parts.values()))
        boxes["left"] += (ends - list(parts.values())).tolist()
        boxes["right"] += ends.tolist()
        boxes["bar"] += [-index] * len(parts)
        boxes["part"] += list(parts)
        boxes["color"] += [colors[name] for name in parts]
    drawing = _figure(height=64 + 30 * len(bars), tools="hover")
    style = {"height": 0.7, "color": "color", "source": _source(boxes)}
    drawing.hbar("bar", left="left", right="right", **style)
    drawing.hover.tooltips = [("", "@part"), (unit, "@left{0.[000]} to @right{0.[000]}")]
    drawing.x_range.update(start=0)
    drawing.ygrid.visible = False
    drawing.yaxis.ticker = FixedTicker(ticks=[-index for index in range(len(bars))])
    drawing.yaxis.major_label_overrides = {
        -index: printable(name) for index, name in enumerate(bars)
    }
    drawing.yaxis.axis_line_color = drawing.yaxis.major_tick_line_color = None
    legend = [Legend(name, colors[name], "box") for name in names]
    shown = _draw_marks(drawing, marks or {}, ",.3g", unit)
    return Chart(title, drawing, "", legend, shown, is_wide=True)


def rank_timeline(
    title: str,
    work: np.ndarray,
    real: np.ndarray,
    *,
    waits: bool,
    note: str = "",
    end: float | None = None,
) -> Chart:
    """Return a step over time with one bar per rank: work on tokens, on padding, and idle time.

    `work` and `real` float64 [R, M] are the time of each microbatch with and without padding, in
    units of the time axis, which ends at `end`, by default with the last microbatch. With `waits` a
    microbatch starts when the slowest rank has finished the one before.
    """
    starts = microbatch_starts(work, waits=waits)
    # A sample of the ranks, evenly spaced, if there are more than bars.
    ranks = np.linspace(0, len(work) - 1, min(len(work), _MAX_RANKS)).round().astype(int)
    drawing = _figure(height=64 + min(12 + 16 * len(ranks), 260), tools="hover")
    rows = np.repeat(-np.arange(len(ranks)), work.shape[1])
    shown_ranks = np.repeat(ranks, work.shape[1])
    # Work on tokens is drawn first and work on padding after it, although they are mixed.
    middle = starts + real
    for left, right, color in ((starts, middle, COLORS[0]), (middle, starts + work, PADDING_COLOR)):
        data = {"y": rows, "left": left[ranks].ravel(), "right": right[ranks].ravel()}
        style = {"fill_color": color, "line_color": "#ffffff", "line_alpha": 0.35}
        source = _source({**data, "rank": shown_ranks})
        drawing.hbar("y", left="left", right="right", height=0.8, source=source, **style)
    last = float((starts + work).max())
    marks = {"mean rank": float(work.sum()) / len(work), "end": last}
    drawing.hover.tooltips = [("rank", "@rank"), ("time", "@left{0.000} to @right{0.000}")]
    drawing.x_range.update(start=0, end=1.01 * (end or last))
    drawing.yaxis.visible = False
    drawing.ygrid.visible = False
    return Chart(title, drawing, note, (), _draw_marks(drawing, marks, ".3f"), is_wide=True)


def microbatch_starts(work: np.ndarray, *, waits: bool) -> np.ndarray:
    """Return when each microbatch starts, float64 [R, M]; see `rank_timeline`."""
    if waits:
        slowest = work.max(axis=0)
        return np.cumsum(slowest) - slowest + np.zeros_like(work)
    return np.cumsum(work, axis=1) - work


def _figure(*, height: int, tools: str, has_steps: bool = False) -> figure:
    """Return an empty drawing as wide as its element; `has_steps` if its x axis counts steps."""
    from bokeh.models import AdaptiveTicker
    from bokeh.plotting import figure

    drawing = figure(
        height=height, sizing_mode="stretch_width", tools=tools, toolbar_location="right"
    )
    # A toolbar without buttons would be a bar without a use.
    drawing.toolbar.visible = "zoom" in tools
    if has_steps:
        drawing.xaxis.ticker = AdaptiveTicker(mantissas=[1, 2, 5], min_interval=1)
    return drawing


def _number_axis(axis: Any, *, percent: bool = False, is_plain: bool = False) -> None:
    """Show shares in percent, large numbers as 12k, and `is_plain` ones with all their digits."""
    from bokeh.models import BasicTickFormatter, NumeralTickFormatter

    if is_plain:
        axis.formatter = BasicTickFormatter(power_limit_low=-3)
    else:
        axis.formatter = NumeralTickFormatter(format="0.[0]%" if percent else "0.[00]a")


def _source(data: Mapping[str, Any]) -> Any:
    from bokeh.models import ColumnDataSource

    return ColumnDataSource(dict(data))


def _draw_marks(
    drawing: figure, marks: Mapping[str, float], form: str, unit: str = ""
) -> list[Legend]:
    """Draw vertical lines; return their legend."""
    from bokeh.models import Span

    legend = []
    for index, (name, value) in enumerate(marks.items()):
        color = MARK_COLORS[index % len(MARK_COLORS)]
        line = Span(location=value, dimension="height", line_color=color, line_width=1.2)
        drawing.add_layout(line)
        legend.append(Legend(f"{name} {value:{form}} {unit}".rstrip(), color, "mark"))
    return legend


def javascript() -> str:
    """Return the script of the library that draws the charts; it loads nothing else."""
    from bokeh.resources import Resources

    return Resources(mode="inline", components=["bokeh"]).js_raw[0]
