"""The rows that wait to be planned: in order of arrival and, at the same time, sorted by size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class WaitingRow(NamedTuple):
    """One row of the stream. Numbers only: the row's data stays where it was read."""

    row: int
    """Id that the caller gave to `StreamingPlanner.push`."""
    length: int
    """Real tokens, after truncation."""
    size: int
    """Positions: `length` rounded up to the row multiple of the layout."""
    num_trained: int
    """Tokens with loss."""
    extra: int
    """Use of the second resource, for example image patches; 0 without one."""
    step: int
    """Number of steps that were complete when the row arrived."""


class Window:
    """Rows by arrival number; the caller removes those that it selects.

    Every operation is O(log n), plus the move of at most n pointers in the sorted list.
    """

    def __init__(self, rows: Iterable[WaitingRow] = ()) -> None:
        self._rows: dict[int, WaitingRow] = {}
        # (size, arrival number), so that rows of equal size stay in order of arrival.
        self._by_size: list[tuple[int, int]] = []
        self._next_number = 0
        self.num_tokens = 0
        """Sum of `size` over the rows."""
        self.num_trained = 0
        """Sum of `num_trained` over the rows."""
        for row in rows:
            self.add(row)

    def copy(self) -> Window:
        """Return a window with the same rows, which changes independently."""
        # Rows are immutable, so the containers are copied only.
        window = Window()
        window.__dict__.update(self.__dict__)
        window._rows = dict(self._rows)
        window._by_size = list(self._by_size)
        return window

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[WaitingRow]:
        """Iterate over the rows in order of arrival."""
        return iter(self._rows.values())

    def numbers(self) -> Iterator[int]:
        """Iterate over the arrival numbers, the oldest first."""
        return iter(self._rows)

    def items(self) -> Iterator[tuple[int, WaitingRow]]:
        """Iterate over (arrival number, row), the oldest first."""
        return iter(self._rows.items())

    def __getitem__(self, number: int) -> WaitingRow:
        """Return the row with an arrival number."""
        return self._rows[number]

    @property
    def by_size(self) -> list[tuple[int, int]]:
        """(size, arrival number) of every row, ascending. Do not modify it."""
        return self._by_size

    def add(self, row: WaitingRow) -> None:
        """Add a row as the newest."""
        number = self._next_number
        self._next_number += 1
        self._rows[number] = row
        insort(self._by_size, (row.size, number))
        self.num_tokens += row.size
        self.num_trained += row.num_trained

    def remove(self, number: int) -> WaitingRow:
        """Remove and return the row with an arrival number."""
        row = self._rows.pop(number)
        del self._by_size[bisect_left(self._by_size, (row.size, number))]
        self.num_tokens -= row.size
        self.num_trained -= row.num_trained
        return row

    def oldest(self) -> int:
        """Return the arrival number of the oldest row. Raises StopIteration without rows."""
        return next(iter(self._rows))
