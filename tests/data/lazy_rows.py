"""Rows that are encoded each time they are fetched, in this process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from nemo_like.config.errors import ConfigError

In = TypeVar("In")
Out = TypeVar("Out")


class LazyRows(Generic[In, Out]):
    """Rows that `encode` turns into their encoded form, in this process, each time they are
    fetched.
    """

    num_skipped = 0

    def __init__(self, rows: Sequence[In], encode: Callable[[In], Out | None]) -> None:
        self._rows = rows
        self._encode = encode
        digest = hashlib.blake2b(json.dumps([*rows], default=str).encode()).hexdigest()
        self.digests: tuple[str, ...] = getattr(rows, "digests", (digest,))

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, rows: Sequence[int]) -> list[Out | None]:
        """See `EncodedRows.fetch`."""
        return [self._encode_one(row) for row in rows]

    def location(self, row: int) -> str:
        return f"row {row}"

    def _encode_one(self, row: int) -> Out | None:
        try:
            return self._encode(self._rows[row])
        except ConfigError as error:
            raise ConfigError(f"{self.location(row)}: {error}") from error
