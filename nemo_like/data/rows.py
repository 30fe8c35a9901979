"""The rows of data files: read once, checked, and kept as JSON in an unnamed mapped file.

The file is in the directory for temporary files (`TMPDIR`) and disappears with the process, so a
data set of any size needs about 30 bytes of memory per row.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, overload

import numpy as np

from nemo_like.config.errors import (
    ConfigError,
    is_possible_path,
    shortened,
    shown_path,
    similar_path_text,
)
from nemo_like.config.schema import MAIN_SET, VALIDATION_SET
from nemo_like.data.column_names import MissingColumnError, shown_columns
from nemo_like.data.formats import RowSchema, check_missing_values
from nemo_like.data.known_rows import check_columns_used, known_row
from nemo_like.data.row_files import (
    SUPPORTED_FILES,
    LocatedRow,
    Location,
    Row,
    data_files,
    fetch_hub_data,
    format_suffix,
    is_hub_data,
    is_pattern,
    read_rows,
    shown_json,
)
from nemo_like.data.row_order import Mixture

if TYPE_CHECKING:
    from nemo_like.data.image_encoding import ImageEncoder

MAX_LISTED = 20
"""Rows that the message lists."""
_MAX_CHARACTERS = 400
PASS_RATE = "pass_rate"
"""Column with the share of correct answers that a model gave to a prompt, from 0 to 1."""
_ROWS_PER_ADVANCE = 1000
"""Rows between two reports of progress."""
_PLACE = np.dtype(
    [("file", "u2"), ("start", "i8"), ("size", "i8"), ("prefix", "u2"), ("number", "i8")]
)
"""Where the text of a row is: bytes [start, start + size) of a file; and its location."""


class BadRows:
    """Bad rows in the order in which they were found. The memory does not grow with their number.

    Example: `3 bad rows:` with the lines `column 'answer' is missing:`, `train.jsonl:2,
    train.jsonl:9`, `not valid JSON at column 7:` and `train.jsonl:4`.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self.num_rows = num_rows
        self._locations: dict[str, list[str]] = {}
        """Problem -> the rows that have it."""

    def add(self, location: object, problem: str) -> None:
        """Add a row; only the first `MAX_LISTED` are kept."""
        if self.num_rows < MAX_LISTED:
            self._locations.setdefault(problem, []).append(str(location))
        self.num_rows += 1

    def text(self, scope: str = "", *, are_all: bool = False) -> str:
        """Return the message; `scope` tells among which rows they were counted."""
        if self.num_rows == 1:
            ((problem, (location,)),) = self._locations.items()
            return f"{location}: {problem}"
        title = f"{self.num_rows:,} bad rows{scope} (data.on_bad_row=skip leaves them out):"
        if are_all:
            title = f"{self.num_rows:,} bad rows{scope}, and no row can be used:"
        return "\n".join([title, *self.lines()])

    def lines(self) -> list[str]:
        """Return each problem of the rows that are kept, with their places in a further line."""
        lines = []
        for problem, locations in self._locations.items():
            cause = shortened(problem, _MAX_CHARACTERS)
            lines.append(f"  {cause}:\n    {', '.join(locations)}")
        if self.num_rows > MAX_LISTED:
            lines.append(f"  and {self.num_rows - MAX_LISTED:,} more")
        return lines


