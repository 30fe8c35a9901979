"""Integer division rounded up, the multiples and divisors around a number, indices of
blocks, and a check.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np

Integers = TypeVar("Integers", int, "np.ndarray")


def check_integer(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an int. Raises ValueError unless it is an integer of at least `minimum`.

    Integers of NumPy and tensors with one integer are accepted, True and False are not.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} is {value!r}; give an integer of at least {minimum}") from None
    if isinstance(value, bool):
        raise ValueError(f"{name} is {value}; give an integer of at least {minimum}")
    if number < minimum:
        raise ValueError(f"{name} is {number}; it must be at least {minimum}")
    return number


def ceil_div(value: Integers, divisor: int) -> Integers:
    """Divide integers, of any array shape, by a positive `divisor`, rounding up.

    Example: 7, 4 -> 2.
    """
    # Floor division rounds down for either sign, so negating twice rounds up, in exact integers.
    return -(-value // divisor)


def round_up(value: Integers, multiple: int) -> Integers:
    """Round integers, of any array shape, up to multiples of `multiple`. Example: 7, 4 -> 8."""
    # Not `ceil_div`, as this runs for every row of a stream.
    return -(-value // multiple) * multiple


def block_index(offset: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of the block of `shape` at `offset`. Example: (2, 0), (3, 4) -> 2:5, 0:4."""
    pairs = zip(offset, shape, strict=True)
    return tuple(slice(start, start + length) for start, length in pairs)


def nearest_multiples(value: int, unit: int) -> str:
    """Return the positive multiples of `unit` around `value`, for messages.

    Example: 6, 4 -> `4 or 8`.
    """
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def nearest_divisors(count: int, size: int) -> str:
    """Return the divisors of `count` around `size`, for messages. Example: 6, 4 -> `3 or 6`."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below = [number for number in divisors if number < size]
    above = [number for number in divisors if number > size]
    return " or ".join(map(str, below[-1:] + above[:1]))
