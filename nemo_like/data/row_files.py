"""Readers of data files: JSON lines, JSON, parquet, and Arrow data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.text import printable, shortened, shown_value
from nemo_like.data.tools import without_nulls

Row = dict[str, Any]
LocatedRow = tuple[str, Row, bytes]
"""(location of the row, the row, its content as bytes)"""

UNDERSTOOD = (
    "messages [+ answer]; prompt + completion; prompt + answer; question + answer with"
    " '#### result' (GSM8K)"
)
SUPPORTED_FILES = (
    ".jsonl, .json, .parquet, or a directory with an Arrow dataset (datasets.save_to_disk) or"
    " parquet files"
)
_MAX_LISTED = 10_000
"""Maximum number of files of an Arrow data set."""
_MAX_SHOWN_CHARACTERS = 60
# pyarrow's own errors derive from these; conversions to Python add OverflowError and
# UnicodeDecodeError (a ValueError).
_ARROW_ERRORS = (
    ValueError,
    OSError,
    LookupError,
    TypeError,
    ArithmeticError,
    RuntimeError,
    MemoryError,
)


def read_rows(path: Path, key: str) -> Iterator[LocatedRow]:
    """Read the rows of a file or directory in order.

    Raises ConfigError that names `key` for an unsupported suffix, and the file for unreadable data.
    """
    if path.is_dir():
        return _read_directory(path)
    readers = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    if path.suffix not in readers:
        raise ConfigError(
            f"{key}: {shown_path(path)} ends in {path.suffix!r}; give {SUPPORTED_FILES}"
        )
    return readers[path.suffix](path)


def shown_json(value: Any) -> str:
    """Format a value as short JSON with its type, for an error message."""
    try:
        text = printable(json.dumps(value, ensure_ascii=False, default=str))
    except (ValueError, TypeError, RecursionError):
        text = shown_value(value)
    if len(text) > _MAX_SHOWN_CHARACTERS:
        text = f"{text[:_MAX_SHOWN_CHARACTERS]}..."
    return f"{text} ({type(value).__name__})"


def _read_jsonl(path: Path) -> Iterator[LocatedRow]:
    # Once for all lines: `shown_path` takes longer than parsing a short line.
    shown = shown_path(path)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                location = f"{shown}:{number}"
                yield location, _object(_parse(line, location), location), line.strip()


def _read_json(path: Path) -> Iterator[LocatedRow]:
    rows = _parse(path.read_bytes(), shown_path(path))
    if not isinstance(rows, list):
        raise ConfigError(
            f"{shown_path(path)}: contains {shown_json(rows)}, not a list of objects; one object"
            f" per line is a .jsonl file"
        )
    shown = shown_path(path)
    for number, row in enumerate(rows):
        location = f"{shown} row {number}"
        yield location, _object(row, location), _content(row)


def _parse(data: bytes, location: str) -> Any:
    """Parse UTF-8 JSON. Raises ConfigError that names the position of an error."""
    try:
        # utf-8-sig also accepts a byte order mark.
        return json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{location}: not UTF-8 text at byte {error.start + 1}: {error.reason}"
        ) from error
    except json.JSONDecodeError as error:
        at = f"column {error.colno}"
        if error.lineno > 1:
            at = f"line {error.lineno} {at}"
        near = error.doc[max(error.pos - 20, 0) : error.pos + 20]
        raise ConfigError(
            f"{location}: not valid JSON at {at}: {error.msg}, near {near!r}"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{location}: not readable as JSON: too deeply nested") from error
    except ValueError as error:
        # Python refuses integers of more than some thousand digits.
        reason = "a number is too long"
        raise ConfigError(f"{location}: not readable as JSON: {reason}") from error


def _object(value: Any, location: str) -> Row:
    """Return `value` if it is an object; raises ConfigError otherwise."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{location}: {shown_json(value)} is not an object with columns."
            f" Understood: {UNDERSTOOD}"
        )
    return value


def _read_parquet(path: Path) -> Iterator[LocatedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches()
            yield from _batch_rows(batches, shown_path(path))
    except (pyarrow.ArrowException, *_ARROW_ERRORS) as error:
        raise ConfigError(
            f"{shown_path(path)}: not a parquet file: {_first_line(error)}"
        ) from error


def _read_directory(path: Path) -> Iterator[LocatedRow]:
    """Read what `datasets.save_to_disk` writes, or the parquet files of a directory by name.

    `save_to_disk` lists its Arrow streams in state.json.
    """
    if (path / "dataset_dict.json").exists():
        # A DatasetDict: the run must not choose a split by itself.
        splits = _listed(path / "dataset_dict.json", "splits")
        raise ConfigError(
            f"{shown_path(path)} has several splits; name one: "
            + ", ".join(shown_path(path / split) for split in splits)
        )
    if (path / "state.json").exists():
        for file in _listed(path / "state.json", "_data_files"):
            yield from _read_arrow(path / file)
        return
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise ConfigError(
            f"{shown_path(path)} is a directory without state.json (datasets.save_to_disk) or"
            f" parquet files"
        )
    for file in files:
        yield from _read_parquet(file)


def _listed(path: Path, key: str) -> list[str]:
    """Return the file or folder names that a JSON file of `datasets` lists under `key`.

    Raises ConfigError unless all are plain names in the same directory.
    """
    content = _parse(path.read_bytes(), shown_path(path))
    entries = content.get(key) if isinstance(content, dict) else None
    names: list[Any] = [None]
    if isinstance(entries, list):
        names = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    if not all(_is_plain_name(name) for name in names):
        raise ConfigError(
            f"{shown_path(path)}: {key} is not a list of names in this directory; write it with"
            f" datasets.save_to_disk"
        )
    return [str(name) for name in names][:_MAX_LISTED]


def _is_plain_name(name: Any) -> bool:
    """Return True for a file name without a path: a list must not point outside its directory."""
    return isinstance(name, str) and name == Path(name).name and name.isprintable()


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    lines = str(error).splitlines()
    return shortened(printable(lines[0] if lines else type(error).__name__), 300)


def _read_arrow(path: Path) -> Iterator[LocatedRow]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as batches:
            yield from _batch_rows(batches, shown_path(path))
    except (pyarrow.ArrowException, *_ARROW_ERRORS) as error:
        raise ConfigError(
            f"{shown_path(path)}: not an Arrow stream: {_first_line(error)}"
        ) from error


def _batch_rows(batches: Any, shown: str) -> Iterator[LocatedRow]:
    """Convert Arrow record batches to rows."""
    number = 0
    for batch in batches:
        # The conversion of a damaged file could otherwise read outside of its buffers.
        batch.validate(full=True)
        for row in batch.to_pylist():
            clean = {key: without_nulls(value) for key, value in row.items()}
            yield f"{shown} row {number}", clean, _content(clean)
            number += 1


def _content(row: Any) -> bytes:
    """Convert a row to bytes that depend on its values only, for files without lines."""
    return json.dumps(row, sort_keys=True, default=str).encode()