@dataclass(frozen=True, eq=False)
class Rows(Sequence[Row]):
    """The rows of one file or directory, which have the same format, or of several sources.

    A row is parsed each time it is taken.
    """

    files: tuple[mmap.mmap | bytes, ...]
    """JSON of the rows."""
    places: np.ndarray
    """`_PLACE` [N]."""
    prefixes: tuple[str, ...]
    """Beginnings of locations: a file and a separator."""
    digests: tuple[str, ...]
    """Hash of the content of all rows, of each source."""
    format: tuple[str, ...] = ()
    """Columns by which the format was recognized."""
    num_left_out: int = 0
    """Rows of the file that a selection left out."""
    bad: BadRows = field(default_factory=BadRows)
    """The bad rows of the file, which `data.on_bad_row=skip` left out."""
    skips_bad: bool = False
    """Rows that cannot be encoded are to be left out as well."""
    mixture: Mixture | None = None
    """The sources of the rows, if they are visited by weight."""

    @property
    def sources(self) -> dict[str, range]:
        """Indices of the rows of each source; the name is empty without a mixture."""
        if self.mixture is None:
            return {"": range(len(self))}
        sources = {}
        start = 0
        for name, size in zip(self.mixture.names, self.mixture.sizes, strict=True):
            sources[name] = range(start, start + size)
            start += size
        return sources

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        return json.loads(self._text(index))

    def _text(self, index: int) -> bytes:
        file, start, size, _, _ = self.places[index].item()
        return self.files[file][start : start + size]

    def location(self, index: int) -> str:
        """Return the file and line of a row. Example: `data/train.jsonl:17`."""
        _, _, _, prefix, number = self.places[index].item()
        return f"{self.prefixes[prefix]}{number}"

    def digest(self, index: int) -> str:
        """Return a hash of the content of one row."""
        return hashlib.blake2b(self._text(index), digest_size=8).hexdigest()

    def mixed_with(self, others: Sequence[Rows], mixture: Mixture) -> Rows:
        """Return these rows followed by the rows of `others`, as the sources of `mixture`."""
        parts = (self, *others)
        places = []
        files: list[mmap.mmap | bytes] = []
        prefixes: list[str] = []
        for part in parts:
            own = part.places.copy()
            own["file"] += len(files)
            own["prefix"] += len(prefixes)
            places.append(own)
            files += part.files
            prefixes += part.prefixes
        return dataclasses.replace(
            self,
            files=tuple(files),
            places=np.concatenate(places),
            prefixes=tuple(prefixes),
            digests=tuple(digest for part in parts for digest in part.digests),
            num_left_out=sum(part.num_left_out for part in parts),
            bad=BadRows(sum(part.bad.num_rows for part in parts)),
            mixture=mixture,
        )


def _store_rows(located: Iterable[tuple[Location, Row, bytes | None]]) -> Rows:
    """Store rows with their locations and, if it is known, their JSON.

    Raises ConfigError if the file cannot be written.
    """
    places: list[np.ndarray] = []
    block: list[tuple[int, int, int, int, int]] = []
    prefixes: dict[str, int] = {}
    hashed = hashlib.blake2b(digest_size=16)
    end = 0
    with tempfile.TemporaryFile() as file:
        for location, row, known_text in located:
            text = json.dumps(row).encode() if known_text is None else known_text
            prefix = prefixes.setdefault(location.prefix, len(prefixes))
            block.append((0, end, len(text), prefix, location.number))
            if len(block) == _ROWS_PER_ADVANCE:
                places.append(np.array(block, dtype=_PLACE))
                block.clear()
            text += b"\n"
            hashed.update(text)
            end += len(text)
            _write(file, text)
        _write(file, b"", flush=True)
        # The map stays valid after the file is closed.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if end else b""
    return Rows(
        files=(content,),
        places=np.concatenate([*places, np.array(block, dtype=_PLACE)]),
        prefixes=tuple(prefixes),
        digests=(hashed.hexdigest(),),
    )


def _write(file: IO[bytes], data: bytes, *, flush: bool = False) -> None:
    """Write to the file of rows. Raises ConfigError if that is not possible."""
    try:
        file.write(data)
        if flush:
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"the rows cannot be kept in {tempfile.gettempdir()}: {error}; set TMPDIR to a"
            " directory with more space"
        ) from error


def first_row(path: str | Path, key: str = "data.train_path") -> Row:
    """Return the first row of a file as it is there. Raises ConfigError."""
    for _, row, _ in read_rows(_local_path(path, key), key):
        if isinstance(row, ConfigError):
            raise row
        return row
    raise ConfigError(f"{key}: {path} has no rows")


def load_rows(
    path: str | Path,
    schema: RowSchema,
    *,
    max_rows: int | None = None,
    key: str = "data.train_path",
    columns: Mapping[str, str] | None = None,
    set_name: str = MAIN_SET,
    skips_bad: bool = False,
    selection: PassRateFilter | None = None,
    images: ImageEncoder | None = None,
    advance: Callable[[int], None] | None = None,
) -> Rows:
    """Load the first `max_rows` rows (default all) and check each against `schema`.

    `columns` are the entries of `data.columns` for the set `set_name`; `selection` leaves out some
    of the `max_rows`, `images` places the images of rows. `advance` is called with the number of
    rows read since its last call. Raises ConfigError that names `key` and the path, or the file,
    the line and the problem of the first bad rows; with `skips_bad` only if no other row is left.
    """
    file = _local_path(path, key)
    is_csv = any(".csv" in format_suffix(each) for each in data_files(file, key))
    check = _RowCheck(schema, columns or {}, selection, is_csv, set_name or VALIDATION_SET)
    if images is not None:
        check.place_images = partial(images.placed, folder=file if file.is_dir() else file.parent)
    located = check.usable_rows(islice(read_rows(file, key), max_rows), advance)
    try:
        rows = _store_rows(located)
    except ConfigError as error:
        # The rest of the file cannot be read.
        if not check.bad.num_rows:
            raise
        raise ConfigError(f"{check.bad.text()}\n{error}") from error
    if check.bad.num_rows and not (skips_bad and len(rows)):
        raise ConfigError(check.bad.text(are_all=not len(rows)))
    if not len(rows):
        limit = "" if max_rows is None else f" (the first {max_rows} were requested)"
        if check.num_left_out:
            limit = f" with a pass rate in data.pass_rate_range, of {check.num_left_out:,} rows"
        raise ConfigError(f"{key}: {shown_path(file)} has no rows{limit}")
    return dataclasses.replace(
        rows,
        format=check.format,
        num_left_out=check.num_left_out,
        bad=check.bad,
        skips_bad=skips_bad,
    )


