"""Rows of a file: read, with the columns of this project, checked and selected."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path, similar_path_text
from nemo_like.config.text import is_possible_path, shortened
from nemo_like.data.bad_rows import BadRows
from nemo_like.data.datasets import Row, Rows, RowSchema, row_digest, row_problem
from nemo_like.data.hub_files import fetch_hub_data, is_hub_data
from nemo_like.data.row_columns import known_row, missing_value_problem
from nemo_like.data.row_files import SUPPORTED_FILES, LocatedRow, read_rows
from nemo_like.data.row_filters import PassRateFilter
from nemo_like.data.row_locations import Location, Locations
from nemo_like.data.row_store import RowStore
from nemo_like.data.text_files import format_suffix

_ROWS_PER_ADVANCE = 1000
"""Rows between two reports of progress."""


def load_rows(
    path: str | Path,
    schema: RowSchema,
    *,
    max_rows: int | None = None,
    key: str = "data.train_path",
    columns: Mapping[str, str] | None = None,
    selection: PassRateFilter | None = None,
    advance: Callable[[int], None] | None = None,
) -> Rows:
    """Load the first `max_rows` rows (default all) and check each against `schema`.

    `columns` are those of `data.columns`; `selection` leaves out some of the `max_rows`. `advance`
    is called with the number of rows read since its last call. Raises ConfigError that names `key`
    and the path, or the file, the line and the problem of the first bad rows.
    """
    file = _local_path(path, key)
    loading = _Loading(schema, columns or {}, selection, format_suffix(file))
    bad = BadRows()
    try:
        for number, located in enumerate(islice(read_rows(file, key), max_rows), 1):
            loading.add(located, bad)
            if advance is not None and number % _ROWS_PER_ADVANCE == 0:
                advance(_ROWS_PER_ADVANCE)
    except ConfigError as error:
        # The rest of the file cannot be read.
        if not bad.num_rows:
            raise
        raise ConfigError(f"{bad.text()}\n{error}") from error
    if bad.num_rows:
        raise ConfigError(bad.text())
    if advance is not None:
        advance((len(loading.rows) + loading.num_left_out) % _ROWS_PER_ADVANCE)
    if not loading.rows:
        limit = "" if max_rows is None else f" (the first {max_rows} were requested)"
        if loading.num_left_out:
            limit = (
                f" with a pass rate between data.min_pass_rate and data.max_pass_rate, of"
                f" {loading.num_left_out:,} rows"
            )
        raise ConfigError(f"{key}: {shown_path(file)} has no rows{limit}")
    return loading.result()


def _local_path(path: str | Path, key: str) -> Path:
    """Return the file or directory of `path`. Raises ConfigError if there is none."""
    if is_hub_data(str(path)):
        path = fetch_hub_data(str(path), key)
    file = Path(path).expanduser()
    if not is_possible_path(str(file)) or not file.exists():
        raise ConfigError(
            f"{key}: there is no {shortened(repr(str(file)), 300)}{similar_path_text(file)}; give"
            f" {SUPPORTED_FILES}"
        )
    return file


class _Loading:
    """The rows of a file that were read so far."""

    def __init__(
        self,
        schema: RowSchema,
        columns: Mapping[str, str],
        selection: PassRateFilter | None,
        suffix: str,
    ) -> None:
        self.rows = RowStore()
        self.num_left_out = 0
        self._schema = schema
        self._columns = columns
        self._selection = selection
        # Renamed columns are other rows to a resumed run.
        self._renaming = json.dumps(columns, sort_keys=True).encode() if columns else b""
        self._is_table = suffix.startswith(".csv")
        # The content of the other files has sorted keys.
        self._has_lines = suffix.startswith(".jsonl")
        self._locations = Locations()
        self._digests = array("Q")
        self._format: tuple[str, ...] = ()

    def add(self, located: LocatedRow, bad: BadRows) -> None:
        """Check a row and keep it if it is selected; add it to `bad` if it cannot be used."""
        location, own_row, content = located
        try:
            row = self._checked(own_row, location)
        except ConfigError as error:
            bad.add(location, str(error).removeprefix(f"{location}: "))
            return
        if self._selection is not None and not self._selection.keeps(row):
            self.num_left_out += 1
            return
        is_line = self._has_lines and row is own_row
        self.rows.append(row, len(content), content if is_line else None)
        self._locations.append(location)
        self._digests.append(row_digest(content + self._renaming))

    def _checked(self, own_row: Row | ConfigError, location: Location) -> Row:
        """Return a row with the columns of this project. Raises ConfigError for a bad row."""
        if isinstance(own_row, ConfigError):
            raise own_row
        row = known_row(own_row, self._columns)
        # The first row decides the format of the file.
        self._format = self._format or self._schema.recognize(row, str(location))
        problem = row_problem(row, self._format, self._schema)
        if problem is None and self._is_table:
            problem = missing_value_problem(row, self._format)
        if problem is None and self._selection is not None:
            problem = self._selection.problem(row)
        if problem is not None:
            raise ConfigError(problem)
        return row

    def result(self) -> Rows:
        """Return the rows. Raises ConfigError if the file that keeps them cannot be written."""
        self.rows.flush()
        return Rows(
            self.rows,
            self._locations,
            self._format,
            np.frombuffer(self._digests, np.uint64),
            num_left_out=self.num_left_out,
        )
