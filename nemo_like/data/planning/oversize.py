"""Preparation of rows for planning: validation, the oversize policy, and rounding up.

A row is oversize if its padded length exceeds the token limit of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.integer_math import round_up
from nemo_like.models.vision import planner_sizes

_MAX_ROWS_SHOWN = 3
"""Maximum number of rows that a message about oversize rows lists."""


class OversizeWarning(UserWarning):
    """A row above the token limit was truncated, dropped, or runs alone."""


@dataclass(frozen=True, eq=False)
class FittedRows:
    """Rows of a batch after the oversize policy: B rows."""

    lengths: np.ndarray
    """int64 [B]: real tokens that remain."""
    padded_lengths: np.ndarray
    """int64 [B]: rounded up to the row multiple."""
    is_dropped: np.ndarray
    """bool [B]"""
    num_truncated: int
    num_oversize: int
    """Rows above the token limit, under any policy."""
    num_trained: np.ndarray | None = None
    """int64 [B]: tokens with loss that remain; None if they are not known."""
    prefixes: SharedPrefixes | None = None
    """Leading tokens that the remaining rows have in common; None: each row is complete."""
    image_tokens: np.ndarray | None = None
    """int64 [B]: tokens of images; None if no row has any."""
    image_work: np.ndarray | None = None
    """float64 [B]: work of the vision tower; None if it is not known."""
    warning: str = ""
    """Which rows were oversize and what happened to them; empty if none were."""

    @classmethod
    def of(cls, counts: TokenCounts, spec: PlanSpec) -> FittedRows:
        """Return rows that the oversize policy leaves as they are."""
        padded = round_up(counts.lengths, spec.row_multiple)
        is_dropped = np.zeros(len(padded), dtype=bool)
        trained, prefixes = counts.num_trained, counts.prefixes
        images = (counts.image_tokens, counts.image_work)
        return cls(counts.lengths, padded, is_dropped, 0, 0, trained, prefixes, *images)

    def sizes(self, spec: PlanSpec) -> np.ndarray:
        """Return what counts of each row for the limit of a microbatch, int64 [B]."""
        if self.image_tokens is None or not spec.image_weight:
            return self.padded_lengths
        return planner_sizes(self.padded_lengths, self.image_tokens, spec.image_weight)

    def truncated(self, lengths: np.ndarray, spec: PlanSpec) -> FittedRows:
        """Return the rows truncated to `lengths` int64 [B], each at most its own."""
        return replace(
            self,
            lengths=lengths,
            padded_lengths=round_up(lengths, spec.row_multiple),
            num_truncated=int((lengths < self.lengths).sum()),
            num_trained=trained_after_truncation(self.num_trained, self.lengths, lengths),
            prefixes=None if self.prefixes is None else self.prefixes.limited(lengths),
        )

    def place(self, bins: Packing, spec: PlanSpec) -> tuple[Packing, np.ndarray, np.ndarray | None]:
        """Bring the rows of each bin (row ids) into the order in which a packed microbatch has
        them: (bins, positions int64 [n], leading tokens computed by earlier rows int64 [n] or None)
        of the n rows.
        """
        if self.prefixes is None:
            return bins, self.padded_lengths[bins.perm], None
        bins, shared = self.prefixes.arrange(bins)
        return bins, round_up(self.lengths[bins.perm] - shared, spec.row_multiple), shared


def step_of_rows(
    num_rows: int, batch_size: int | None, episodes: Sequence[int] | np.ndarray | None = None
) -> np.ndarray:
    """Return the optimizer step of each of B rows, int64 [B]: step s has rows s * batch_size up to
    the next; None: all rows.

    With `episodes` int [B], equal for the rows of an episode, `batch_size` counts episodes in the
    order of their first rows, and each episode is in one step. Raises ValueError for another shape.
    """
    numbers = np.arange(num_rows)
    if episodes is not None:
        _, _, numbers = _numbered("episode", episodes, num_rows)
    return numbers // (batch_size or max(num_rows, 1))


def _numbered(
    name: str, ids: Sequence[int] | np.ndarray, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (ids [B], first row of each different id in their order, number of each row's id).

    Numbers are 0, 1, ... by first row, int64 [B]. Raises ValueError unless ids are [num_rows].
    """
    ids = np.asarray(ids)
    if ids.shape != (num_rows,):
        raise ValueError(f"{name} has one id per row; got shape {ids.shape} for {num_rows} rows")
    # `np.unique` numbers ids by value; they are renumbered by first row, so that the plan does not
    # depend on the ids.
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    number_of = np.empty(len(first), dtype=np.int64)
    number_of[np.argsort(first)] = np.arange(len(first))
    return ids, np.sort(first), number_of[inverse]


