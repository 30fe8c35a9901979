"""Metrics merge to the same value however the rows were split."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.metrics import Max, Mean, Metrics, Min, Sum, Timers, merge_metrics, metric_values

values = st.lists(st.integers(-1000, 1000), min_size=1, max_size=30)


def metrics_of(numbers: list[int]) -> Metrics:
    """As one microbatch reports them; integers, so that sums are exact in any order."""
    return {
        "room/mean": Mean(float(sum(numbers)), float(len(numbers))),
        "room/sum": Sum(float(sum(numbers))),
        "room/max": Max(float(max(numbers))),
        "room/min": Min(float(min(numbers))),
    }


@given(values, st.data())
def test_any_split_into_microbatches_gives_the_full_batch(
    numbers: list[int], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(1, len(numbers)), max_size=4)))
    bounds = [0, *cuts, len(numbers)]
    parts = [numbers[start:end] for start, end in itertools.pairwise(bounds) if start < end]
    merged = merge_metrics(metrics_of(part) for part in data.draw(st.permutations(parts)))
    assert metric_values(merged) == metric_values(metrics_of(numbers))


def test_mean_is_weighted_and_not_a_mean_of_means() -> None:
    assert Mean(10.0, 1.0).merge(Mean(2.0, 3.0)).value == 3.0


def test_a_mean_over_nothing_is_0_and_adds_nothing() -> None:
    assert Mean(0.0, 0.0).value == 0.0
    assert Mean(0.0, 0.0).merge(Mean(6.0, 2.0)) == Mean(6.0, 2.0)


def test_names_may_be_missing_from_some_parts() -> None:
    merged = merge_metrics([{"a/x": Sum(1.0)}, {"a/x": Sum(2.0), "b/y": Max(5.0)}, {}])
    assert metric_values(merged) == {"a/x": 3.0, "b/y": 5.0}


def test_one_name_of_two_kinds_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match="'a/x' is a Sum in one part and a Mean in another"):
        merge_metrics([{"a/x": Sum(1.0)}, {"a/x": Mean(1.0)}])


def test_timers_add_up_and_are_cleared_by_pop() -> None:
    timers = Timers()
    for _ in range(2):
        with timers("train"):
            time.sleep(0.01)
    assert timers.seconds("train") >= 0.02
    assert timers.seconds("never") == 0.0
    assert metric_values(timers.pop())["timing/train_s"] >= 0.02
    assert timers.pop() == {}


def test_a_phase_that_raises_is_timed_all_the_same() -> None:
    timers = Timers()
    with pytest.raises(RuntimeError), timers("train"):
        raise RuntimeError
    assert "timing/train_s" in timers.pop()
