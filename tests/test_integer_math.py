"""Division rounded up, compared with exact rational numbers."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.integer_math import ceil_div, check_integer, nearest_divisors, round_up


@given(st.integers(-(10**18), 10**18), st.integers(1, 10**9))
def test_integers_are_rounded_up_exactly(value: int, divisor: int) -> None:
    assert ceil_div(value, divisor) == math.ceil(Fraction(value, divisor))
    rounded = round_up(value, divisor)
    assert rounded % divisor == 0
    assert value <= rounded < value + divisor


@given(st.lists(st.integers(0, 10**9)), st.integers(1, 10**6))
def test_arrays_are_rounded_elementwise(values: list[int], multiple: int) -> None:
    rounded = round_up(np.array(values, dtype=np.int64), multiple)
    assert rounded.dtype == np.int64
    assert rounded.tolist() == [round_up(value, multiple) for value in values]


def test_divisors_around_a_size() -> None:
    assert nearest_divisors(6, 4) == "3 or 6"
    assert nearest_divisors(6, 7) == "6"


@pytest.mark.parametrize("value", [3, np.int64(3), np.array(3)])
def test_integers_of_any_library_are_accepted(value: Any) -> None:
    number = check_integer("size", value, 3)
    assert type(number) is int
    assert number == 3


@pytest.mark.parametrize("value", ["3", 3.0, None, True, 2, math.nan])
def test_what_is_no_integer_of_the_minimum_is_an_error_with_the_name(value: Any) -> None:
    with pytest.raises(ValueError, match=r"size is .* at least 3"):
        check_integer("size", value, 3)
