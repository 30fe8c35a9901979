"""Integer division rounded up, and the multiples and divisors around a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Integers = TypeVar("Integers", int, "np.ndarray")


def ceil_div(value: Integers, divisor: int) -> Integers:
    """Divide integers, of any array shape, by a positive `divisor`, rounding up.

    Example: 7, 4 -> 2.
    """
    # Floor division rounds down for either sign, so negating twice rounds up, in exact integers.
    return -(-value // divisor)


def round_up(value: Integers, multiple: int) -> Integers:
    """Round integers, of any array shape, up to multiples of `multiple`. Example: 7, 4 -> 8."""
    return ceil_div(value, multiple) * multiple


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
