"""Conversion of encoded rows to the columns of a batch: one flat array per column, no padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from nemo_like.data.jagged import Jagged


class EncodedRow(NamedTuple):
    """One row of token ids.

    Example: `EncodedRow(input_ids=[1, 5, 9, 2], token_mask=[0, 0, 1, 1])` has loss on 9 and 2.
    """

    input_ids: np.ndarray
    """int32 [L]."""
    token_mask: np.ndarray
    """uint8 [L], 1 for a trained token."""

    @property
    def num_trained(self) -> int:
        """Number of tokens with loss; no position predicts the first one."""
        return int(np.count_nonzero(self.token_mask[1:]))


class TokenCounts(NamedTuple):
    """What a plan needs to know of rows."""

    lengths: np.ndarray
    """int64 [B]"""
    num_trained: np.ndarray | None
    """int64 [B]: tokens with loss; None if they are not known."""


def count_tokens(rows: Sequence[EncodedRow]) -> TokenCounts:
    """Count the tokens of rows, and their tokens with loss."""
    lengths = [len(row.input_ids) for row in rows]
    num_trained = [row.num_trained for row in rows]
    return TokenCounts(np.array(lengths, dtype=np.int64), np.array(num_trained, dtype=np.int64))


def collate(rows: Sequence[EncodedRow]) -> dict[str, Jagged | np.ndarray]:
    """Return the columns of a batch: `input_ids` and `token_mask` (Jagged), `length` int64 [B] and
    `row_mask` bool [B].

    Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("a batch needs at least one row")
    input_ids = Jagged.from_rows([row.input_ids for row in rows], np.int32)
    mask_values = np.concatenate([row.token_mask for row in rows]).astype(np.uint8, copy=False)
    return {
        "input_ids": input_ids,
        "token_mask": Jagged(mask_values, input_ids.offsets),
        "length": input_ids.lengths,
        "row_mask": np.ones(len(rows), dtype=bool),
    }
