"""Locations of rows in files: a few bytes per row, formatted on demand."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, overload

import numpy as np


class Location(NamedTuple):
    """Location of one row. Example: `Location("data/train.jsonl:", 17)`."""

    prefix: str
    """The file and a separator, the same object for all rows of a file."""
    number: int

    def __str__(self) -> str:
        return f"{self.prefix}{self.number}"


class Locations(Sequence[str]):
    """Texts of the locations of N rows. Example: `locations[0]` is `data/train.jsonl:17`."""

    def __init__(self) -> None:
        self._prefixes: list[str] = []
        # First row of each prefix; rows of one file follow each other.
        self._starts: list[int] = []
        self._numbers = array("q")

    def append(self, location: Location) -> None:
        """Add the location of the next row."""
        if not self._prefixes or self._prefixes[-1] != location.prefix:
            self._prefixes.append(location.prefix)
            self._starts.append(len(self._numbers))
        self._numbers.append(location.number)

    def extend(self, others: Locations) -> None:
        """Add the locations of the rows of another file or data set."""
        num_rows = len(self._numbers)
        self._prefixes.extend(others._prefixes)
        self._starts.extend(num_rows + start for start in others._starts)
        self._numbers.extend(others._numbers)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        row = int(index)
        if row < 0:
            row += len(self)
        number = self._numbers[row]
        part = int(np.searchsorted(self._starts, row, side="right")) - 1
        return f"{self._prefixes[part]}{number}"
