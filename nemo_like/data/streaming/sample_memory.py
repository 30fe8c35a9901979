"""Memory of samples: their size, and their way from a DataLoader worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

_NUMBER_BYTES = 32
"""Approximate size of a Python number."""
_MAX_PIPED_BYTES = 2**17
"""Largest tensor that a worker sends through its pipe."""
_ARRAY_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
}
"""Dtypes that NumPy has; tensors of others are shared."""


def num_bytes(sample: Any) -> int:
    """Return the approximate memory of a sample, without the overhead of containers.

    Tensors of any shape and dtype, NumPy arrays, strings and numbers in nested mappings, lists and
    tuples are counted. Other objects count as one number.
    """
    if isinstance(sample, torch.Tensor):
        return sample.numel() * sample.element_size()
    if isinstance(sample, np.ndarray):
        return sample.nbytes
    if isinstance(sample, (bytes, bytearray, str)):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(map(num_bytes, sample.values()))
    if isinstance(sample, (list, tuple)):
        return sum(map(num_bytes, sample))
    return _NUMBER_BYTES


class PipedTensor:
    """A small tensor on its way from a worker, which pickles it as an array."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        """Values of any shape."""


def to_pipe(sample: Any) -> Any:
    """Return the sample of a DataLoader worker with small tensors in a form that is pickled.

    A worker otherwise shares each tensor, of any shape and dtype, through a file of its own. For
    the columns of one row that takes longer than to copy them. Mappings, lists and tuples are
    searched; they are not modified.
    """
    return _replaced(sample, _piped)


def from_pipe(sample: Any) -> Any:
    """Return the sample that a worker sent, with memory of its own.

    Each tensor that is still shared holds an open file, and a process may have about 1,000. A
    window of samples with several tensors each would exceed that, so those are copied.
    """
    return _replaced(sample, _own)


def _piped(value: Any) -> Any:
    """Return a tensor of any shape and dtype as a PipedTensor if it is small."""
    if not isinstance(value, torch.Tensor):
        return value
    is_plain = type(value) is torch.Tensor and value.layout == torch.strided
    is_small = value.numel() * value.element_size() <= _MAX_PIPED_BYTES
    if not (is_plain and is_small and value.device.type == "cpu" and value.dtype in _ARRAY_DTYPES):
        return value
    return PipedTensor(value.detach().contiguous().numpy())


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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_replaced(inner, replace) for inner in value])
    if type(value) is tuple:
        return tuple(_replaced(inner, replace) for inner in value)
    return replace(value)
