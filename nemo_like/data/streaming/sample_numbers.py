"""Numbers of a sample that a planner needs: its length and its tokens with loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nemo_like.data.streaming.packed_batch import IGNORE_INDEX


@dataclass(frozen=True)
class ColumnLength:
    """Length of one column of a sample, for example of `input_ids`."""

    column: str

    def __call__(self, sample: Any) -> int:
        """Return the number of values of the column. Raises ValueError if it is missing."""
        if not isinstance(sample, Mapping) or self.column not in sample:
            raise ValueError(
                f"a sample of type {type(sample).__name__} has no column {self.column!r}; pass its"
                " name, or a function of a sample that returns its length"
            )
        return len(sample[self.column])


def count_trained(sample: Any) -> int | None:
    """Return the tokens with loss of a sample with `labels`, integers [L], that are not shifted.

    The first one is never predicted, so it does not count. None without `labels`.
    """
    if not isinstance(sample, Mapping) or "labels" not in sample:
        return None
    labels = torch.as_tensor(sample["labels"])
    return int((labels[1:] != IGNORE_INDEX).sum())
