"""Bin packers: which rows share a bin of `bin_capacity` tokens. They know nothing of ranks or
steps: that is `plan`.

All are O(n log n) or better and pure functions of the lengths (and a seed). "Decreasing" means
longest first, rows of equal length in their given order. Rows within a bin, and bins, are in the
order in which they were placed and opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from time import perf_counter

import numpy as np

from nemo_like.data.packing import packers
from nemo_like.data.packing.metrics import PackingMetrics
from nemo_like.data.packing.packers import Packing


class PackingAlgorithm(StrEnum):
    """The packers by name; names are matched without regard to case."""

    BEST_FIT_DECREASING = "best_fit_decreasing"
    """The fullest bin with room. The fewest bins in practice, and the fastest."""
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    """The first bin with room."""
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    """Johnson and Garey's five phases: pairs for the bins of rows above half the capacity, then
    first fit decreasing.
    """
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    """The first bin with room, rows in a random order from the seed."""
    CONCATENATIVE = "concatenative"
    """Rows in their given order; a bin is closed by the first row that does not fit (next fit)."""
    BALANCED = "balanced"
    """As few bins as best fit decreasing, each row longest first to the least loaded of them."""

    @classmethod
    def _missing_(cls, value: object) -> PackingAlgorithm:
        name = str(value).lower()
        if name in cls._value2member_map_:
            return cls(name)
        close = get_close_matches(name, list(cls), n=1)
        hint = f"; did you mean {str(close[0])!r}?" if close else ""
        raise ValueError(
            f"{value!r} is no packing algorithm{hint} policy.sequence_packing.algorithm is one of"
            f" {', '.join(cls)}"
        )


_PACKERS: dict[PackingAlgorithm, Callable[[np.ndarray, int, int, int], Packing]] = {
    PackingAlgorithm.BEST_FIT_DECREASING: packers.best_fit_decreasing,
    PackingAlgorithm.FIRST_FIT_DECREASING: packers.first_fit_decreasing,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: packers.modified_first_fit_decreasing,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: packers.first_fit_shuffle,
    PackingAlgorithm.CONCATENATIVE: packers.concatenative,
    PackingAlgorithm.BALANCED: packers.balanced,
}


@dataclass(frozen=True, kw_only=True)
class SequencePacker:
    """A packer with its settings; see `get_packer`. `pack` is a pure function: the same lengths
    give the same bins.
    """

    algorithm: PackingAlgorithm
    bin_capacity: int
    min_bin_count: int | None = None
    bin_count_multiple: int | None = None
    max_items: int | None = None
    pad_multiple: int = 1
    seed: int = 0
    metrics: PackingMetrics | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("bin_capacity", 1),
            ("min_bin_count", 0),
            ("bin_count_multiple", 1),
            ("pad_multiple", 1),
        ):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is an integer >= {least}; got {value}")
        if self.max_items is not None and self.max_items < 1:
            raise ValueError(f"max_items is an integer >= 1 or None; got {self.max_items}")

    def pack(self, sequence_lengths: Sequence[int] | np.ndarray) -> list[list[int]]:
        """The row indices of each bin, as lists. Raises ValueError as `pack_csr` does."""
        start = perf_counter()
        bins = self.pack_csr(sequence_lengths).bins()
        if self.metrics is not None:
            self.metrics.update(sequence_lengths, bins, self.bin_capacity, perf_counter() - start)
        return bins

    def pack_csr(self, sequence_lengths: Sequence[int] | np.ndarray) -> Packing:
        """The bins as arrays. Raises ValueError for a length below 1 or (rounded up) above the
        capacity, and for fewer rows than bins asked.
        """
        lengths = self._occupied(sequence_lengths)
        max_items = self.max_items or max(len(lengths), 1)
        packing = _PACKERS[self.algorithm](lengths, self.bin_capacity, max_items, self.seed)
        target = self._num_bins(max(packing.num_bins, self.min_bin_count or 0))
        if target > len(lengths):
            raise ValueError(
                f"{target} bins were asked for (min_bin_count={self.min_bin_count}, "
                f"bin_count_multiple={self.bin_count_multiple}) but there are only {len(lengths)}"
                f" rows to put in them"
            )
        return self.spread(packing, lengths, target)

    def spread(self, packing: Packing, lengths: np.ndarray, num_bins: int) -> Packing:
        """The rows of `packing` in `num_bins` bins, at most one per row: `packers.split_fullest` under
        this packer's caps.
        """
        return packers.split_fullest(
            packing, lengths, self.bin_capacity, num_bins, self.max_items or max(len(lengths), 1)
        )

    def _num_bins(self, least: int) -> int:
        multiple = self.bin_count_multiple or 1
        return -(-least // multiple) * multiple

    def _occupied(self, sequence_lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Lengths rounded up to `pad_multiple`, int64 [n], each checked."""
        lengths = np.asarray(sequence_lengths)
        if lengths.ndim != 1 or (len(lengths) and lengths.dtype.kind not in "iu"):
            raise ValueError(
                f"lengths are one list of integers; got {lengths.dtype} of shape {lengths.shape}"
            )
        lengths = lengths.astype(np.int64)
        occupied = (
            lengths
            if self.pad_multiple == 1
            else -(-lengths // self.pad_multiple) * self.pad_multiple
        )
        if len(lengths) and lengths.min() < 1:
            row = int(lengths.argmin())
            raise ValueError(f"row {row} has length {lengths[row]}; a row has at least one token")
        if len(lengths) and occupied.max() > self.bin_capacity:
            row = int(occupied.argmax())
            rounded = (
                f" ({occupied[row]} when rounded up to a multiple of {self.pad_multiple})"
                if self.pad_multiple > 1
                else ""
            )
            raise ValueError(
                f"row {row} has {lengths[row]} tokens{rounded}, above the bin capacity"
                f" {self.bin_capacity}; "
                "raise policy.sequence_packing.train_mb_tokens or shorten the row"
            )
        return occupied


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    *,
    max_items: int | None = None,
    pad_multiple: int = 1,
    seed: int = 0,
) -> SequencePacker:
    """A packer by name; with `collect_metrics` its `.metrics` gathers over calls of `pack`.

    The number of bins is at least `min_bin_count` and a multiple of `bin_count_multiple`: the
    fullest bins are split into more for that. A bin has at most `max_items` rows, a row occupies
    its length rounded up to `pad_multiple`, and `seed` is of `first_fit_shuffle`. Raises ValueError
    for an unknown name or a number out of range.
    """
    return SequencePacker(
        algorithm=PackingAlgorithm(algorithm),
        bin_capacity=bin_capacity,
        min_bin_count=min_bin_count,
        bin_count_multiple=bin_count_multiple,
        max_items=max_items,
        pad_multiple=pad_multiple,
        seed=seed,
        metrics=PackingMetrics() if collect_metrics else None,
    )
