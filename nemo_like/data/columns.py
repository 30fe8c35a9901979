"""Row operations on one column of a batch.

A column is a tensor [B, ...], an array [B, ...], a Jagged or a list of B entries.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.data.jagged import Jagged

Column = Tensor | np.ndarray | Jagged | list


def num_rows(name: str, column: Any) -> int:
    """Return B. Raises TypeError for a value that cannot be a column."""
    if isinstance(column, (Tensor, np.ndarray)) and column.ndim == 0:
        raise TypeError(f"column {name!r} is a single number; a column has one entry per row")
    if not isinstance(column, (Tensor, np.ndarray, Jagged, list)):
        raise TypeError(
            f"column {name!r} is a {type(column).__name__}; a column is a torch.Tensor, np.ndarray,"
            f" Jagged or list"
        )
    return len(column)


def row_widths(column: Column) -> np.ndarray:
    """Return the number of tokens that each row can hold, int64 [B]."""
    if isinstance(column, Jagged):
        return column.lengths
    if isinstance(column, list):
        return np.array([len(row) for row in column], dtype=np.int64)
    return np.full(len(column), column.shape[1], dtype=np.int64)


def num_trained_tokens(columns: Mapping[str, Any]) -> np.ndarray:
    """Count the tokens of each row with loss, int64 [B].

    They are the tokens of `token_mask` (Jagged) in the rows of `row_mask` (bool [B], optional),
    without the first token of a row, which no position predicts.
    """
    mask = columns["token_mask"]
    has_loss = mask.values != 0
    has_loss[mask.offsets[:-1][mask.lengths > 0]] = False
    before = np.concatenate([[0], np.cumsum(has_loss)])
    counts = np.diff(before[mask.offsets])
    if "row_mask" in columns:
        counts = counts * np.asarray(columns["row_mask"], dtype=bool)
    return counts


def take_rows(column: Column, rows: np.ndarray) -> Column:
    """Select rows (int64 [n]) in the given order, copied once. List entries are not copied."""
    if isinstance(column, Tensor):
        return column[torch.from_numpy(rows).to(column.device)]
    if isinstance(column, Jagged):
        return column.take(rows)
    if isinstance(column, list):
        return [column[row] for row in rows.tolist()]
    return column[rows]


def slice_rows(column: Column, start: int, stop: int) -> Column:
    """Return rows [start, stop), as a view except for lists."""
    if isinstance(column, Jagged):
        return column.slice(start, stop)
    return column[start:stop]


def repeat_rows(column: Column, num_repeats: int) -> Column:
    """Repeat each row `num_repeats` times consecutively.

    List entries are deep copies, so that each can be changed without the others.
    """
    if isinstance(column, Tensor):
        return column.repeat_interleave(num_repeats, dim=0)
    if isinstance(column, list):
        return [copy.deepcopy(entry) for entry in column for _ in range(num_repeats)]
    # An array or a Jagged.
    rows = np.repeat(np.arange(len(column), dtype=np.int64), num_repeats)
    return take_rows(column, rows)


def truncate_rows(column: Column, dim: int, max_length: int) -> Column:
    """Truncate a column to at most `max_length` along `dim`.

    Dim 1 of a Jagged is its tokens. A column without that dim is returned unchanged.
    """
    if isinstance(column, Jagged):
        return column.truncate(max_length) if dim == 1 else column
    if not isinstance(column, (Tensor, np.ndarray)) or column.ndim <= dim:
        return column
    if isinstance(column, Tensor):
        return column.narrow(dim, 0, min(max_length, column.shape[dim]))
    index = (slice(None),) * dim + (slice(0, max_length),)
    return column[index]


def concat_rows(name: str, parts: Sequence[Column], pad_value: float = 0) -> Column:
    """Concatenate the rows of all parts.

    Tensors and arrays of different size along dim 1 are right-padded with `pad_value`. Raises
    TypeError for parts of different types.
    """
    kinds = {type(part) for part in parts}
    if len(kinds) > 1:
        raise TypeError(
            f"column {name!r} is of several kinds: {sorted(kind.__name__ for kind in kinds)}"
        )
    first = parts[0]
    if isinstance(first, Jagged):
        return Jagged.concat(list(parts))  # type: ignore[arg-type]
    if isinstance(first, list):
        return [entry for part in parts for entry in part]
    # Batches padded to their own longest row differ in width.
    size = max((part.shape[1] for part in parts if part.ndim > 1), default=0)  # type: ignore[union-attr]
    padded = [_pad_dim_1(part, size, pad_value) for part in parts]  # type: ignore[arg-type]
    if isinstance(first, Tensor):
        return torch.cat(padded)  # type: ignore[arg-type]
    return np.concatenate(padded)  # type: ignore[arg-type]


def _pad_dim_1(part: Any, size: int, pad_value: float) -> Any:
    """Right-pad a tensor or array [B, S, ...] to [B, size, ...]; others are returned unchanged."""
    if part.ndim < 2 or part.shape[1] == size:
        return part
    shape = (part.shape[0], size, *part.shape[2:])
    if isinstance(part, Tensor):
        padded: Any = part.new_full(shape, pad_value)
    else:
        padded = np.full(shape, pad_value, dtype=part.dtype)
    padded[:, : part.shape[1]] = part
    return padded
