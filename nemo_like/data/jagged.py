"""Encoded rows, and rows of different lengths in one flat NumPy array.

The flat array is the format in which columns are transferred: only real tokens are sent between
processes, never padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from nemo_like.data.images import RowImage

_SHORT_ROW_TOKENS = 100
"""Mean row length below which `take` gathers by token index instead of by row slice."""


@dataclass(frozen=True, slots=True, eq=False)
class Jagged:
    """B rows stored contiguously.

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
        """Concatenate `rows`; an empty sequence gives zero rows. Each row is [L] or [L, ...]."""
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        # NumPy cannot concatenate zero arrays.
        if len(rows) == 0:
            return cls.from_lengths(np.empty(0, dtype), lengths)
        values = np.concatenate([np.asarray(row, dtype=dtype) for row in rows])
        return cls.from_lengths(values.astype(dtype, copy=False), lengths)

    @classmethod
    def from_lengths(cls, values: np.ndarray, lengths: np.ndarray) -> Jagged:
        """Split flat `values` [T] into rows of `lengths` int [B].

        Raises ValueError unless the lengths sum to T.
        """
        offsets = _offsets(lengths)
        if offsets[-1] != len(values):
            raise ValueError(
                f"row lengths add up to {offsets[-1]} but there are {len(values)} values"
            )
        return cls(values, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Return row `row` as a view [L]."""
        # Without this check a slice beyond the end would be an empty row.
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        start, stop = self.offsets[row : row + 2]
        return self.values[start:stop]

    def __iter__(self) -> Iterator[np.ndarray]:
        """Iterate over the rows, each a view [L]."""
        return (self[row] for row in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per row, int64 [B]."""
        return np.diff(self.offsets)

    @property
    def dtype(self) -> np.dtype:
        """Data type of the values."""
        return self.values.dtype

    def slice(self, start: int, stop: int) -> Jagged:
        """Return rows [start, stop) as a view: no token is copied.

        Values are [T'] of the T tokens.
        """
        offsets = self.offsets[start : stop + 1]
        first = offsets[0]
        values = self.values[first : offsets[-1]]
        return Jagged(values, offsets - first)

    def take(self, rows: np.ndarray | Sequence[int]) -> Jagged:
        """Select rows in the given order; each token is copied exactly once.

        `rows` is int [n]; values are [T'].
        """
        rows = np.asarray(rows, dtype=np.int64)
        starts = self.offsets[:-1][rows]
        stops = self.offsets[1:][rows]
        lengths = stops - starts
        offsets = _offsets(lengths)
        num_tokens = offsets[-1]
        # An index per token is faster than a slice per row while rows are short; the measured
        # break-even is about 100 tokens per row.
        if num_tokens < _SHORT_ROW_TOKENS * len(rows):
            # Token j of the result is token j + shift of the values, with one shift per row.
            shifts = np.repeat(starts - offsets[:-1], lengths)
            index = shifts + np.arange(num_tokens, dtype=np.int64)
            return Jagged(self.values[index], offsets)
        slices = []
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            slices.append(self.values[start:stop])
        if not slices:
            return Jagged(self.values[:0].copy(), offsets)
        return Jagged(np.concatenate(slices), offsets)

    def truncate(self, max_length: int) -> Jagged:
        """Truncate every row at its end to at most `max_length` tokens.

        Values are [T'] of the T tokens.
        """
        first = np.repeat(self.offsets[:-1], self.lengths)
        position = np.arange(len(self.values), dtype=np.int64) - first
        lengths = np.minimum(self.lengths, max_length)
        kept = self.values[position < max_length]
        return Jagged.from_lengths(kept, lengths)

    @staticmethod
    def concat(parts: Sequence[Jagged]) -> Jagged:
        """Concatenate the rows of all parts, in order. Raises ValueError for no parts.

        Values are [T] in total, offsets [B + 1].
        """
        if not parts:
            raise ValueError("Jagged.concat needs at least one part")
        values = np.concatenate([part.values for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        return Jagged.from_lengths(values, lengths)


class EncodedRow(NamedTuple):
    """One row of token ids.

    Example: `EncodedRow(input_ids=[1, 5, 9, 2], token_mask=[0, 0, 1, 1])` has loss on 9 and 2.
    """

    input_ids: np.ndarray
    """int32 [L]."""
    token_mask: np.ndarray
    """uint8 [L], 1 for a trained token."""
    images: tuple[RowImage, ...] = ()
    """In the order of their tokens."""

    @property
    def num_trained(self) -> int:
        """Number of tokens with loss; no position predicts the first one."""
        return int(np.count_nonzero(self.token_mask[1:]))

    def beginning(self, num_tokens: int) -> EncodedRow:
        """Return the first `num_tokens` tokens at most: it ends before an image that is cut."""
        kept = tuple(image for image in self.images if image.end <= num_tokens)
        for image in self.images[len(kept) :]:
            num_tokens = min(num_tokens, image.start)
        return EncodedRow(self.input_ids[:num_tokens], self.token_mask[:num_tokens], kept)


def collate(rows: Sequence[EncodedRow]) -> dict[str, Any]:
    """Return the columns of a batch: `input_ids` and `token_mask` (Jagged), `length` int64 [B] and
    `row_mask` bool [B]. If any row has images, `images` is the list of the images of each row.

    Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    input_ids = Jagged.from_rows([row.input_ids for row in rows], np.int32)
    mask_values = np.concatenate([row.token_mask for row in rows]).astype(np.uint8, copy=False)
    columns = {
        "input_ids": input_ids,
        "token_mask": Jagged(mask_values, input_ids.offsets),
        "length": input_ids.lengths,
        "row_mask": np.ones(len(rows), dtype=bool),
    }
    if any(row.images for row in rows):
        columns["images"] = [row.images for row in rows]
    return columns


def _offsets(lengths: np.ndarray) -> np.ndarray:
    """Return row offsets int64 [B+1] of row lengths [B]."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
