"""Rows that are encoded each time they are fetched, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.datasets import row_digest

In = TypeVar("In")
Out = TypeVar("Out")


class LazyRows(Generic[In, Out]):
    """Rows that `encode` turns into their encoded form, in this process, each time they are
    fetched.
    """

    def __init__(self, rows: Sequence[In], encode: Callable[[In], Out | None]) -> None:
        self._rows = rows
        self._encode = encode
        digests = getattr(rows, "digests", None)
        if digests is None:
            digests = np.array(
                [row_digest(json.dumps(row, default=str).encode()) for row in rows], np.uint64
            )
        self.digests: np.ndarray = digests

    def fetch(self, rows: Sequence[int]) -> list[Out | None]:
        """See `EncodedRows.fetch`."""
        return [self._encode_one(row) for row in rows]

    def location(self, row: int) -> str:
        return f"row {row}"

    def _encode_one(self, row: int) -> Out | None:
        try:
            return self._encode(self._rows[row])
        except ConfigError as error:
            locations = getattr(self._rows, "locations", None)
            raise ConfigError(
                f"{locations[row] if locations else f'row {row}'}: {error}"
            ) from error
