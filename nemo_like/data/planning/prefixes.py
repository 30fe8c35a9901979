"""Leading tokens that rows have in common, as a forest: which rows share how much of their start.

A microbatch computes the tokens of such a start once. The forest is an array of longest common
prefixes (LCP): rows in depth-first order, each with the leading tokens that it shares with the row
before it. The LCP of any two rows is the minimum of these numbers between them, so that every
subset of rows, in the same order, is a forest as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from nemo_like.data.images import ImageRef, RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.data.packing.packers import Packing

SharedPrefixMode = Literal["auto", True, False]
MIN_SHARED_WORK = 0.03
"""Share of work that shared prefixes must save for the mode `auto` to use them."""


@dataclass(frozen=True, eq=False)
class SharedPrefixes:
    """Common leading tokens of the B rows of a batch. A value: equal by content.

    Example: rows [1, 2, 3], [4, 5] and [1, 2, 6] are `order=[0, 2, 1]` and `shared=[0, 2, 0]`: rows
    0 and 2 are a tree with two common tokens, row 1 is a tree of its own.
    """

    order: np.ndarray
    """int64 [B]: all rows; those with common leading tokens are adjacent (depth-first order)."""
    shared: np.ndarray
    """int64 [B]: leading tokens that row `order[j]` has in common with row `order[j - 1]`; 0 is the
    start of a tree.
    """

    @classmethod
    def of_groups(
        cls, groups: Sequence[int] | np.ndarray, prefix_lengths: Sequence[int] | np.ndarray
    ) -> SharedPrefixes:
        """Two rows with equal id in `groups` int [B] share the smaller of their two
        `prefix_lengths` int [B], the tokens of their prompts; other rows share nothing.
        """
        prefixes = np.asarray(prefix_lengths, dtype=np.int64)
        _, first, inverse = np.unique(np.asarray(groups), return_index=True, return_inverse=True)
        # Groups by their first row, in a group the longest prefix first: then a row shares exactly
        # its own prefix with the row before it.
        first_of = first[inverse]
        order = np.lexsort((-prefixes, first_of))
        is_start = np.diff(first_of[order], prepend=-1) != 0
        return cls(order, np.where(is_start, 0, prefixes[order]))

    @classmethod
    def of_tokens(
        cls,
        groups: Sequence[int] | np.ndarray,
        input_ids: Jagged,
        images: Sequence[Sequence[RowImage]] = (),
    ) -> SharedPrefixes:
        """Compare the tokens of rows with equal id in `groups` int [B]; exact, at any depth.

        Rows of different groups are not compared. `input_ids` has B rows of integers, and `images`
        has the images of each of them, or is empty. Tokens of different images are different,
        whatever their ids.
        """
        input_ids = _with_image_ids(input_ids, images)
        _, first, inverse = np.unique(np.asarray(groups), return_index=True, return_inverse=True)
        first_of = first[inverse]
        # Groups by their first row, rows of a group in the order of the batch.
        order = np.argsort(first_of, kind="stable")
        starts = np.flatnonzero(np.diff(first_of[order], prepend=-1))
        shared = np.zeros(len(order), dtype=np.int64)
        for start, stop in pairwise([*starts.tolist(), len(order)]):
            # Bytes are compared without conversion. Their order differs from that of the ids, but
            # rows with the same start are adjacent in either. One group at a time, for memory.
            keys = {row: input_ids[row].tobytes() for row in order[start:stop].tolist()}
            order[start:stop] = sorted(keys, key=keys.__getitem__)
            for j in range(start + 1, stop):
                shared[j] = _num_common(input_ids[order[j - 1]], input_ids[order[j]])
        return cls(order, shared)

    @cached_property
    def position_of(self) -> np.ndarray:
        """Position of each row in `order`, int64 [B]."""
        position_of = np.empty_like(self.order)
        position_of[self.order] = np.arange(len(self.order))
        return position_of

    def common(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Leading tokens that the rows at two positions in `order` have in common, int64 [n].

        `first` and `last` are int64 [n], `first < last`.
        """
        # The minimum over (first, last] is that of two windows of a power of two.
        width_exponent = np.log2(last - first).astype(np.int64)
        level = np.minimum(width_exponent, len(self._minima) - 1)
        return np.minimum(
            self._minima[level, first + 1], self._minima[level, last + 1 - (1 << width_exponent)]
        )

    def arrange(self, bins: Packing) -> tuple[Packing, np.ndarray]:
        """Sort the rows of each bin depth-first: (bins of rows, int64 [n] leading tokens that each
        of the rows shares with the one before it in its bin).
        """
        bin_of = np.repeat(np.arange(bins.num_bins), np.diff(bins.offsets))
        positions = self.position_of[bins.perm]
        by_position = np.argsort(bin_of * len(self.order) + positions)
        positions = positions[by_position]
        shared = np.zeros(len(positions), dtype=np.int64)
        inner = np.flatnonzero(np.diff(bin_of) == 0) + 1
        shared[inner] = self.common(positions[inner - 1], positions[inner])
        return Packing(bins.perm[by_position], bins.offsets), shared

    def limited(self, lengths: np.ndarray) -> SharedPrefixes:
        """Return the forest of the rows truncated to `lengths` int64 [B]."""
        own = lengths[self.order]
        # The first row of which the truncated row is a prefix, up to itself, by binary steps.
        first = np.arange(len(own))
        for level in reversed(range(len(self._minima) - 1)):
            start = np.maximum(first + 1 - (1 << level), 0)
            is_prefix = (first >= 1 << level) & (self._minima[level, start] >= own)
            first = np.where(is_prefix, first - (1 << level), first)
        # A prefix is before all rows that continue it, so that the order is depth-first again.
        positions = np.lexsort((own, first))
        shared = np.zeros(len(own), dtype=np.int64)
        neighbors = np.sort(np.stack([positions[:-1], positions[1:]]), axis=0)
        remaining = np.minimum(own[positions[:-1]], own[positions[1:]])
        shared[1:] = np.minimum(self.common(*neighbors), remaining)
        return SharedPrefixes(self.order[positions], shared)

    def check(self, lengths: np.ndarray) -> None:
        """Raise ValueError unless this is a forest of rows of `lengths` int64 [B]."""
        if not np.array_equal(np.sort(self.order), np.arange(len(lengths))):
            raise ValueError(f"prefixes.order has each of the {len(lengths)} rows once")
        if self.shared.shape != self.order.shape:
            raise ValueError(
                f"prefixes.shared has one number per row; got {self.shared.shape} for"
                f" {len(lengths)} rows"
            )
        own = lengths[self.order]
        limits = np.minimum(own, np.concatenate([[0], own[:-1]]))
        wrong = np.flatnonzero((self.shared < 0) | (self.shared > limits))
        if len(wrong):
            j = wrong[0]
            raise ValueError(
                f"row {self.order[j]} shares {self.shared[j]} leading tokens with the row before it"
                f" in prefixes.order; it is from 0 to {limits[j]}, the shorter of both"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"order": self.order.tolist(), "shared": self.shared.tolist()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SharedPrefixes:
        """Return the prefixes that `to_dict` converted."""
        return cls(*(np.asarray(values[name], dtype=np.int64) for name in ("order", "shared")))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SharedPrefixes):
            return NotImplemented
        is_same_order = np.array_equal(self.order, other.order)
        return is_same_order and np.array_equal(self.shared, other.shared)

    def __hash__(self) -> int:
        return hash((self.order.tobytes(), self.shared.tobytes()))

    @cached_property
    def _minima(self) -> np.ndarray:
        """Minima of `shared` over windows of 1, 2, 4, ... rows by first row, int64 [levels, B + 1].

        The last level is 0: no tree is so large.
        """
        levels = [np.append(self.shared, 0)]
        while levels[-1].any():
            last = levels[-1]
            width = 1 << (len(levels) - 1)
            # Beyond the end there is no row, as if another tree began.
            later = np.concatenate([last[width:], np.zeros(min(width, len(last)), last.dtype)])
            levels.append(np.minimum(last, later))
        return np.stack(levels)


def _with_image_ids(input_ids: Jagged, images: Sequence[Sequence[RowImage]]) -> Jagged:
    """Return ids [T] with the number of an image below 0 in the place of the ids of its tokens."""
    if not any(images):
        return input_ids
    numbers: dict[tuple[ImageRef, tuple[int, int, int]], int] = {}
    values = input_ids.values.astype(np.int64)
    for start, row in zip(input_ids.offsets, images, strict=False):
        for image in row:
            number = numbers.setdefault((image.image, image.grid), -1 - len(numbers))
            values[start + image.start : start + image.end] = number
    return Jagged(values, input_ids.offsets)


def _num_common(first: np.ndarray, second: np.ndarray) -> int:
    """Number of leading values that two arrays have in common."""
    length = min(len(first), len(second))
    is_different = first[:length] != second[:length]
    return int(is_different.argmax()) if is_different.any() else length
