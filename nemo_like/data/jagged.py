"""Rows of different lengths in one flat NumPy array: what travels between processes, so padding
never does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

_SHORT_ROW_TOKENS = 100


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """B rows stored end to end.

    `values` is [T] or [T, ...] (any dtype), `offsets` int64 [B+1] with `offsets[0] == 0` and
    `offsets[-1] == T`.

    Example: rows [7, 8, 9] and [4] are `Jagged(values=[7, 8, 9, 4], offsets=[0, 3, 4])`.
    """

    values: np.ndarray
    offsets: np.ndarray

    @classmethod
    def from_rows(
        cls, rows: Sequence[Sequence[int] | Sequence[float] | np.ndarray], dtype: np.dtype | type
    ) -> Jagged:
        """Concatenate `rows` (an empty sequence gives zero rows)."""
        lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
        values = (
            np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
            if len(rows)
            else np.empty(0, dtype)
        )
        return cls.from_lengths(values.astype(dtype, copy=False), lengths)

    @classmethod
    def from_lengths(cls, values: np.ndarray, lengths: np.ndarray) -> Jagged:
        """Split flat `values` [T] into rows of `lengths` [B]; raises ValueError if they do not add
        up to T.
        """
        offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        if offsets[-1] != len(values):
            raise ValueError(
                f"row lengths add up to {offsets[-1]} but there are {len(values)} values"
            )
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Row `row` as a view [L]."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per row, int64 [B]."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype:
        return self.values.dtype

    def slice(self, start: int, stop: int) -> Jagged:
        """Rows [start, stop) as a view: no token is copied."""
        offsets = self.offsets[start : stop + 1]
        return Jagged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: np.ndarray | Sequence[int]) -> Jagged:
        """The given rows in the given order; each token is copied exactly once."""
        rows = np.asarray(rows, dtype=np.int64)
        starts, stops = self.offsets[:-1][rows], self.offsets[1:][rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(stops - starts, out=offsets[1:])
        # An index per token beats a slice per row while rows are short; measured break-even is
        # about 100 tokens a row.
        if offsets[-1] < _SHORT_ROW_TOKENS * len(rows):
            index = np.repeat(starts - offsets[:-1], stops - starts) + np.arange(
                offsets[-1], dtype=np.int64
            )
            return Jagged(self.values[index], offsets)
        slices = [
            self.values[start:stop]
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        return Jagged(np.concatenate(slices) if slices else self.values[:0].copy(), offsets)

    def truncate(self, max_length: int) -> Jagged:
        """Every row cut at its end to at most `max_length` tokens."""
        position = np.arange(len(self.values), dtype=np.int64) - np.repeat(
            self.offsets[:-1], self.lengths
        )
        return Jagged.from_lengths(
            self.values[position < max_length], np.minimum(self.lengths, max_length)
        )

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """All rows of all parts, in order. Raises ValueError for no parts."""
        if not parts:
            raise ValueError("Jagged.concat needs at least one part")
        return Jagged.from_lengths(
            np.concatenate([part.values for part in parts]),
            np.concatenate([part.lengths for part in parts]),
        )

    @classmethod
    def from_padded(cls, padded: np.ndarray, lengths: np.ndarray) -> Jagged:
        """The first `lengths[b]` values of each row of `padded` [B, S]; the rest is dropped."""
        longest = int(np.max(lengths, initial=0))
        if len(lengths) != len(padded) or longest > padded.shape[1]:
            raise ValueError(
                f"{len(lengths)} lengths up to {longest} do not fit an array of shape"
                f" {padded.shape}"
            )
        return cls.from_lengths(
            padded[np.arange(padded.shape[1]) < np.asarray(lengths)[:, None]], np.asarray(lengths)
        )

    def to_padded(self, pad_value: float = 0, length: int | None = None) -> np.ndarray:
        """[B, S, ...] with S the longest row (or `length`); raises ValueError if a row is longer
        than `length`.
        """
        lengths = self.lengths
        longest = int(lengths.max(initial=0))
        size = longest if length is None else length
        if longest > size:
            raise ValueError(f"a row has {longest} tokens, more than the asked length {size}")
        padded = np.full(
            (len(self), size, *self.values.shape[1:]), pad_value, dtype=self.values.dtype
        )
        padded[np.arange(size) < lengths[:, None]] = self.values
        return padded
