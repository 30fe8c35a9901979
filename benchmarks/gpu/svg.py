"""Scales, rectangles, lines and text as one inline SVG; colors are class names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Scale:
    """Linear map of values from 0 to `high` to positions from `start` to `stop`.

    Example: `Scale(200, 40, 940)(100)` is 490.
    """

    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (self.stop - self.start) * value / self.high

    def ticks(self, max_ticks: int = 6) -> list[float]:
        """Return about `max_ticks` round values from 0 to `high`.

        Example: high 14089 gives 0, 2500, ... 12500.
        """
        min_step = self.high / max_ticks
        magnitude = 10.0 ** math.floor(math.log10(min_step))
        # The factors tolerate rounding errors: 0.3 / 3 is slightly more than 0.1.
        step = 10 * magnitude
        for factor in (1, 2, 2.5, 5):
            if factor * magnitude >= min_step * (1 - 1e-9):
                step = factor * magnitude
                break
        num_steps = int(self.high / step * (1 + 1e-9))
        return [index * step for index in range(num_steps + 1)]


class Drawing:
    """An SVG of `width` x `height` units that scales with the page.

    `label` describes it to screen readers.
    """

    def __init__(self, width: float, height: float, label: str) -> None:
        self.width = width
        self.height = height
        self.label = label
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, title: str | None = None
    ) -> None:
        """Add a rectangle, unless its area is 0; `title` is its tooltip."""
        if width <= 0 or height <= 0:
            return
        shape = (
            f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}"'
            f' width="{_n(width)}" height="{_n(height)}"'
        )
        if title is None:
            self._parts.append(f"{shape}/>")
        else:
            self._parts.append(f"{shape}><title>{escape(title)}</title></rect>")

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        """Add a line from (x1, y1) to (x2, y2)."""
        self._parts.append(
            f'<line class="{kind}" x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"/>'
        )

    def text(
        self, x: float, y: float, text: str, kind: str = "tick", anchor: str = "start"
    ) -> None:
        """Add a text; `anchor` is the side of it that is at x: start, middle or end."""
        self._parts.append(
            f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def __str__(self) -> str:
        head = (
            f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img"'
            f' aria-label="{escape(self.label)}">'
        )
        return head + "".join(self._parts) + "</svg>"


def _n(value: float) -> str:
    """Format a coordinate briefly: a page has thousands of them. Example: 2.50 is `2.5`."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
