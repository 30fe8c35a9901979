"""What a plan needs to know of rows: their tokens, those with loss, and those in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from nemo_like.data.jagged import EncodedRow, Jagged
from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.spec import PlanSpec


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Tokens of B rows."""

    lengths: np.ndarray
    """int64 [B]"""
    num_trained: np.ndarray | None = None
    """int64 [B]: tokens with loss; None if they are not known."""
    prefixes: SharedPrefixes | None = None
    """Common leading tokens; None if they are not known, or there are none."""

    def take(self, rows: np.ndarray) -> TokenCounts:
        """Return the counts of some rows, int64 [n] without repetition, in their order."""
        num_trained = None if self.num_trained is None else self.num_trained[rows]
        prefixes = None
        if self.prefixes is not None:
            by_depth, shared = self.prefixes.arrange(Packing(rows, np.array([0, len(rows)])))
            position_of = np.zeros(len(self.lengths), dtype=np.int64)
            position_of[rows] = np.arange(len(rows))
            prefixes = SharedPrefixes(position_of[by_depth.perm], shared)
        return TokenCounts(self.lengths[rows], num_trained, prefixes)

    def in_trees(self) -> Packing:
        """Return bins of rows with common leading tokens; other rows are bins of their own."""
        if self.prefixes is None:
            return Packing(np.arange(len(self.lengths)), np.arange(len(self.lengths) + 1))
        starts = np.flatnonzero(self.prefixes.shared == 0)
        return Packing(self.prefixes.order, np.append(starts, len(self.lengths)))

    @staticmethod
    def concat(parts: Sequence[TokenCounts]) -> TokenCounts:
        """Concatenate the rows of all parts; what a part does not know is None in the result.

        Prefixes exist if any part has them; rows of different parts have nothing in common.
        """
        trained = [part.num_trained for part in parts if part.num_trained is not None]
        order = []
        shared = []
        first = 0
        for part in parts:
            num_rows = len(part.lengths)
            own = part.prefixes or SharedPrefixes(np.arange(num_rows), np.zeros(num_rows, np.int64))
            order.append(first + own.order)
            shared.append(own.shared)
            first += num_rows
        prefixes = None
        if any(part.prefixes is not None for part in parts):
            prefixes = SharedPrefixes(np.concatenate(order), np.concatenate(shared))
        return TokenCounts(
            np.concatenate([part.lengths for part in parts]),
            np.concatenate(trained) if len(trained) == len(parts) else None,
            prefixes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without those that are None."""
        values: dict[str, Any] = {"lengths": self.lengths.tolist()}
        if self.num_trained is not None:
            values["num_trained"] = self.num_trained.tolist()
        if self.prefixes is not None:
            values["prefixes"] = self.prefixes.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TokenCounts:
        """Return the counts that `to_dict` converted; other keys are ignored."""
        trained = values.get("num_trained")
        prefixes = values.get("prefixes")
        return cls(
            np.array(values["lengths"], dtype=np.int64),
            None if trained is None else np.array(trained, dtype=np.int64),
            None if prefixes is None else SharedPrefixes.from_dict(prefixes),
        )


SharedPrefixMode = Literal["auto", True, False]
MIN_SHARED_WORK = 0.03
"""Share of work that shared prefixes must save for `policy.shared_prefix=auto` to use them."""


def plan_counts(
    counts: TokenCounts,
    spec: PlanSpec,
    shared_prefix: SharedPrefixMode,
    groups: np.ndarray | None = None,
) -> BatchPlan:
    """Plan rows, with their common leading tokens if `policy.shared_prefix` and layout allow it.

    Rows with equal id in `groups` int [B] share a microbatch. Raises ValueError; see `plan_batch`.
    """
    lengths, num_trained = counts.lengths, counts.num_trained
    if counts.prefixes is not None and shared_prefix is not False and spec.layout == "packed":
        plan = plan_batch(lengths, spec, groups, num_trained, counts.prefixes)
        saved = plan.metrics()["packing/shared_work_share"]
        if shared_prefix is True or saved >= MIN_SHARED_WORK:
            return plan
    return plan_batch(lengths, spec, groups, num_trained)


def count_tokens(
    rows: Sequence[EncodedRow], groups: Sequence[int] | np.ndarray | None = None
) -> TokenCounts:
    """Count the tokens of B rows, those with loss, and those that rows with equal id in `groups`
    int [B] have in common at their start.
    """
    lengths = [len(row.input_ids) for row in rows]
    num_trained = [row.num_trained for row in rows]
    prefixes = None
    if groups is not None and rows:
        input_ids = Jagged.from_rows([row.input_ids for row in rows], np.int32)
        prefixes = SharedPrefixes.of_tokens(groups, input_ids)
    return TokenCounts(
        np.array(lengths, dtype=np.int64), np.array(num_trained, dtype=np.int64), prefixes
    )
