"""Metrics that are fetched at the end of a step equal those that are read at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.losses.reduce import (
    LossMetrics,
    TensorMax,
    TensorMean,
    TensorSum,
    fetch_metrics,
    mean_metrics,
)
from nemo_like.metrics import Max, Mean, Min, Sum

VALUES = st.floats(-1e6, 1e6, width=32)


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(st.tuples(VALUES, VALUES), max_size=5))
def test_every_kind_keeps_its_value_and_its_microbatch(parts: list[tuple[float, float]]) -> None:
    on_device: list[LossMetrics] = [
        {
            "mean": TensorMean(torch.tensor(total), torch.tensor(weight)),
            "of pairs": TensorMean(torch.tensor(total), 3.0),
            "max": TensorMax(torch.tensor(weight)),
            "sum": TensorSum(torch.tensor(7)),
            "number": Min(2.0),
        }
        for total, weight in parts
    ]
    expected = [
        {
            "mean": Mean(total, weight),
            "of pairs": Mean(total, 3.0),
            "max": Max(weight),
            "sum": Sum(7.0),
            "number": Min(2.0),
        }
        for total, weight in parts
    ]
    assert fetch_metrics(on_device) == expected


def test_an_optional_mean_without_weight_is_left_out() -> None:
    zero = torch.zeros(())
    metrics: LossMetrics = {
        "kept": TensorMean(zero, zero),
        "left out": TensorMean(zero, zero, is_optional=True),
        "present": TensorMean(zero, torch.ones(()), is_optional=True),
    }
    assert fetch_metrics([metrics]) == [{"kept": Mean(0.0, 0.0), "present": Mean(0.0, 1.0)}]


def test_token_means_ignore_what_is_masked() -> None:
    values = {"a": torch.tensor([1.0, float("inf"), 3.0], requires_grad=True)}
    mask = torch.tensor([True, False, True])
    (metrics,) = fetch_metrics([mean_metrics(values, mask)])
    assert metrics == {"a": Mean(4.0, 2.0)}
    assert mean_metrics({}, mask) == {}


def test_a_metric_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(RuntimeError):
        fetch_metrics([{"a": TensorSum(torch.ones(2)), "b": TensorSum(torch.ones(()))}])
