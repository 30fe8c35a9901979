"""Drawing with numbers: scales, rectangles, lines and text as one inline SVG. It knows colours only
by the names of page.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """Values from 0 to `high` as positions from `start` to `stop`.

    Example: `Scale(200, 40, 940)(100)` is 490.
    """

    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (self.stop - self.start) * value / self.high

    def ticks(self, most: int = 6) -> list[float]:
        """Round values from 0 up to `high`, at most about `most`. Example: high 14089 gives 0,
        2500, ... 12500.
        """
        rough = self.high / most
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = magnitude * next(
            factor for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= rough * (1 - 1e-9)
        )
        return [index * step for index in range(int(self.high / step * (1 + 1e-9)) + 1)]


class Drawing:
    """An SVG of `width` x `height` units, as wide as its column on the page. `label` is what a
    screen reader says.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width, self.height, self.label = width, height, label
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, title: str | None = None
    ) -> None:
        """Nothing where it has no extent; `title` is shown under the pointer."""
        if width <= 0 or height <= 0:
            return
        shape = f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self._parts.append(
            f"{shape}/>" if title is None else f"{shape}><title>{escape(title)}</title></rect>"
        )

    def rects(self, boxes: Iterable[tuple[float, float, float, float]], kind: str) -> None:
        """Many (x, y, width, height) as one path, which is a fraction of the text."""
        path = "".join(
            f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in boxes if w > 0 and h > 0
        )
        if path:
            self._parts.append(f'<path class="{kind}" d="{path}"/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self._parts.append(
            f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
        )

    def text(
        self, x: float, y: float, text: str, kind: str = "tick", anchor: str = "start"
    ) -> None:
        self._parts.append(
            f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def __str__(self) -> str:
        head = f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" aria-label="{escape(self.label)}">'
        return head + "".join(self._parts) + "</svg>"


def spread_labels(
    positions: list[float], widths: list[float], low: float, high: float
) -> list[float]:
    """Centres for labels of these widths, in the order of `positions`, moved apart until none
    overlaps another.

    Example: centres 10 and 12 of width 20 each in 0 to 100 become 10 and 30.
    """
    centres, end = [], low
    for position, width in zip(positions, widths, strict=True):
        centre = max(position, end + width / 2)
        centres.append(centre)
        end = centre + width / 2
    limit = high
    for index in range(len(centres) - 1, -1, -1):
        centres[index] = min(centres[index], limit - widths[index] / 2)
        limit = centres[index] - widths[index] / 2
    return centres


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
