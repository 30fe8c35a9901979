"""Bin packers: which rows share a bin of `bin_capacity` tokens.

All are O(n log n) or better and pure
functions of the lengths (and a seed). "Decreasing" means longest first, with rows of equal length
in their given order. The bin packers return rows within a bin in the order in which they were
added, and bins in the order in which they were opened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from time import perf_counter

import numpy as np

from nemo_like.data.packing import packers
from nemo_like.data.packing.balance import schedule
from nemo_like.data.packing.metrics import PackingMetrics
from nemo_like.data.packing.packers import Packing
from nemo_like.integer_math import round_up


class PackingAlgorithm(StrEnum):
    """The packing algorithms by name; names are matched without regard to case."""

    BALANCED = "balanced"
    """The joint scheduler: assigns rows to bins and bins to ranks together, by work. The fewest
    bins per rank in practice, and the smallest makespan.
    """
    BEST_FIT_DECREASING = "best_fit_decreasing"
    """Longest row first, into the fullest bin with room. The fastest bin packer."""
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    """Longest row first, into the first bin with room."""
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    """Johnson and Garey's five phases: pairs for the bins of rows above half the capacity, then
    first fit decreasing.
    """
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    """Rows in a random order given by the seed, into the first bin with room."""
    CONCATENATIVE = "concatenative"
    """Rows in their given order; the first row that does not fit closes the bin (next fit)."""

    @classmethod
    def _missing_(cls, value: object) -> PackingAlgorithm:
        name = str(value).lower()
        if name in cls._value2member_map_:
            return cls(name)
        # Not a known name in lower case either, so suggest the closest one. The default cutoff of
        # 0.6 misses `best_fit`.
        close = get_close_matches(name, list(cls), n=1, cutoff=0.5)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"algorithm is {value!r}; it must be one of {', '.join(cls)}{hint}")


_BIN_PACKERS: dict[PackingAlgorithm, Callable[[np.ndarray, int, int, int], Packing]] = {
    PackingAlgorithm.BEST_FIT_DECREASING: packers.best_fit_decreasing,
    PackingAlgorithm.FIRST_FIT_DECREASING: packers.first_fit_decreasing,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: packers.modified_first_fit_decreasing,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: packers.first_fit_shuffle,
    PackingAlgorithm.CONCATENATIVE: packers.concatenative,
}


@dataclass(frozen=True, kw_only=True)
class SequencePacker:
    """A packing algorithm with its settings; see `get_packer`.

    `pack` is a pure function: the same lengths give the same bins.
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
        min_values = {
            "bin_capacity": 1,
            "min_bin_count": 0,
            "bin_count_multiple": 1,
            "pad_multiple": 1,
        }
        for name, min_value in min_values.items():
            value = getattr(self, name)
            if value is not None and value < min_value:
                raise ValueError(f"{name} is an integer >= {min_value}; got {value}")
        if self.max_items is not None and self.max_items < 1:
            raise ValueError(f"max_items is an integer >= 1 or None; got {self.max_items}")
        if self.max_items is not None and self.algorithm == PackingAlgorithm.BALANCED:
            raise ValueError(
                "the balanced algorithm limits the tokens of a bin, not its rows: leave max_items"
                " at None, or use a bin packer such as best_fit_decreasing"
            )

    def pack(self, sequence_lengths: Sequence[int] | np.ndarray) -> list[list[int]]:
        """Return the row indices of each bin as lists. Raises ValueError as `pack_csr` does.

        `sequence_lengths` is int [n].
        """
        # The time includes the conversion to lists, which callers of `pack` need.
        start = perf_counter()
        bins = self.pack_csr(sequence_lengths).bins()
        if self.metrics is not None:
            self.metrics.update(sequence_lengths, bins, self.bin_capacity, perf_counter() - start)
        return bins

    def pack_csr(self, sequence_lengths: Sequence[int] | np.ndarray) -> Packing:
        """Return the bins as arrays.

        Raises ValueError for a length below 1 or (rounded up) above the capacity, and if
        `min_bin_count` or `bin_count_multiple` needs more bins than there are rows.
        `sequence_lengths` is int [n].
        """
        lengths = self._padded_lengths(sequence_lengths)
        if self.algorithm == PackingAlgorithm.BALANCED:
            packing = self._pack_balanced(lengths)
            self._check_num_bins(packing.num_bins, len(lengths))
            return packing
        max_items = self.max_items or max(len(lengths), 1)
        packing = _BIN_PACKERS[self.algorithm](lengths, self.bin_capacity, max_items, self.seed)
        num_bins = max(packing.num_bins, self.min_bin_count or 0)
        multiple = self.bin_count_multiple or 1
        num_bins = round_up(num_bins, multiple)
        self._check_num_bins(num_bins, len(lengths))
        return self.split_fullest(packing, lengths, num_bins)

    def split_fullest(self, packing: Packing, lengths: np.ndarray, num_bins: int) -> Packing:
        """Repack the fullest bins of `packing` into more, `num_bins` in total, at most one per row.

        Applies `packers.split_fullest` under this packer's limits. `lengths` is int64 [n].
        """
        max_items = self.max_items or max(len(lengths), 1)
        return packers.split_fullest(packing, lengths, self.bin_capacity, num_bins, max_items)

    def _pack_balanced(self, lengths: np.ndarray) -> Packing:
        """Run the joint scheduler for one rank, with tokens as work. `lengths` is int64 [n]."""
        # Without a cost model tokens are the only known measure of work. With one rank every bin
        # is a microbatch, so the bin count settings apply to microbatches.
        if len(lengths) == 0 and self.min_bin_count:
            self._check_num_bins(self.min_bin_count, 0)
        return schedule(
            lengths,
            self.bin_capacity,
            num_ranks=1,
            work=lengths.astype(np.float64),
            microbatch_multiple=self.bin_count_multiple or 1,
            min_microbatches=max(self.min_bin_count or 0, 1),
        )

    def _check_num_bins(self, num_bins: int, num_rows: int) -> None:
        """Raise ValueError if there are more bins than rows, since no bin may be empty."""
        if num_bins > num_rows:
            raise ValueError(
                f"{num_bins} bins were requested (min_bin_count={self.min_bin_count}, "
                f"bin_count_multiple={self.bin_count_multiple}) but there are only {num_rows}"
                f" rows to put in them"
            )

    def _padded_lengths(self, sequence_lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Check lengths and round them up to `pad_multiple`, int64 [n]."""
        lengths = packers.checked_lengths(sequence_lengths)
        padded = round_up(lengths, self.pad_multiple)
        if len(lengths) == 0:
            return padded
        if padded.max() > self.bin_capacity:
            row = int(padded.argmax())
            rounded = ""
            if self.pad_multiple > 1:
                rounded = f" ({padded[row]} when rounded up to a multiple of {self.pad_multiple})"
            raise ValueError(
                f"row {row} has {lengths[row]} tokens{rounded}, above the bin capacity"
                f" {self.bin_capacity}; raise bin_capacity or shorten the row"
            )
        return padded


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
    """Return a packer by name; with `collect_metrics` its `.metrics` aggregates calls of `pack`.

    The number of bins is at least `min_bin_count` and a multiple of `bin_count_multiple`: for that
    the fullest bins, up to all of them, are repacked into more bins of similar load, longest row
    first. A bin has at most `max_items` rows, which `balanced` does not
    support. A row counts as its length rounded up to `pad_multiple`. `seed` is used by
    `first_fit_shuffle`. Raises ValueError for an unknown name or a number out of range.
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
