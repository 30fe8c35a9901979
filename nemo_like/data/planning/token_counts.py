"""What the planner needs to know of rows: `TokenCounts`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nemo_like.data.images import RowImage
from nemo_like.data.jagged import EncodedRow, Jagged
from nemo_like.data.packing.packers import Packing, checked_lengths
from nemo_like.data.planning.prefixes import SharedPrefixes


@dataclass(frozen=True, eq=False)
class TokenCounts:
    """Tokens of B rows: all tokens, tokens with loss, and tokens that rows have in common.

    Example: `TokenCounts(np.array([8, 5]), num_trained=np.array([3, 2]))`. `plan_batch` also takes
    plain lengths.
    """

    lengths: np.ndarray
    """int64 [B], each at least 1."""
    num_trained: np.ndarray | None = None
    """int64 [B]: tokens with loss, for which alone the output projection is computed; None: not
    known, and the plan assumes all.
    """
    prefixes: SharedPrefixes | None = None
    """Common leading tokens; None if they are not known, or there are none."""
    image_tokens: np.ndarray | None = None
    """int64 [B]: tokens that are of images; None if no row has any."""
    image_work: np.ndarray | None = None
    """float64 [B]: work of the vision tower, in the unit of the work of the language model; None if
    it is not known."""

    @classmethod
    def of_batch(cls, columns: Mapping[str, Any], *, with_prefixes: bool = True) -> TokenCounts:
        """Count the tokens of a batch by its columns.

        Read are `length` int [B], `token_mask` (for the tokens with loss), and for the prefixes
        `input_ids` and `images` of rows with equal id in `group` int [B], or without it in `pair`
        int [B].
        """
        # Imported here: columns may be tensors, and a plan of lengths does not need torch.
        from nemo_like.data.columns import num_trained_tokens

        groups = columns.get("group", columns.get("pair"))
        images = columns.get("images", ())
        prefixes = None
        if with_prefixes and groups is not None:
            prefixes = SharedPrefixes.of_tokens(groups, columns["input_ids"], images)
        return cls(
            columns["length"], num_trained_tokens(columns), prefixes, count_image_tokens(images)
        )

    def checked(self) -> TokenCounts:
        """Return the counts as int64 arrays.

        Raises ValueError for a length below 1, unless `num_trained` has one integer from 0 to the
        length for each row, and for prefixes of other rows.
        """
        lengths = checked_lengths(self.lengths)
        if self.prefixes is not None:
            self.prefixes.check(lengths)
        num_trained = _checked_trained(self.num_trained, lengths)
        return replace(self, lengths=lengths, num_trained=num_trained)

    def take(self, rows: np.ndarray) -> TokenCounts:
        """Return the counts of some rows, int64 [n] without repetition, in their order."""
        num_trained = None if self.num_trained is None else self.num_trained[rows]
        prefixes = None
        if self.prefixes is not None:
            by_depth, shared = self.prefixes.arrange(Packing(rows, np.array([0, len(rows)])))
            position_of = np.zeros(len(self.lengths), dtype=np.int64)
            position_of[rows] = np.arange(len(rows))
            prefixes = SharedPrefixes(position_of[by_depth.perm], shared)
        image_tokens = None if self.image_tokens is None else self.image_tokens[rows]
        image_work = None if self.image_work is None else self.image_work[rows]
        return TokenCounts(self.lengths[rows], num_trained, prefixes, image_tokens, image_work)

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
            _joined([part.image_tokens for part in parts], parts),
            _joined([part.image_work for part in parts], parts),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, without those that are None."""
        values: dict[str, Any] = {"lengths": self.lengths.tolist()}
        if self.num_trained is not None:
            values["num_trained"] = self.num_trained.tolist()
        if self.prefixes is not None:
            values["prefixes"] = self.prefixes.to_dict()
        if self.image_tokens is not None:
            values["image_tokens"] = self.image_tokens.tolist()
        if self.image_work is not None:
            values["image_work"] = self.image_work.tolist()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TokenCounts:
        """Return the counts that `to_dict` converted; other keys are ignored."""
        trained = values.get("num_trained")
        prefixes = values.get("prefixes")
        image_tokens, image_work = values.get("image_tokens"), values.get("image_work")
        return cls(
            np.array(values["lengths"], dtype=np.int64),
            None if trained is None else np.array(trained, dtype=np.int64),
            None if prefixes is None else SharedPrefixes.from_dict(prefixes),
            None if image_tokens is None else np.array(image_tokens, dtype=np.int64),
            None if image_work is None else np.array(image_work, dtype=np.float64),
        )


def count_tokens(
    rows: Sequence[EncodedRow], groups: Sequence[int] | np.ndarray | None = None
) -> TokenCounts:
    """Count the tokens of B rows, those with loss, and those that rows with equal id in `groups`
    int [B] have in common at their start.
    """
    lengths = [len(row.input_ids) for row in rows]
    num_trained = [row.num_trained for row in rows]
    images = [row.images for row in rows]
    prefixes = None
    if groups is not None and rows:
        input_ids = Jagged.from_rows([row.input_ids for row in rows], np.int32)
        prefixes = SharedPrefixes.of_tokens(groups, input_ids, images)
    return TokenCounts(
        np.array(lengths, dtype=np.int64),
        np.array(num_trained, dtype=np.int64),
        prefixes,
        count_image_tokens(images),
    )


def _joined(values: Sequence[np.ndarray | None], parts: Sequence[TokenCounts]) -> np.ndarray | None:
    """Join the `values` [n] of all parts, 0 in a part without; None if no part has any."""
    known = next((own for own in values if own is not None), None)
    if known is None:
        return None
    return np.concatenate(
        [
            np.zeros(len(part.lengths), dtype=known.dtype) if own is None else own
            for part, own in zip(parts, values, strict=True)
        ]
    )


def count_image_tokens(images: Sequence[Sequence[RowImage]]) -> np.ndarray | None:
    """Return the image tokens of rows with `images` each, int64 [B]; None without any image."""
    counts = [sum(image.num_tokens for image in row) for row in images]
    return np.array(counts, dtype=np.int64) if any(counts) else None


def _checked_trained(
    num_trained: Sequence[int] | np.ndarray | None, lengths: np.ndarray
) -> np.ndarray | None:
    """Return `num_trained` as int64 [B]; see `TokenCounts.checked`. `lengths` is int64 [B]."""
    if num_trained is None:
        return None
    counts = np.asarray(num_trained)
    if counts.shape != lengths.shape or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(
            f"num_trained has one integer per row; got {counts.dtype} of shape {counts.shape} for"
            f" {len(lengths)} rows"
        )
    wrong = np.flatnonzero((counts < 0) | (counts > lengths))
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"num_trained of row {row} is {counts[row]}; it is from 0 to its {lengths[row]} tokens"
        )
    return counts.astype(np.int64)
