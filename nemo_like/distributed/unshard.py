"""Gathers the results of the data-parallel ranks in the row order of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from nemo_like.data.columns import Column, concat_rows, take_rows
from nemo_like.data.jagged import Jagged
from nemo_like.data.planning.plan import BatchPlan


def unshard(parts: Sequence[Column], plan: BatchPlan) -> Column:
    """Concatenate one column of every rank and restore the row order of the batch.

    `parts[dp_rank]` has the rows in the order of `plan.rows_of_rank(dp_rank)`. A row that the plan
    assigns to no rank (deferred or dropped) is empty in a Jagged, 0 in an array or a tensor, None
    in a list. Raises ValueError if the ranks returned another number of rows than they got.
    """
    # A wrong number of rows would silently assign values to other rows.
    rows_of_rank = [plan.rows_of_rank(dp_rank) for dp_rank in range(plan.spec.num_ranks)]
    expected = [len(rows) for rows in rows_of_rank]
    returned = [len(part) for part in parts]
    if returned != expected:
        raise ValueError(f"the ranks returned {returned} rows, the plan gave them {expected}")
    rows = np.concatenate(rows_of_rank)
    column = concat_rows("of the ranks", parts)
    num_missing = plan.num_rows - len(rows)
    if num_missing:
        blank_rows = _blank_rows(column, num_missing)
        column = concat_rows("of the ranks", [column, blank_rows])
        missing_rows = np.setdiff1d(np.arange(plan.num_rows), rows)
        rows = np.concatenate([rows, missing_rows])
    # `rows` is a permutation now, and argsort gives its inverse.
    return take_rows(column, np.argsort(rows))


def _blank_rows(column: Column, count: int) -> Column:
    """Return `count` rows without values, of the type and the dims of `column`."""
    if isinstance(column, list):
        return [None] * count
    if isinstance(column, Jagged):
        offsets = np.zeros(count + 1, dtype=np.int64)
        return Jagged(column.values[:0], offsets)
    if isinstance(column, Tensor):
        return column.new_zeros((count, *column.shape[1:]))
    return np.zeros((count, *column.shape[1:]), dtype=column.dtype)
