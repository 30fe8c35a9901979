"""Jagged rows: every operation is the same one on a list of rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.jagged import Jagged


def rows_of(jagged: Jagged) -> list[list[int]]:
    return [row.tolist() for row in jagged]


def make(lengths: list[int]) -> tuple[Jagged, list[list[int]]]:
    rows = [[1000 * row + token for token in range(length)] for row, length in enumerate(lengths)]
    return Jagged.from_rows(rows, np.int32), rows


@given(
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=8),
    picks=st.lists(st.integers(0, 1_000), max_size=12),
    max_length=st.integers(0, 300),
)
def test_take_slice_truncate_concat(lengths: list[int], picks: list[int], max_length: int) -> None:
    jagged, rows = make(lengths)
    picks = [pick % len(rows) for pick in picks]
    assert rows_of(jagged) == rows
    taken = jagged.take(picks)
    assert rows_of(taken) == [rows[pick] for pick in picks]
    assert taken.dtype == np.int32
    assert rows_of(jagged.slice(1, len(rows))) == rows[1:]
    assert rows_of(jagged.truncate(max_length)) == [row[:max_length] for row in rows]
    assert rows_of(Jagged.concat([jagged, taken])) == rows + rows_of(taken)


def test_take_copies_and_slice_does_not() -> None:
    jagged, _ = make([2, 3])
    for taken in (jagged.take([1]), jagged.take([1, 0])):
        taken.values[:] = -1
    assert jagged[1].tolist() == [1000, 1001, 1002]
    jagged.slice(1, 2).values[0] = -1
    assert jagged[1].tolist() == [-1, 1001, 1002]


def test_values_may_have_more_dims() -> None:
    jagged = Jagged.from_lengths(np.arange(10).reshape(5, 2), np.array([2, 3]))
    assert jagged.take([1, 0])[0].tolist() == [[4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("lengths", [[0] * 3, [400, 2, 700]])
def test_take_of_long_and_of_no_rows(lengths: list[int]) -> None:
    jagged, rows = make(lengths)
    assert rows_of(jagged.take([2, 0])) == [rows[2], rows[0]]
    assert len(jagged.take([])) == 0
    assert jagged.take([]).dtype == np.int32


def test_what_does_not_fit_is_refused() -> None:
    jagged, _ = make([2, 3])
    with pytest.raises(ValueError, match="row lengths add up to 3 but there are 4 values"):
        Jagged.from_lengths(np.zeros(4), np.array([1, 2]))
    with pytest.raises(IndexError, match="row 2 of 2"):
        _ = jagged[2]
    with pytest.raises(ValueError, match="at least one part"):
        Jagged.concat([])
    assert rows_of(Jagged.from_rows([], np.int32)) == []
