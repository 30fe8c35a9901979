"""The interpolations `${add:a,b}`, `${mul:a,b}` and `${div:a,b}`, which NeMo RL's configs use;
arguments may be nested.

Sums and products of integers are integers, and so is a quotient without remainder. Anything but a
finite number is an error.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf

Number = int | float
_MAX_DIGITS = 30
"""Digits of the largest integer that is computed with; no key needs as many."""


def register_arithmetic() -> None:
    """Make the interpolations known to OmegaConf; calling it again changes nothing."""
    for name, operation in (("add", operator.add), ("mul", operator.mul), ("div", _quotient)):
        OmegaConf.register_new_resolver(name, _resolver(name, operation), replace=True)


def _resolver(name: str, operation: Callable[[Any, Any], Number]) -> Callable[..., Number]:
    def resolve(*arguments: Any) -> Number:
        texts = [str(argument)[:_MAX_DIGITS] for argument in arguments]
        shown = f"${{{name}:{','.join(texts)}}}"
        if len(arguments) != 2:
            raise ValueError(f"{shown} has {len(arguments)} arguments, and takes two numbers")
        for argument, text in zip(arguments, texts, strict=True):
            # bool is a subclass of int, and `true` is no number for a user.
            is_number = isinstance(argument, int | float) and not isinstance(argument, bool)
            # Written so that NaN is refused as well: every comparison with it is False.
            if not is_number or not abs(argument) < 10**_MAX_DIGITS:
                raise ValueError(
                    f"{shown} takes two finite numbers, but {text!r} is not a finite number"
                )
        if name == "div" and arguments[1] == 0:
            raise ValueError(f"{shown} divides by zero")
        result = operation(*arguments)
        if not math.isfinite(result):
            raise ValueError(f"{shown} is not finite")
        return result

    return resolve


def _quotient(left: Number, right: Number) -> Number:
    # An integer key such as a batch size would refuse the float 4.0.
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right
