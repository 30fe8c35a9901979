"""Packing statistics against numbers worked out by hand."""

from __future__ import annotations

from statistics import stdev

import numpy as np
import pytest

from nemo_like.data.packing.metrics import PackingMetrics, bin_stats


def test_worked_example() -> None:
    """Loads 10 and 5 of 10: utilizations 1 and 0.5, sample standard deviation 0.3536."""
    stats = PackingMetrics().calculate_stats_only([6, 4, 5], [[0, 1], [2]], 10)
    assert stats == pytest.approx(
        {
            "total_sequences": 3,
            "total_bins": 2,
            "total_sequence_length": 15,
            "total_bin_capacity": 20,
            "total_waste": 5,
            "average_utilization": 0.75,
            "min_utilization": 0.5,
            "max_utilization": 1.0,
            "waste_ratio": 0.25,
            "bin_balance": 1 - stdev([1.0, 0.5]) / 0.75,
            "theoretical_min_bins": 2,
            "bin_efficiency": 1.0,
        }
    )


def test_efficiency_is_the_fewest_bins_by_tokens_over_the_bins_used() -> None:
    stats = PackingMetrics().calculate_stats_only([6, 6, 6], [[0], [1], [2]], 10)
    assert (stats["theoretical_min_bins"], stats["bin_efficiency"]) == (2, pytest.approx(2 / 3))


def test_one_bin_is_balanced_and_no_bin_is_all_zero() -> None:
    metrics = PackingMetrics()
    assert metrics.calculate_stats_only([4], [[0]], 10)["bin_balance"] == 1.0
    assert set(metrics.calculate_stats_only([], [], 10).values()) == {0.0}


def test_a_bin_above_the_capacity_counts_as_full() -> None:
    stats = bin_stats(np.array([15, 5]), 10)
    assert stats["max_utilization"] == 1.0 and stats["average_utilization"] == pytest.approx(
        20 / 25
    )


def test_the_aggregate_is_over_all_updates() -> None:
    metrics = PackingMetrics()
    assert metrics.get_aggregated_stats() == {}
    metrics.update([6, 4, 5], [[0, 1], [2]], 10, packing_time=0.5)
    metrics.update([10], [[0]], 10, packing_time=1.5)
    aggregate = metrics.get_aggregated_stats()
    assert aggregate["total_sequences"] == 4 and aggregate["total_bins"] == 3
    assert aggregate["average_utilization"] == pytest.approx(25 / 30), "of the capacity of all bins"
    assert (aggregate["min_utilization"], aggregate["max_utilization"]) == (0.75, 1.0)
    assert aggregate["average_waste_ratio"] == pytest.approx(5 / 30)
    assert (aggregate["min_waste_ratio"], aggregate["max_waste_ratio"]) == (0.0, 0.25)
    assert aggregate["average_bin_count"] == 1.5 and aggregate["bin_efficiency"] == pytest.approx(
        1.0
    )
    assert aggregate["average_bin_balance"] == pytest.approx(
        (20 * (1 - stdev([1.0, 0.5]) / 0.75) + 10 * 1) / 30
    )
    assert aggregate["average_packing_time"] == 1.0
    metrics.update([], [], 10)
    assert metrics.get_aggregated_stats()["average_utilization"] == pytest.approx(25 / 30), (
        "no bins, no weight"
    )
    metrics.reset()
    metrics.update([], [], 10)
    assert metrics.get_aggregated_stats()["average_utilization"] == 0.0
    metrics.reset()
    assert metrics.get_aggregated_stats() == {}
