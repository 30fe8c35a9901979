"""Values inside a sample of any nested form: what a DataLoader worker sends, and a checksum."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple

import numpy as np
import torch

_MAX_PIPED_BYTES = 2**17
"""Largest tensor that a worker sends through its pipe."""


class PipedTensor(NamedTuple):
    """A small tensor on its way from a worker, which pickles it as an array."""

    array: np.ndarray


def to_pipe(samples: Any) -> Any:
    """Return samples of a DataLoader worker with small tensors in a form that is pickled.

    A worker otherwise shares each tensor, of any shape and dtype, through a file of its own. For
    the columns of one row that takes longer than to copy them. Mappings, lists and tuples are
    searched; they are not modified.
    """
    return _replaced(samples, _piped)


def from_pipe(sample: Any) -> Any:
    """Return the sample that a worker sent, with memory of its own.

    Each tensor that is still shared holds an open file, and a process may have about 1,000. A
    window of samples with several tensors each would exceed that, so those are copied.
    """
    return _replaced(sample, _own)


def _piped(value: Any) -> Any:
    # A subclass may have more than values.
    if type(value) is not torch.Tensor or value.nbytes > _MAX_PIPED_BYTES:
        return value
    try:
        return PipedTensor(value.detach().numpy())
    except TypeError:
        # NumPy has no such dtype, layout or device. The tensor is shared.
        return value


def _own(value: Any) -> Any:
    if isinstance(value, PipedTensor):
        return torch.from_numpy(value.array)
    if isinstance(value, torch.Tensor) and value.is_shared():
        return value.clone()
    return value


def _replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return a copy of `value` with its leaves replaced."""
    if isinstance(value, MutableMapping):
        # A copy, as the dataset may keep the containers that it returns.
        copied = copy.copy(value)
        for name, inner in value.items():
            copied[name] = _replaced(inner, replace)
        return copied
    if type(value) is list:
        return [_replaced(inner, replace) for inner in value]
    if isinstance(value, tuple) and not isinstance(value, PipedTensor):
        items = [_replaced(inner, replace) for inner in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return replace(value)


def fingerprint(sample: Any) -> int:
    """Return a checksum of the numbers, texts, arrays and tensors in a sample."""
    checksum = 0

    def add(value: Any) -> Any:
        nonlocal checksum
        if isinstance(value, str | bytes | int | float | np.ndarray | torch.Tensor):
            array = np.asarray(value)
            # The bytes of objects are their addresses.
            if array.dtype != object:
                checksum = zlib.crc32(array.tobytes(), checksum)
        return value

    _replaced(sample, add)
    return checksum