def checked_groups(
    groups: Sequence[int] | np.ndarray | None, step_of: np.ndarray, spec: PlanSpec
) -> np.ndarray | None:
    """Number groups 0, 1, ... by their first row, int64 [B].

    `step_of` int64 [B] is from `step_of_rows`. Raises ValueError for a group that cannot be in one
    microbatch: its rows are in two optimizer steps, or more than `spec.max_rows`.
    """
    if groups is None:
        return None
    ids, first, numbers = _numbered("groups", groups, len(step_of))
    crossing = np.flatnonzero(step_of != step_of[first[numbers]])
    if len(crossing):
        first_row = first[numbers[crossing[0]]]
        raise ValueError(
            f"group {ids[first_row]} has rows {first_row} and {crossing[0]}, of two optimizer steps"
            f" of {spec.global_batch_size} rows; keep the rows of a group"
            " together and policy.train_global_batch_size a multiple of the group size"
        )
    counts = np.bincount(numbers)
    if spec.max_rows is not None and len(counts) and counts.max() > spec.max_rows:
        largest = counts.argmax()
        raise ValueError(
            f"group {ids[first[largest]]} has {counts[largest]} rows, more than the"
            f" {spec.max_rows} of a microbatch; raise policy.train_micro_batch_size"
        )
    return numbers


def fit_rows(counts: TokenCounts, groups: np.ndarray | None, spec: PlanSpec) -> FittedRows:
    """Apply `spec.oversize` to rows and groups above the token limit.

    `counts` are checked, `groups` int64 [B] come from `checked_groups`; a group with common
    prefixes counts their tokens once. Raises ValueError if the policy is "error".
    """
    fitted = FittedRows.of(counts, spec)
    if not spec.has_token_limit or len(counts.lengths) == 0:
        return fitted
    lengths, padded = fitted.lengths, fitted.padded_lengths
    # The padded length counts: padding occupies memory like real tokens.
    is_oversize = padded > spec.capacity
    if groups is not None:
        # All rows of a group count as oversize, because they cannot be separated.
        group_tokens = _group_tokens(fitted, groups, spec)
        is_oversize |= group_tokens[groups] > spec.capacity
    if not is_oversize.any():
        return fitted
    message = _oversize_message(lengths, padded, groups, is_oversize, spec)
    if spec.oversize == "error":
        raise ValueError(message)
    if spec.oversize == "truncate":
        truncated = _truncated_lengths(fitted, groups, is_oversize, spec)
        fitted = fitted.truncated(truncated, spec)
    elif spec.oversize == "drop":
        fitted = replace(fitted, is_dropped=is_oversize)
    return replace(fitted, num_oversize=int(is_oversize.sum()), warning=message)


def trained_after_truncation(
    num_trained: np.ndarray | None, lengths: np.ndarray, truncated: np.ndarray
) -> np.ndarray | None:
    """Return the tokens with loss of rows whose `lengths` became `truncated`, int64 [B] each.

    Truncation removes the end of a row, where its trained tokens usually are.
    """
    if num_trained is None:
        return None
    return np.maximum(num_trained - (lengths - truncated), 0)


def group_rows(rows: np.ndarray, groups: np.ndarray | None) -> Packing | None:
    """Return the groups among `rows` int64 [n] as bins of positions in `rows`, by first row.

    `groups` int64 [B] are group ids of all rows of the batch; None without groups.
    """
    if groups is None:
        return None
    ids = groups[rows]
    order = np.argsort(ids, kind="stable")
    # Ids are >= 0, so -1 makes the first row the start of a group.
    starts = np.flatnonzero(np.diff(ids[order], prepend=-1))
    return Packing(order, np.append(starts, len(rows)))


