"""Selection of the rows of a file by a number in one of their columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_like.data.row_files import Row, shown_json

PASS_RATE = "pass_rate"
"""Column with the share of correct answers that a model gave to a prompt, from 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class PassRateFilter:
    """Keeps the rows whose `pass_rate` is in a range.

    Prompts that a model always or never answers correctly have equal rewards in GRPO, so no
    advantages.
    """

    minimum: float = 0.0
    maximum: float = 1.0

    def problem(self, row: Row) -> str | None:
        """Describe why the row has no pass rate, or return None."""
        value = row.get(PASS_RATE)
        if isinstance(value, str):
            value = _number(value)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
            return None
        return (
            f"column {PASS_RATE!r} is {shown_json(row.get(PASS_RATE))}, not a number from 0 to 1;"
            " data.min_pass_rate and data.max_pass_rate select by it. Add it to every row, name"
            " its column in data.columns.pass_rate, or set both to null"
        )

    def keeps(self, row: Row) -> bool:
        """Return True if the pass rate of a row without a problem is in the range."""
        return self.minimum <= float(row[PASS_RATE]) <= self.maximum


def _number(text: str) -> float | None:
    """Return the number of a text, as CSV files have it; None if it is none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
