"""How well bins are filled, as numbers: utilization, waste, balance and efficiency, of one packing
or over many.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import numpy as np


class PackingMetrics:
    """Statistics of packings, one by one (`update` returns them) and over all of them
    (`get_aggregated_stats`).

    With bins of loads l_1 ... l_K, capacity C and total S: `average_utilization` = S / (K C),
    `waste_ratio` = 1 - that, `bin_balance` = 1 - sample standard deviation of l_k / C over
    `average_utilization` (1 for one bin), `theoretical_min_bins` = ceil(S / C) and `bin_efficiency`
    = that / K. Give real lengths, so that padding counts as waste.

    Example: lengths [6, 4, 5] in bins [[0, 1], [2]] of capacity 10: loads 10 and 5,
    `average_utilization` 0.75, `waste_ratio` 0.25, `bin_balance` 1 - 0.3536 / 0.75 = 0.5286,
    `bin_efficiency` 1.0.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything gathered."""
        self._stats: list[dict[str, float]] = []
        self._packing_times_s: list[float] = []

    def update(
        self,
        sequence_lengths: Sequence[int] | np.ndarray,
        bins: Sequence[Sequence[int]],
        bin_capacity: int,
        packing_time: float | None = None,
    ) -> dict[str, float]:
        """Statistics of one packing, gathered for the aggregate; `packing_time` is in seconds."""
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
        """Statistics of one packing, not gathered. Bins hold indices into `sequence_lengths`."""
        loads = np.array(
            [sum(int(sequence_lengths[row]) for row in rows) for rows in bins], dtype=np.int64
        )
        return {"total_sequences": float(sum(map(len, bins))), **bin_stats(loads, bin_capacity)}

    def get_aggregated_stats(self) -> dict[str, float]:
        """Means and extremes over everything gathered; empty before the first `update`.

        `average_utilization`, `average_waste_ratio` and `average_bin_balance` are weighted by
        `total_bin_capacity`, so that utilization and waste are those of all bins together. The
        extremes are of single packings.
        """
        if not self._stats:
            return {}
        utilization = self._column("average_utilization")
        waste = self._column("waste_ratio")
        capacity = self._column("total_bin_capacity")
        aggregate = {
            "total_sequences": sum(self._column("total_sequences")),
            "total_bins": sum(self._column("total_bins")),
            "average_utilization": _weighted_mean(utilization, capacity),
            "min_utilization": min(utilization),
            "max_utilization": max(utilization),
            "average_waste_ratio": _weighted_mean(waste, capacity),
            "min_waste_ratio": min(waste),
            "max_waste_ratio": max(waste),
            "average_bin_balance": _weighted_mean(self._column("bin_balance"), capacity),
            "average_bin_count": fmean(self._column("total_bins")),
            "bin_efficiency": sum(self._column("theoretical_min_bins"))
            / max(sum(self._column("total_bins")), 1.0),
        }
        if self._packing_times_s:
            aggregate["average_packing_time"] = fmean(self._packing_times_s)
        return aggregate

    def print_aggregated_stats(self) -> None:
        """One line per aggregated number."""
        for name, value in self.get_aggregated_stats().items():
            print(f"{name:>20} {value:.6g}")

    def _column(self, name: str) -> list[float]:
        return [stats[name] for stats in self._stats]


def _weighted_mean(values: list[float], weights: list[float]) -> float:
    """0 where all weights are."""
    return fmean(values, weights) if any(weights) else 0.0


def bin_stats(
    loads: np.ndarray, bin_capacity: int, theoretical_min_bins: int | None = None
) -> dict[str, float]:
    """The statistics of `PackingMetrics` from bin loads, int [K]; all zero without bins.

    A bin above the capacity (a row alone that exceeds it) counts as full. `theoretical_min_bins`
    may be given where bins cannot be shared by all rows.
    """
    if len(loads) == 0:
        return dict.fromkeys(_NAMES, 0.0)
    capacities = np.maximum(loads, bin_capacity)
    total, capacity = float(loads.sum()), float(capacities.sum())
    utilization = loads / capacities
    average = total / capacity
    deviation = float(utilization.std(ddof=1)) if len(loads) > 1 else 0.0
    fewest = (
        -(-int(loads.sum()) // bin_capacity)
        if theoretical_min_bins is None
        else theoretical_min_bins
    )
    values = (
        len(loads),
        total,
        capacity,
        capacity - total,
        average,
        float(utilization.min()),
        float(utilization.max()),
        1.0 - average,
        1.0 - deviation / average if average else 1.0,
        fewest,
        min(1.0, fewest / len(loads)),
    )
    return dict(zip(_NAMES, map(float, values), strict=True))


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
