"""Padded microbatches: within the cap, as few as possible, even; rows of like length together."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.plan_step import form_padded

LENGTHS = np.clip(
    np.random.default_rng(0).lognormal(np.log(300), 0.9, 256).astype(np.int64), 4, 2048
)


def formed(
    lengths: list[int] | np.ndarray, capacity: int, *, evened: bool = True, **options: int
) -> list[list[int]]:
    """Bins of rows, balanced by tokens or only filled."""
    values = np.asarray(lengths, dtype=np.int64)
    work = values.astype(np.float64) if evened else None
    return form_padded(values, np.ones_like(values), work, capacity, **options).bins()


def sizes(bins: list[list[int]], lengths: list[int] | np.ndarray) -> list[int]:
    return [len(rows) * max(int(lengths[row]) for row in rows) for rows in bins]


def fewest(lengths: list[int], capacity: int) -> int:
    """Over all cuts of the sorted rows into consecutive microbatches."""
    ordered = sorted(lengths, reverse=True)
    for count in range(1, len(ordered) + 1):
        for cuts in combinations(range(1, len(ordered)), count - 1):
            bounds = [0, *cuts, len(ordered)]
            if all((stop - start) * ordered[start] <= capacity for start, stop in pairwise(bounds)):
                return count
    raise AssertionError("a row is above the capacity")


def test_worked_example() -> None:
    """Rows of 7, 6, 4, 4, 3, 2 tokens under 16: [7, 6] and the other four."""
    assert formed([2, 4, 7, 4, 3, 6], 16) == [[2, 5], [1, 3, 4, 0]]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(20, 60), st.booleans())
def test_the_number_is_the_smallest_there_is(
    lengths: list[int], capacity: int, evened: bool
) -> None:
    bins = formed(lengths, capacity, evened=evened)
    assert len(bins) == fewest(lengths, capacity)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert max(sizes(bins, lengths)) <= capacity


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 90), max_size=40), st.integers(1, 6), st.integers(1, 9), st.booleans()
)
def test_multiples_and_row_limits_hold(
    lengths: list[int], bins_multiple: int, max_rows: int, evened: bool
) -> None:
    bins = formed(lengths, 64, evened=evened, bins_multiple=bins_multiple, max_rows=max_rows)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert len(bins) % bins_multiple == 0 or len(bins) == len(lengths)
    for rows, size in zip(bins, sizes(bins, lengths), strict=True):
        assert 1 <= len(rows) <= max_rows and (size <= 64 or len(rows) == 1)


def test_the_max_work_of_a_microbatch_is_minimal() -> None:
    """Evened under the same number of microbatches, the largest is near the mean and no worse than
    plain filling.
    """
    lengths = np.minimum(LENGTHS, 700)
    filled, even = (
        sizes(formed(lengths, 4096, evened=evened, bins_multiple=8), lengths)
        for evened in (False, True)
    )
    assert len(filled) == len(even) and max(even) <= max(filled)
    assert max(even) <= 1.15 * np.mean(even)


def test_rows_of_like_length_are_together() -> None:
    bins = formed(LENGTHS, 4096)
    longest = [max(LENGTHS[row] for row in rows) for rows in bins]
    shortest = [min(LENGTHS[row] for row in rows) for rows in bins]
    assert all(low >= high for low, high in zip(shortest, longest[1:], strict=False))


@pytest.mark.parametrize("work", [None, np.array([9.0, 5.0, 4.0])])
def test_items_of_several_rows_are_not_divided(work: np.ndarray | None) -> None:
    """Items of 2, 3 and 1 rows, longest 9, 5 and 4 tokens, under 30: 18, then 15 + 5 for the single
    row.
    """
    packing = form_padded(np.array([9, 5, 4]), np.array([2, 3, 1]), work, 30)
    assert packing.bins() == [[0], [1, 2]]


def test_no_rows_are_no_microbatches() -> None:
    packing = form_padded(np.empty(0, np.int64), np.empty(0, np.int64), None, 16)
    assert isinstance(packing, Packing) and packing.bins() == []
