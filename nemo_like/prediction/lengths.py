"""Row lengths from a file: one integer per line, columns of a CSV, or a field of a JSONL."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path

_MAX_TOKENS = 2**40
"""A larger length is a mistake, and sums of such lengths in float64 would not be exact."""


@dataclass(frozen=True, eq=False)
class RowLengths:
    """Lengths of rows, with their source for messages.

    Example: `RowLengths(np.array([418, 505]), "conv.csv, ContextTokens + GeneratedTokens", ...)`.
    """

    values: np.ndarray
    """int64 [B]"""
    source: str
    """File and columns, for the report."""
    locations: Sequence[str] | None = None
    """File and line of each row. Example: `conv.csv:17`."""
    is_ordered: bool = False
    """Rows are in the order of a run and are not shuffled."""
    num_trained: np.ndarray | None = None
    """int64 [B]: tokens of each row with loss; None if they are not known."""

    def location(self, row: int) -> str:
        """Return file and line of a row, or its number if these are not known."""
        return f"row {row}" if self.locations is None else self.locations[row]


def read_lengths(
    path: Path, *, columns: Sequence[str] = (), field: str | None = None, limit: int | None = None
) -> RowLengths:
    """Read the first `limit` lengths of a file; several `columns` of a CSV are added up.

    Raises ConfigError with the line and the value, or with the columns of the file.
    """
    text = _read_text(path)
    shown = shown_path(path)
    lines: Iterator[tuple[int, int]]
    if columns:
        lines = _csv_lengths(text, shown, columns)
        description = " + ".join(columns)
    elif field is not None:
        lines = _field_lengths(text, shown, field)
        description = f"field {field}"
    else:
        lines = _plain_lengths(text, shown)
        description = "one length per line"
    values: list[int] = []
    numbers: list[int] = []
    for number, value in lines:
        # Lines after the limit are not parsed, so a mistake in them is no error.
        if limit is not None and len(values) == limit:
            break
        values.append(value)
        numbers.append(number)
    if not values:
        raise ConfigError(
            f"{shown} has no rows; give a file with one length per line, or name its --column or"
            " --field"
        )
    lengths = np.asarray(values, dtype=np.int64)
    return RowLengths(lengths, f"{shown}, {description}", _LineLocations(shown, numbers))


def _read_text(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{shown_path(path)} is a directory; give a file of lengths")
    try:
        # Spreadsheets write a byte order mark, which would become part of the first column's name.
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {str(path)!r}; give a text, CSV or JSONL file of row lengths"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown_path(path)} is not UTF-8 text (byte {error.start}); give a text, CSV or JSONL"
            " file"
        ) from error
    except OSError as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error.strerror}") from error


def _plain_lengths(text: str, shown: str) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield (number, _length(line.strip(), f"{shown}:{number}", _plain_hint(text)))


def _plain_hint(text: str) -> Callable[[], str]:
    """Return a function that makes a hint from the first line of the file, on an error only."""

    def hint() -> str:
        first = text.lstrip().partition("\n")[0]
        if first.startswith("{"):
            return "name the field of a JSONL file: --field NAME"
        if "," in first:
            columns = ", ".join(next(csv.reader([first])))
            return f"name the column of a CSV file: --column NAME (there are {columns})"
        return "write one positive integer per line"

    return hint


def _csv_lengths(text: str, shown: str, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    reader = csv.reader(io.StringIO(text))
    header = next(reader, [])
    missing = [name for name in columns if name not in header]
    if missing:
        # The CSV reader accepts JSON lines, with keys and values as cells.
        if text.lstrip().startswith("{"):
            raise ConfigError(
                f"{shown} is JSONL, which has fields and no columns: write --field {columns[0]}"
            )
        raise ConfigError(
            f"{shown} has no column {missing[0]!r}; its first line names"
            f" {', '.join(header) or 'nothing'}"
        )
    indices = [header.index(name) for name in columns]
    for cells in reader:
        # The reader returns an empty line as a row without cells.
        if not cells:
            continue
        place = f"{shown}:{reader.line_num}"
        if len(cells) <= max(indices):
            raise ConfigError(
                f"{place}: {len(cells)} cells where the first line names {len(header)} columns"
            )
        total = 0
        # One of several columns may be 0, such as an empty completion; their sum may not.
        for index in indices:
            cell = cells[index].strip()
            total += _length(cell, f"{place} column {header[index]}", minimum=0)
        yield reader.line_num, _positive(total, place)


def _field_lengths(text: str, shown: str, field: str) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{shown}:{number}"
        row = _json(line, place)
        if not isinstance(row, dict) or field not in row:
            # The fields that exist usually show the mistake at once.
            found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ConfigError(
                f"{place}: there is no field {field!r}; the line has {found or 'no fields'}"
            )
        value = row[field]
        # A list, of token ids for example, is counted.
        is_list = isinstance(value, list)
        length = len(value) if is_list else _length(value, f"{place} field {field}")
        yield number, _positive(length, place)


def _json(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not valid JSON at column {error.colno}: {error.msg}"
        ) from error


def _length(
    value: object, place: str, hint: Callable[[], str] | None = None, minimum: int = 1
) -> int:
    """Parse one length. Raises ConfigError for anything but an integer of at least `minimum`."""
    number = None
    # bool is a subclass of int, and a float is more likely another column than a length.
    if isinstance(value, int | str) and not isinstance(value, bool):
        try:
            number = int(value)
        except ValueError:
            number = None
    if number is None or not minimum <= number <= _MAX_TOKENS:
        way_out = hint() if hint is not None else "lengths are whole numbers of tokens"
        raise ConfigError(f"{place}: {value!r} is not a length; {way_out}")
    return number


def _positive(value: int, place: str) -> int:
    """Return `value`; raises ConfigError unless it is at least 1."""
    if value < 1:
        raise ConfigError(f"{place}: the row has {value} tokens; a row has at least one")
    return value


@dataclass(frozen=True)
class _LineLocations(Sequence[str]):
    """`file:line` of each row, formatted on access only."""

    shown: str
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return f"{self.shown}:{self.numbers[index]}"
