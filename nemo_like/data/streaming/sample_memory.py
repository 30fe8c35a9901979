"""Size and ownership of the memory of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch

Sample = TypeVar("Sample")

_NUMBER_BYTES = 32
"""Approximate size of a Python number."""


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


def without_shared_memory(sample: Sample) -> Sample:
    """Return the sample with copies of the tensors that a DataLoader worker shares.

    Each shared tensor, of any shape and dtype, holds an open file, and a process may have about
    1,000. A window of samples with several tensors each would exceed that. Mappings, lists and
    tuples are searched.
    """
    return _copied(sample)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.is_shared() else value
    if isinstance(value, dict):
        # In place, so that subclasses of dict stay what they are. The worker sent the sample, so no
        # one else has it.
        for name, inner in value.items():
            value[name] = _copied(inner)
        return value
    if isinstance(value, list):
        value[:] = map(_copied, value)
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_copied, value))
    if type(value) is tuple:
        return tuple(map(_copied, value))
    return value