def _group_tokens(fitted: FittedRows, groups: np.ndarray, spec: PlanSpec) -> np.ndarray:
    """Positions of each group in a microbatch of its own, int64 [number of groups]."""
    counts = np.bincount(groups)
    if spec.layout == "padded":
        longest = np.zeros(len(counts), dtype=np.int64)
        np.maximum.at(longest, groups, fitted.padded_lengths)
        return counts * longest
    tokens = np.zeros(len(counts), dtype=np.int64)
    bins = group_rows(np.arange(len(groups)), groups)
    assert bins is not None
    bins, positions, _ = fitted.place(bins, spec)
    np.add.at(tokens, groups[bins.perm], positions)
    return tokens


def _truncated_lengths(
    fitted: FittedRows, groups: np.ndarray | None, is_oversize: np.ndarray, spec: PlanSpec
) -> np.ndarray:
    """Truncate oversize rows; returns the remaining tokens, int64 [B].

    The longest rows of an oversize group are truncated to one common length, the largest multiple
    of the row multiple under which the group fits.
    """
    lengths = fitted.lengths
    limited = np.minimum(lengths, spec.max_row_tokens)
    truncated = np.where(is_oversize, limited, lengths)
    if groups is None:
        return truncated
    for group in np.unique(groups[is_oversize]):
        rows = np.flatnonzero(groups == group)
        bin_offsets = np.array([0, len(rows)])
        # Bisection over the common length in units of the row multiple.
        low = 0
        high = spec.max_row_tokens // spec.row_multiple
        while low < high:
            middle = (low + high + 1) // 2
            limited = np.minimum(truncated[rows], middle * spec.row_multiple)
            padded = round_up(limited, spec.row_multiple)
            tokens = int(padded.sum())
            if spec.layout == "padded":
                tokens = len(rows) * int(padded.max())
            elif fitted.prefixes is not None:
                remaining = truncated.copy()
                remaining[rows] = limited
                candidate = fitted.truncated(remaining, spec)
                tokens = int(candidate.place(Packing(rows, bin_offsets), spec)[1].sum())
            if tokens <= spec.capacity:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            raise ValueError(
                f"rows {', '.join(map(str, rows))} are one group and must share a microbatch, but"
                f" even truncated to {spec.row_multiple} tokens they exceed {_limit_text(spec)}"
            )
        truncated[rows] = np.minimum(truncated[rows], low * spec.row_multiple)
    return truncated


def _oversize_message(
    lengths: np.ndarray,
    padded: np.ndarray,
    groups: np.ndarray | None,
    is_oversize: np.ndarray,
    spec: PlanSpec,
) -> str:
    """Describe the oversize rows, the limit, and what happens to them or how to change it.

    All arrays are [B].
    """
    rows = np.flatnonzero(is_oversize)
    shown = []
    for row in rows[:_MAX_ROWS_SHOWN]:
        rounded = ""
        if padded[row] != lengths[row]:
            rounded = f" ({padded[row]} rounded up to a multiple of {spec.row_multiple})"
        member = ""
        if groups is not None and padded[row] <= spec.capacity:
            member = " in a group that must share a microbatch"
        shown.append(f"row {row} has {lengths[row]} tokens{rounded}{member}")
    num_more = len(rows) - _MAX_ROWS_SHOWN
    more = f" and {num_more} more" if num_more > 0 else ""
    outcomes = {
        "error": f"raise {spec.budget_key}, or set policy.oversize_rows to truncate or singleton",
        "truncate": "they are truncated at the end",
        "singleton": "they run alone, above the budget",
        "drop": "they are left out",
    }
    return f"{'; '.join(shown)}{more}: above {_limit_text(spec)}; {outcomes[spec.oversize]}"


def _limit_text(spec: PlanSpec) -> str:
    """Return the token limit of a microbatch, with the part that its alignment leaves usable."""
    usable = "" if spec.capacity == spec.max_tokens else f" (usable: {spec.capacity})"
    return f"{spec.budget_key} = {spec.max_tokens}{usable}"
