"""The difficulty of the training rows, by `data.curriculum`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.data.datasets import Row, Rows
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.row_order import Curriculum
from nemo_like.run.progress import Progress

_COLUMN = "column:"


def open_curriculum(
    name: str | None, rows: Rows, encoded: EncodedRows, progress: Progress
) -> Curriculum | None:
    """Return the difficulty of `rows` that `data.curriculum` names; None without one.

    For `length` every row is encoded first. Raises ConfigError for a row without a finite number.
    """
    if name is None:
        return None
    if name == "length":
        return Curriculum(name, _lengths(encoded, progress))
    measure = _column_measure(name.removeprefix(_COLUMN))
    if not name.startswith(_COLUMN):
        measure = import_function(
            "data.curriculum", name, "my_package.difficulty", "row of the file"
        )
    difficulty = np.empty(len(rows), dtype=np.float64)
    for index, row in enumerate(rows.rows):
        difficulty[index] = _number(
            measure, row, f"{rows.locations[index]}: data.curriculum {name}"
        )
    return Curriculum(name, difficulty)


def _lengths(encoded: EncodedRows, progress: Progress) -> np.ndarray:
    """Encode every row; return the lengths, float64 [N], 0 for a dropped row."""
    encoded.start(np.arange(len(encoded)))
    with progress.phase("encoding rows for data.curriculum=length", len(encoded)) as phase:
        encoded.finish(phase.advance)
    lengths = np.zeros(len(encoded), dtype=np.float64)
    for index in range(len(encoded)):
        row = encoded.fetch([index])[0]
        if row is not None:
            lengths[index] = len(row.input_ids)
    return lengths


def _column_measure(column: str) -> Callable[[Row], Any]:
    """Return a function that gives the value of `column` in a row."""
    return lambda row: row.get(column)


def _number(measure: Callable[[Row], Any], row: Row, place: str) -> float:
    """Return the difficulty of a row. Raises ConfigError that begins with `place`."""
    try:
        value = measure(row)
    except Exception as error:
        # A function of the user can fail in any way.
        raise ConfigError(f"{place} failed with {user_error_text(error)}") from error
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not is_number or not np.isfinite(np.float32(value)):
        raise ConfigError(f"{place} is {value!r}; every row needs a finite number")
    return float(value)
