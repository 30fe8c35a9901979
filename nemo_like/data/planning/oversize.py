"""Rows made ready to be placed: checked, cut or set aside where they exceed the cap, rounded up,
and tied into groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.spec import PlanSpec


class OversizeWarning(UserWarning):
    """A row above the token cap was cut, left out, or runs alone."""


@dataclass(frozen=True, eq=False)
class FittedRows:
    """What the cap leaves of a batch of B rows."""

    lengths: np.ndarray
    """int64 [B]: real tokens kept."""
    padded_lengths: np.ndarray
    """int64 [B]: rounded up to the row multiple."""
    is_dropped: np.ndarray
    """bool [B]"""
    num_truncated: int
    num_oversize: int
    """Rows that were above the cap, whatever was done with them."""


def checked_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """`lengths` as int64 [B]; raises ValueError unless they are one list of integers >= 1."""
    values = np.asarray(lengths)
    if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are one list of integers; got {values.dtype} of shape {values.shape}"
        )
    values = values.astype(np.int64)
    if len(values) and values.min() < 1:
        row = int(values.argmin())
        raise ValueError(f"row {row} has length {values[row]}; a row has at least one token")
    return values


def checked_groups(
    groups: Sequence[int] | np.ndarray | None, num_rows: int, spec: PlanSpec
) -> np.ndarray | None:
    """Groups numbered 0, 1, ... by first row, int64 [B]; raises ValueError where one cannot stay in
    one microbatch.
    """
    if groups is None:
        return None
    ids = np.asarray(groups)
    if ids.shape != (num_rows,):
        raise ValueError(f"groups has one id per row; got shape {ids.shape} for {num_rows} rows")
    _, first, inverse, counts = np.unique(
        ids, return_index=True, return_inverse=True, return_counts=True
    )
    rank_of = np.empty(len(first), dtype=np.int64)
    rank_of[np.argsort(first)] = np.arange(len(first))
    if spec.global_batch_size is not None:
        last = np.zeros(len(first), dtype=np.int64)
        np.maximum.at(last, inverse, np.arange(num_rows))
        crossing = np.flatnonzero(first // spec.global_batch_size != last // spec.global_batch_size)
        if len(crossing):
            group = crossing[0]
            raise ValueError(
                f"group {ids[first[group]]} has rows {first[group]} and {last[group]}, of two"
                f" optimizer steps of "
                f"{spec.global_batch_size} rows; keep the rows of a group together and"
                f" policy.train_global_batch_size "
                "a multiple of the group size"
            )
    if spec.max_rows is not None and len(counts) and counts.max() > spec.max_rows:
        raise ValueError(
            f"group {ids[first[counts.argmax()]]} has {counts.max()} rows, more than the"
            f" {spec.max_rows} of a "
            "microbatch; raise policy.train_micro_batch_size"
        )
    return rank_of[inverse]


def fit_rows(lengths: np.ndarray, groups: np.ndarray | None, spec: PlanSpec) -> FittedRows:
    """Apply `spec.oversize` to rows (and groups) above the cap. Raises ValueError by that policy,
    else warns.
    """
    padded = round_up_all(lengths, spec.row_multiple)
    nothing = np.zeros(len(lengths), dtype=bool)
    if spec.capacity is None or len(lengths) == 0:
        return FittedRows(lengths, padded, nothing, 0, 0)
    is_over = padded > spec.capacity
    if groups is not None:
        is_over |= _group_tokens(padded, groups, spec)[groups] > spec.capacity
    if not is_over.any():
        return FittedRows(lengths, padded, nothing, 0, 0)
    message = _oversize_message(lengths, padded, groups, is_over, spec)
    if spec.oversize == "error":
        raise ValueError(message)
    warnings.warn(message, OversizeWarning, stacklevel=3)
    num_oversize = int(is_over.sum())
    if spec.oversize == "truncate":
        kept = _truncated(lengths, groups, is_over, spec)
        return FittedRows(
            kept,
            round_up_all(kept, spec.row_multiple),
            nothing,
            int((kept < lengths).sum()),
            num_oversize,
        )
    return FittedRows(
        lengths, padded, is_over if spec.oversize == "drop" else nothing, 0, num_oversize
    )


def group_rows(rows: np.ndarray, groups: np.ndarray | None) -> Packing | None:
    """The groups among `rows` as bins of positions of `rows`, by first appearance; None without
    groups.
    """
    if groups is None:
        return None
    ids = groups[rows]
    order = np.argsort(ids, kind="stable")
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    return Packing(order, np.append(starts, len(rows)))


def round_up_all(lengths: np.ndarray, multiple: int) -> np.ndarray:
    """Each of `lengths` rounded up to a multiple."""
    return -(-lengths // multiple) * multiple


def _group_tokens(padded: np.ndarray, groups: np.ndarray, spec: PlanSpec) -> np.ndarray:
    """Positions each group needs in a microbatch of its own, int64 [number of groups]."""
    counts = np.bincount(groups)
    if spec.layout == "padded":
        longest = np.zeros(len(counts), dtype=np.int64)
        np.maximum.at(longest, groups, padded)
        return counts * longest
    tokens = np.zeros(len(counts), dtype=np.int64)
    np.add.at(tokens, groups, padded)
    return tokens


def _truncated(
    lengths: np.ndarray, groups: np.ndarray | None, is_over: np.ndarray, spec: PlanSpec
) -> np.ndarray:
    """Tokens kept of each row: the longest rows of a group are cut, to one length, so that the
    group fits.
    """
    kept = np.where(is_over, np.minimum(lengths, spec.max_row_tokens), lengths)
    if groups is None:
        return kept
    for group in np.unique(groups[is_over]):
        rows = np.flatnonzero(groups == group)
        low, high = 0, spec.max_row_tokens // spec.row_multiple
        while low < high:  # the longest common cut, in row multiples, under which the group fits
            middle = (low + high + 1) // 2
            padded = round_up_all(
                np.minimum(kept[rows], middle * spec.row_multiple), spec.row_multiple
            )
            tokens = int(padded.sum()) if spec.layout == "packed" else len(rows) * int(padded.max())
            low, high = (middle, high) if tokens <= (spec.capacity or 0) else (low, middle - 1)
        if low == 0:
            raise ValueError(
                f"rows {', '.join(map(str, rows))} are one group and must share a microbatch, but"
                f" even cut to "
                f"{spec.row_multiple} tokens they exceed {spec.budget_key} = {spec.max_tokens}"
            )
        kept[rows] = np.minimum(kept[rows], low * spec.row_multiple)
    return kept


def _oversize_message(
    lengths: np.ndarray,
    padded: np.ndarray,
    groups: np.ndarray | None,
    is_over: np.ndarray,
    spec: PlanSpec,
) -> str:
    rows = np.flatnonzero(is_over)
    shown = []
    for row in rows[:3]:
        rounded = (
            f" ({padded[row]} rounded up to a multiple of {spec.row_multiple})"
            if padded[row] != lengths[row]
            else ""
        )
        member = (
            " in a group that must share a microbatch"
            if groups is not None and padded[row] <= (spec.capacity or 0)
            else ""
        )
        shown.append(f"row {row} has {lengths[row]} tokens{rounded}{member}")
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    usable = f" (usable: {spec.capacity})" if spec.capacity != spec.max_tokens else ""
    done = {
        "error": f"raise {spec.budget_key}, or set policy.oversize_rows to truncate or singleton",
        "truncate": "their ends are cut off",
        "singleton": "they run alone, above the budget",
        "drop": "they are left out",
    }[spec.oversize]
    return f"{'; '.join(shown)}{more}: above {spec.budget_key} = {spec.max_tokens}{usable}; {done}"