@dataclass
class _RowCheck:
    """Checks the rows of a file against a schema, with the columns of this project."""

    schema: RowSchema
    columns: Mapping[str, str]
    selection: PassRateFilter | None
    is_csv: bool
    set_name: str
    bad: BadRows = field(default_factory=BadRows)
    num_left_out: int = 0
    format: tuple[str, ...] = ()
    """Columns of the format, which the first row decides."""
    place_images: Callable[[Row], Row] | None = None

    def usable_rows(
        self, located: Iterable[LocatedRow], advance: Callable[[int], None] | None
    ) -> Iterable[tuple[Location, Row, bytes | None]]:
        """Yield the selected rows; collect those that cannot be used in `bad`."""
        number = 0
        for number, (location, own_row, text) in enumerate(located, 1):
            if advance is not None and number % _ROWS_PER_ADVANCE == 0:
                advance(_ROWS_PER_ADVANCE)
            try:
                row = self._checked(own_row)
                is_kept = self.selection is None or self.selection.keeps(row)
            except ConfigError as error:
                self.bad.add(location, str(error).removeprefix(f"{location}: "))
                continue
            if is_kept:
                yield location, row, text if row is own_row else None
            else:
                self.num_left_out += 1
        if advance is not None:
            advance(number % _ROWS_PER_ADVANCE)

    def _checked(self, own_row: Row | ConfigError) -> Row:
        """Return a row with the columns of this project. Raises ConfigError for a bad row."""
        if isinstance(own_row, ConfigError):
            raise own_row
        try:
            row = known_row(own_row, self.columns)
        except MissingColumnError as error:
            guess = self.schema.guess(own_row)
            own = "{...}" if guess is None else shown_columns(guess)
            raise ConfigError(
                f"{error}, or give this file other columns: data.set_columns.{self.set_name}={own}"
            ) from error
        if self.place_images is not None:
            row = self.place_images(row)
        columns = self.format or self.schema.recognize(row)
        self.schema.check(row, columns)
        check_columns_used(row, columns, self.columns)
        if self.is_csv:
            check_missing_values(row, columns)
        # Of the first row that can be used.
        self.format = columns
        return row


def _local_path(path: str | Path, key: str) -> Path:
    """Return the file or directory of `path`. Raises ConfigError if there is none."""
    if is_hub_data(str(path)):
        path = fetch_hub_data(str(path), key)
    file = Path(path).expanduser()
    if not is_possible_path(str(file)) or not (file.exists() or is_pattern(file)):
        place = "" if file.is_absolute() else f" in the working directory {Path.cwd()}"
        raise ConfigError(
            f"{key}: there is no {shortened(repr(str(file)), 300)}{place}{similar_path_text(file)};"
            f" give {SUPPORTED_FILES}"
        )
    return file


@dataclass(frozen=True, kw_only=True)
class PassRateFilter:
    """Keeps the rows whose `pass_rate` is in a range.

    Prompts that a model always or never answers correctly have equal rewards in GRPO, so no
    advantages.
    """

    minimum: float = 0.0
    maximum: float = 1.0

    def keeps(self, row: Row) -> bool:
        """Return True for a pass rate in the range. Raises ConfigError for a row without one."""
        value = row.get(PASS_RATE)
        # A CSV file has numbers as texts.
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with suppress(ValueError):
                if 0 <= float(value) <= 1:
                    return self.minimum <= float(value) <= self.maximum
        raise ConfigError(
            f"column {PASS_RATE!r} is {shown_json(value)}, not a number from 0 to 1;"
            " data.pass_rate_range selects by it. Add it to every row, name its column in"
            " data.columns.pass_rate, or set data.pass_rate_range to [0, 1]"
        )
