"""The factor by which a batch size scales the learning rate.

Sources: linear, Goyal et al. 2017 (arXiv:1706.02677); square root, Krizhevsky 2014
(arXiv:1404.5997).
"""

from __future__ import annotations

import math
from typing import Literal

Method = Literal["linear", "sqrt", "none"]


def batch_size_scale(batch_size: float, base_batch_size: float, method: Method) -> float:
    """Return the factor of the learning rate for a batch size, both in the same unit.

    `linear` is batch_size / base_batch_size, `sqrt` its square root, `none` 1. Raises ValueError
    for a batch size of 0 or less and for an unknown method.
    """
    for name, value in (("batch_size", batch_size), ("base_batch_size", base_batch_size)):
        if not value > 0:
            raise ValueError(f"{name} is {value}: give a number above 0")
    if method == "linear":
        return batch_size / base_batch_size
    if method == "sqrt":
        return math.sqrt(batch_size / base_batch_size)
    if method == "none":
        return 1.0
    raise ValueError(f"method is {method!r}: give linear, sqrt or none")
