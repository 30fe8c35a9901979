"""Readers of data files: JSON lines, JSON, CSV, parquet, and Arrow data sets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.text import printable, shortened, shown_value
from nemo_like.data.messages import without_nulls
from nemo_like.data.row_locations import Location
from nemo_like.data.text_files import format_suffix, open_decompressed, read_csv

Row = dict[str, Any]
LocatedRow = tuple[Location, Row | ConfigError, bytes]
"""(location of the row, the row or the reason why it is none, its content as bytes)"""

UNDERSTOOD = (
    "messages [+ answer]; prompt + completion; prompt + answer; question + answer with"
    " '#### result' (GSM8K)"
)
SUPPORTED_FILES = (
    ".jsonl, .csv (each also as .gz or .zst), .json, .parquet, or a directory with an Arrow dataset"
    " (datasets.save_to_disk) or parquet files"
)
_MAX_LISTED = 10_000
"""Maximum number of files of an Arrow data set."""
_MAX_SHOWN_CHARACTERS = 60
_ROWS_PER_BATCH = 1000
"""Rows of a parquet or Arrow file that are converted to Python objects at once."""
_READ_BYTES = 2**20
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
        ".jsonl.gz": _read_jsonl,
        ".jsonl.zst": _read_jsonl,
        ".csv": _read_csv,
        ".csv.gz": _read_csv,
        ".csv.zst": _read_csv,
        ".json": _read_json,
        ".parquet": _read_parquet,
    }
    suffix = format_suffix(path)
    if suffix not in readers:
        raise ConfigError(f"{key}: {shown_path(path)} ends in {suffix!r}; give {SUPPORTED_FILES}")
    return readers[suffix](path)


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
    prefix = f"{shown_path(path)}:"
    with open_decompressed(path) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                location = Location(prefix, number)
                row: Row | ConfigError
                try:
                    row = _object(_parse(line, location), location)
                except ConfigError as error:
                    row = error
                yield location, row, line.strip()


def _read_json(path: Path) -> Iterator[LocatedRow]:
    rows = _parse(path.read_bytes(), shown_path(path))
    if not isinstance(rows, list):
        raise ConfigError(
            f"{shown_path(path)}: contains {shown_json(rows)}, not a list of objects; one object"
            f" per line is a .jsonl file"
        )
    prefix = f"{shown_path(path)} row "
    for number, row in enumerate(rows):
        location = Location(prefix, number)
        yield location, _object(row, location), _content(row)


def _read_csv(path: Path) -> Iterator[LocatedRow]:
    for location, row in read_csv(path):
        yield location, dict(row), _content(row)


def _parse(data: bytes, location: str | Location) -> Any:
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
        reason = error.msg
        if reason == "Extra data" and error.lineno > 1:
            reason = "further data after the first value (one object per line is a .jsonl file)"
        near = error.doc[max(error.pos - 20, 0) : error.pos + 20]
        raise ConfigError(f"{location}: not valid JSON at {at}: {reason}, near {near!r}") from error
    except RecursionError as error:
        raise ConfigError(f"{location}: not readable as JSON: too deeply nested") from error
    except ValueError as error:
        # Python refuses integers of more than some thousand digits.
        reason = "a number is too long"
        raise ConfigError(f"{location}: not readable as JSON: {reason}") from error


def _object(value: Any, location: Location) -> Row:
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
        # Buffered, because a row group may be as large as the file.
        with pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES) as file:
            batches = file.iter_batches(batch_size=_ROWS_PER_BATCH)
            yield from _batch_rows(batches, shown_path(path))
    except ConfigError:
        raise
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
        # Not mapped: mapped pages count as memory of the process until the file is closed.
        with pyarrow.OSFile(str(path)) as source, pyarrow.ipc.open_stream(source) as batches:
            yield from _batch_rows(batches, shown_path(path))
    except ConfigError:
        raise
    except (pyarrow.ArrowException, *_ARROW_ERRORS) as error:
        raise ConfigError(
            f"{shown_path(path)}: not an Arrow stream: {_first_line(error)}"
        ) from error


def _batch_rows(batches: Any, shown: str) -> Iterator[LocatedRow]:
    """Convert Arrow record batches to rows. Columns and keys keep the order of the file."""
    prefix = f"{shown} row "
    number = 0
    for batch in batches:
        _check_columns(batch.schema.names, shown)
        # The conversion of a damaged file could otherwise read outside of its buffers.
        batch.validate(full=True)
        nested = [field.name for field in batch.schema if field.type.num_fields]
        is_json = all(_is_json_type(field.type) for field in batch.schema)
        for start in range(0, batch.num_rows, _ROWS_PER_BATCH):
            # A part at a time: Python objects need several times the memory of the batch.
            for row in batch.slice(start, _ROWS_PER_BATCH).to_pylist():
                for name in nested:
                    row[name] = without_nulls(row[name])
                content = _content(row)
                # Values that JSON does not have, such as dates, are texts.
                values = row if is_json else json.loads(json.dumps(row, default=_json_value))
                yield Location(prefix, number), values, content
                number += 1


def _is_json_type(kind: Any) -> bool:
    """Return True if all values of an Arrow type are values of JSON in Python."""
    from pyarrow import types

    if types.is_struct(kind):
        return all(_is_json_type(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_json_type(kind.value_type)
    scalars = (
        types.is_string,
        types.is_large_string,
        types.is_boolean,
        types.is_null,
        types.is_integer,
        types.is_float32,
        types.is_float64,
    )
    return any(is_type(kind) for is_type in scalars)


def _check_columns(names: list[str], shown: str) -> None:
    """Raise ConfigError for a column that a table has twice: one of them would be lost."""
    if len(set(names)) == len(names):
        return
    repeated = next(name for name in names if names.count(name) > 1)
    raise ConfigError(f"{shown}: has the column {repeated!r} twice; rename or remove one")


def _json_value(value: Any) -> Any:
    """Return a value that JSON does not have, such as a date, as a text.

    Bytes are text where they are UTF-8: some writers of Parquet do not mark texts as such. Other
    bytes are an object, so that a column that should be a text is refused.
    """
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return {"bytes": value.hex()}


_SORTING_ENCODER = json.JSONEncoder(sort_keys=True, default=_json_value)


def _content(row: Any) -> bytes:
    """Convert a row to bytes that depend on its values only, for files without lines."""
    return _SORTING_ENCODER.encode(row).encode()
