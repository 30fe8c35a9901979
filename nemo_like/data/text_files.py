"""Text files as bytes or as CSV rows, plain or compressed with gzip or Zstandard."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.text import printable, shortened
from nemo_like.data.row_locations import Location

COMPRESSIONS = (".gz", ".zst")
_MAX_FIELD_CHARACTERS = 2**31 - 1
"""The csv module refuses longer fields; its default of 131,072 is too short for long texts."""


def format_suffix(path: Path) -> str:
    """Return the suffix that names the format, with that of a compression.

    Example: `.jsonl.gz` for `train.v2.jsonl.gz`, `.parquet` for `train.parquet`.
    """
    if path.suffix in COMPRESSIONS:
        return Path(path.stem).suffix + path.suffix
    return path.suffix


@contextmanager
def open_decompressed(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for reading, decompressed if its name ends in one of `COMPRESSIONS`.

    Raises ConfigError, also within the block, if the compressed data is damaged or incomplete.
    """
    if path.suffix not in COMPRESSIONS:
        with path.open("rb") as file:
            yield file
        return
    try:
        with _open_gzip(path) if path.suffix == ".gz" else _open_zstandard(path) as file:
            yield file
    except (OSError, EOFError, zlib.error) as error:
        reason = shortened(printable(str(error).partition("\n")[0]), 300)
        raise ConfigError(
            f"{shown_path(path)}: cannot be decompressed: {reason}; compress the file again, or"
            " copy it again if it is incomplete"
        ) from error


def _open_gzip(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb")  # type: ignore[return-value]


def _open_zstandard(path: Path) -> IO[bytes]:
    # pyarrow is a dependency anyway and has the decompressor.
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd"))


def read_csv(path: Path) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Read the rows of a CSV file whose first line has the names of the columns.

    Every value is a text, but a JSON list of messages, which any column may have, is read. A row's
    location is its first line. Raises ConfigError for a bad header or row.
    """
    shown = shown_path(path)
    csv.field_size_limit(_MAX_FIELD_CHARACTERS)
    with (
        open_decompressed(path) as file,
        # utf-8-sig also accepts a byte order mark; the csv module needs the original line ends.
        io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text,
    ):
        reader = csv.reader(text, strict=True)
        names: list[str] | None = None
        while True:
            location = Location(f"{shown}:", reader.line_num + 1)
            try:
                values = next(reader, None)
            except csv.Error as error:
                raise ConfigError(f"{location}: not valid CSV: {error}") from error
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"{location}: not UTF-8 text in this or a later line: {error.reason}"
                ) from error
            if values is None:
                return
            if not values:
                continue
            if names is None:
                names = _checked_names(values, location)
                continue
            if len(values) != len(names):
                raise ConfigError(
                    f"{location}: {len(values)} values for {len(names)} columns; a value with a"
                    ' comma or a line break is written in quotes ("), and a quote in it twice'
                )
            yield location, dict(zip(names, map(_value, values), strict=True))


def _value(text: str) -> Any:
    """Return the messages of a JSON list of messages; any other text itself."""
    # Most values end here. `prompt` may be a text that begins with a bracket.
    if not (text.startswith("[") and text.endswith("]")):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_message_list = bool(value) and all(_is_message(item) for item in value)
    return value if is_message_list else text


def _is_message(value: object) -> bool:
    """Return True for an object with the role of a message, also as ShareGPT names it."""
    return isinstance(value, dict) and not value.keys().isdisjoint(("role", "from"))


def _checked_names(names: list[str], location: Location) -> list[str]:
    """Return the names of the columns. Raises ConfigError for an empty or repeated one."""
    for name in names:
        if not name.strip() or names.count(name) > 1:
            problem = "a column without a name" if not name.strip() else f"{name!r} twice"
            raise ConfigError(
                f"{location}: the header has {problem}; the first line of a CSV file has one name"
                " per column"
            )
    return names
