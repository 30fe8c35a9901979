"""Row lengths from a file: one integer per line, columns of a CSV, a field of a JSONL, or what a
past run recorded.
"""

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

_MOST_TOKENS = 2**40
"""A length above this is a mistake, and sums of it would not be exact."""


@dataclass(frozen=True, eq=False)
class RowLengths:
    """How long rows are, and where each of them stands.

    Example: `RowLengths(np.array([374 + 44, 396 + 109]), "conv.csv, ContextTokens +
    GeneratedTokens", ...)`.
    """

    values: np.ndarray
    """int64 [B]"""
    source: str
    """Where they come from, for the reader of a report."""
    locations: Sequence[str] | None = None
    """Where each row stands. Example: `conv.csv:17`."""
    is_ordered: bool = False
    """Rows are in the order a run takes them, so they are not shuffled."""

    def location(self, row: int) -> str:
        return f"row {row}" if self.locations is None else self.locations[row]


def read_lengths(
    path: Path, *, columns: Sequence[str] = (), field: str | None = None, limit: int | None = None
) -> RowLengths:
    """The first `limit` lengths of a file; several `columns` of a CSV are added up.

    Raises ConfigError that names the line, the value, or the columns there are.
    """
    text = _text_of(path)
    shown = shown_path(path)
    lines: Iterator[tuple[int, int]]
    if columns:
        lines, what = _csv_lengths(text, shown, columns), " + ".join(columns)
    elif field is not None:
        lines, what = _field_lengths(text, shown, field), f"field {field}"
    else:
        lines, what = _plain_lengths(text, shown), "one length per line"
    values, numbers = [], []
    for number, value in lines:
        if limit is not None and len(values) == limit:
            break
        values.append(value)
        numbers.append(number)
    if not values:
        raise ConfigError(
            f"{shown} has no rows; give a file with one length per line, or name its --column or"
            f" --field"
        )
    return RowLengths(
        np.asarray(values, dtype=np.int64), f"{shown}, {what}", _Places(shown, numbers)
    )


def _text_of(path: Path) -> str:
    if path.is_dir():
        raise ConfigError(f"{shown_path(path)} is a directory; give a file of lengths")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {str(path)!r}; give a text, CSV or JSONL file of row lengths"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{shown_path(path)} is not UTF-8 text (byte {error.start}); give a text, CSV or JSONL"
            f" file"
        ) from error
    except OSError as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error.strerror}") from error


def _plain_lengths(text: str, shown: str) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield number, _length(line.strip(), f"{shown}:{number}", _plain_hint(text))


def _plain_hint(text: str) -> Callable[[], str]:
    """What to write instead, told from the file's first line."""

    def hint() -> str:
        first = text.lstrip().splitlines()[0]
        if first.startswith("{"):
            return "name the field of a JSONL file: --field NAME"
        if "," in first:
            return f"name the column of a CSV file: --column NAME (there are {', '.join(next(csv.reader([first])))})"
        return "write one positive integer per line"

    return hint


def _csv_lengths(text: str, shown: str, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    reader = csv.reader(io.StringIO(text))
    header = next(reader, [])
    missing = [name for name in columns if name not in header]
    if missing:
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
        if not cells:
            continue
        place = f"{shown}:{reader.line_num}"
        if len(cells) <= max(indices):
            raise ConfigError(
                f"{place}: {len(cells)} cells where the first line names {len(header)} columns"
            )
        values = [
            _length(cells[i].strip(), f"{place} column {header[i]}", least=0) for i in indices
        ]
        yield reader.line_num, _positive(sum(values), place)


def _field_lengths(text: str, shown: str, field: str) -> Iterator[tuple[int, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        place = f"{shown}:{number}"
        row = _json(line, place)
        if not isinstance(row, dict) or field not in row:
            there = ", ".join(row) if isinstance(row, dict) else type(row).__name__
            raise ConfigError(
                f"{place}: there is no field {field!r}; the line has {there or 'no fields'}"
            )
        value = row[field]
        # A list is what is counted, such as token ids.
        yield (
            number,
            _positive(
                len(value) if isinstance(value, list) else _length(value, f"{place} field {field}"),
                place,
            ),
        )


def _json(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{place}: not valid JSON at column {error.colno}: {error.msg}"
        ) from error


def _length(
    value: object, place: str, hint: Callable[[], str] | None = None, least: int = 1
) -> int:
    try:
        number = (
            int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
        )
    except ValueError:
        number = None
    if number is None or not least <= number <= _MOST_TOKENS:
        way_out = hint() if hint is not None else "lengths are whole numbers of tokens"
        raise ConfigError(f"{place}: {value!r} is not a length; {way_out}")
    return number


def _positive(value: int, place: str) -> int:
    if value < 1:
        raise ConfigError(f"{place}: the row has {value} tokens; a row has at least one")
    return value


@dataclass(frozen=True)
class _Places(Sequence[str]):
    """`file:line` of each row, spelled out only where it is asked for."""

    shown: str
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        return f"{self.shown}:{self.numbers[index]}"
