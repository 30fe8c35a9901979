"""Rows that cannot be used: the first of them and their number, as one message."""

from __future__ import annotations

from nemo_like.config.text import shortened

MAX_LISTED = 20
"""Rows that the message lists."""
_MAX_CHARACTERS = 400


class BadRows:
    """Bad rows in the order in which they were found. The memory does not grow with their number.

    Example: `3 bad rows:` with the lines `train.jsonl:2, train.jsonl:9: column 'answer' is missing`
    and `train.jsonl:4: not valid JSON at column 7`.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._locations: dict[str, list[str]] = {}
        """Problem -> the rows that have it."""

    def add(self, location: object, problem: str) -> None:
        """Add a row; only the first `MAX_LISTED` are kept."""
        if self.num_rows < MAX_LISTED:
            self._locations.setdefault(problem, []).append(str(location))
        self.num_rows += 1

    def text(self, scope: str = "") -> str:
        """Return the message; `scope` tells among which rows they were counted."""
        if self.num_rows == 1:
            ((problem, (location,)),) = self._locations.items()
            return f"{location}: {problem}"
        lines = [f"{self.num_rows:,} bad rows{scope}:"]
        for problem, locations in self._locations.items():
            lines.append(f"  {', '.join(locations)}: {shortened(problem, _MAX_CHARACTERS)}")
        if self.num_rows > MAX_LISTED:
            lines.append(f"  and {self.num_rows - MAX_LISTED:,} more")
        return "\n".join(lines)
