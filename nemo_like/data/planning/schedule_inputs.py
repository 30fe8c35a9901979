"""Arguments of the joint scheduler: checks, work of the rows, and items by decreasing work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np

from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.local_search import Items
from nemo_like.parallel_layout import Sync


def check_settings(counts: dict[str, int], sync: str, effort: float) -> None:
    """Raise ValueError for a setting out of range."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is an integer >= 1; got {value}")
    if sync not in get_args(Sync):
        raise ValueError(f"sync is one of {', '.join(get_args(Sync))}; got {sync!r}")
    if not effort >= 0:
        raise ValueError(f"effort is a number >= 0; got {effort}")


def checked_work(work: CostModel | np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
    """Work of each row, float64 [n]; raises ValueError unless finite and >= 0."""
    if work is None:
        return CostModel().of(lengths)
    if isinstance(work, CostModel):
        return work.of(lengths)
    array = np.asarray(work, dtype=np.float64)
    if array.shape != lengths.shape:
        raise ValueError(
            f"work has shape {array.shape} but there are {len(lengths)} rows; give one number per"
            f" row"
        )
    is_valid = np.isfinite(array) & (array >= 0)
    if not is_valid.all():
        row = int(np.flatnonzero(~is_valid)[0])
        raise ValueError(f"row {row} has work {array[row]}; work is a finite number >= 0")
    return array


def sorted_items(
    groups: Sequence[int] | np.ndarray | None, lengths: np.ndarray, work: np.ndarray
) -> tuple[np.ndarray, Items]:
    """Number rows or groups by decreasing work: (item of each row, int64 [n]; the items)."""
    if groups is None:
        order = np.argsort(-work, kind="stable")
        return inverse_permutation(order), Items(lengths[order], work[order])
    groups = np.asarray(groups)
    if groups.shape != lengths.shape:
        raise ValueError(
            f"groups has shape {groups.shape} but there are {len(lengths)} rows; give one group id"
            f" per row"
        )
    # Some NumPy versions return the inverse in the shape of the input.
    _, inverse = np.unique(groups, return_inverse=True)
    ids = inverse.reshape(-1)
    tokens = np.bincount(ids, lengths).astype(np.int64)
    group_work = np.bincount(ids, work)
    order = np.argsort(-group_work, kind="stable")
    item_of_group = inverse_permutation(order)
    return item_of_group[ids], Items(tokens[order], group_work[order])


def check_token_limit(
    item_of: np.ndarray, tokens: np.ndarray, max_tokens: int, has_groups: bool
) -> None:
    """Raise ValueError for an item above `max_tokens`; `tokens` int64 are those of the items.

    `item_of` is int64 [n], `tokens` int64 [number of items].
    """
    if tokens.max() <= max_tokens:
        return
    rows = np.flatnonzero(item_of == tokens.argmax()).tolist()
    name = f"row {rows[0]}"
    if has_groups and len(rows) > 1:
        name = f"the group of rows {rows}"
    raise ValueError(
        f"{name} has {tokens.max()} tokens, above max_tokens={max_tokens}; raise the limit or"
        f" shorten it"
    )


def inverse_permutation(order: np.ndarray) -> np.ndarray:
    """Position of each index in the permutation `order` int64 [n], int64 [n]."""
    positions = np.empty(len(order), dtype=np.int64)
    positions[order] = np.arange(len(order))
    return positions
