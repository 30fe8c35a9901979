"""Statistics of packings: utilization, waste, balance and efficiency of bins."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np

from nemo_like.integer_math import ceil_div

_NAMES = (
    "total_bins",
    "total_sequence_length",
    "total_bin_capacity",
    "total_waste",
    "average_utilization",
    "min_utilization",
    "max_utilization",
    "waste_ratio",
    "bin_balance",
    "theoretical_min_bins",
    "bin_efficiency",
)


class PackingMetrics:
    """Statistics of single packings (`update`) and of all of them (`get_aggregated_stats`).

    For bins of loads l_1 ... l_K, capacity C and total S: `average_utilization` = S / (K C),
    `waste_ratio` = 1 - that, `bin_balance` = 1 - sample standard deviation of l_k / C over
    `average_utilization` (1 for one bin), `theoretical_min_bins` = ceil(S / C) and `bin_efficiency`
    = that / K. Pass real lengths, so that padding counts as waste.

    Example: lengths [6, 4, 5] in bins [[0, 1], [2]] of capacity 10: loads 10 and 5,
    `average_utilization` 0.75, `waste_ratio` 0.25, `bin_balance` 1 - 0.3536 / 0.75 = 0.5286,
    `bin_efficiency` 1.0.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Delete all recorded statistics."""
        self._stats: list[dict[str, float]] = []
        self._packing_times_s: list[float] = []

    def update(
        self,
        sequence_lengths: Sequence[int] | np.ndarray,
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
        packing_time: float | None = None,
    ) -> dict[str, float]:
        """Record and return the statistics of one packing; `packing_time` is in seconds.

        `sequence_lengths` is int [n].
        """
        stats = self.calculate_stats_only(sequence_lengths, bins, bin_capacity)
        self._stats.append(stats)
        if packing_time is not None:
            self._packing_times_s.append(packing_time)
        return stats

    def calculate_stats_only(
        self,
        sequence_lengths: Sequence[int] | np.ndarray,
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
    ) -> dict[str, float]:
        """Return the statistics of one packing without recording them.

        `bins` has indices into `sequence_lengths` int [n].
        """
        loads = np.zeros(len(bins), dtype=np.int64)
        for k, rows in enumerate(bins):
            loads[k] = sum(int(sequence_lengths[row]) for row in rows)
        num_sequences = sum(map(len, bins))
        stats = bin_stats(loads, bin_capacity)
        return {"total_sequences": float(num_sequences), **stats}

    def get_aggregated_stats(self) -> dict[str, float]:
        """Return means and extremes over all recorded packings; empty before the first `update`.

        `average_utilization`, `average_waste_ratio` and `average_bin_balance` are weighted by
        `total_bin_capacity`, so utilization and waste refer to all bins together. The extremes
        are over packings, not over bins.
        """
        if not self._stats:
            return {}
        utilization = self._column("average_utilization")
        waste = self._column("waste_ratio")
        capacity = self._column("total_bin_capacity")
        total_bins = sum(self._column("total_bins"))
        min_bins = sum(self._column("theoretical_min_bins"))
        aggregate = {
            "total_sequences": sum(self._column("total_sequences")),
            "total_bins": total_bins,
            "average_utilization": _weighted_mean(utilization, capacity),
            "min_utilization": min(utilization),
            "max_utilization": max(utilization),
            "average_waste_ratio": _weighted_mean(waste, capacity),
            "min_waste_ratio": min(waste),
            "max_waste_ratio": max(waste),
            "average_bin_balance": _weighted_mean(self._column("bin_balance"), capacity),
            "average_bin_count": fmean(self._column("total_bins")),
            "bin_efficiency": min_bins / max(total_bins, 1.0),
        }
        if self._packing_times_s:
            aggregate["average_packing_time"] = fmean(self._packing_times_s)
        return aggregate

    def _column(self, name: str) -> list[float]:
        """Return one statistic of every recorded packing."""
        return [stats[name] for stats in self._stats]


def _weighted_mean(values: list[float], weights: list[float]) -> float:
    """Return the weighted mean, or 0 if all weights are 0."""
    return fmean(values, weights) if any(weights) else 0.0


def bin_stats(
    loads: np.ndarray, bin_capacity: int, theoretical_min_bins: int | None = None
) -> dict[str, float]:
    """Compute the statistics of `PackingMetrics` from bin loads, int [K]; all zero without bins.

    A bin above the capacity (one row that exceeds it) counts as full. `theoretical_min_bins`
    overrides ceil(total / capacity) for rows that cannot share bins freely, such as rows of
    different optimizer steps.
    """
    if len(loads) == 0:
        return dict.fromkeys(_NAMES, 0.0)
    # The utilization of an oversize bin is 1, not above.
    capacities = np.maximum(loads, bin_capacity)
    total = float(loads.sum())
    capacity = float(capacities.sum())
    utilization = loads / capacities
    average = total / capacity
    # The sample standard deviation is undefined for one bin.
    deviation = float(utilization.std(ddof=1)) if len(loads) > 1 else 0.0
    min_bins = theoretical_min_bins
    if min_bins is None:
        min_bins = ceil_div(int(loads.sum()), bin_capacity)
    stats = {
        "total_bins": len(loads),
        "total_sequence_length": total,
        "total_bin_capacity": capacity,
        "total_waste": capacity - total,
        "average_utilization": average,
        "min_utilization": float(utilization.min()),
        "max_utilization": float(utilization.max()),
        "waste_ratio": 1.0 - average,
        "bin_balance": 1.0 - deviation / average if average else 1.0,
        "theoretical_min_bins": min_bins,
        "bin_efficiency": min(1.0, min_bins / len(loads)),
    }
    return {name: float(value) for name, value in stats.items()}
