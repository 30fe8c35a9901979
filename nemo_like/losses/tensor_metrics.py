"""Metrics of a microbatch that stay on the device until they are fetched, all in one transfer.

A loss runs once per microbatch. Reading one of its numbers there would make the host wait for the
device, which then has nothing to do until the host has queued the next microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.device_transfer import fetch_scalars
from nemo_like.metrics import Max, Mean, Metric, Metrics, Sum


@dataclass(frozen=True, slots=True)
class TensorMean:
    """A `Mean` whose sum, and usually its weight, are tensors [] on the device."""

    total: Tensor
    weight: Tensor | float
    is_optional: bool = False
    """Leave the metric out where its weight is 0."""


@dataclass(frozen=True, slots=True)
class TensorMax:
    """A `Max` whose value is a tensor [] on the device."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class TensorSum:
    """A `Sum` whose value is a tensor [] on the device."""

    value: Tensor


LossMetric = Metric | TensorMean | TensorMax | TensorSum
LossMetrics = Mapping[str, LossMetric]
"""Metrics of one microbatch by name."""


def fetch_metrics(parts: Sequence[LossMetrics]) -> list[Metrics]:
    """Return the metrics of several microbatches as numbers, fetched in one transfer."""
    scalars: list[Tensor] = []
    for part in parts:
        for metric in part.values():
            scalars.extend(_scalars(metric))
    values = iter(fetch_scalars(scalars))
    fetched: list[Metrics] = []
    for part in parts:
        metrics: Metrics = {}
        for name, metric in part.items():
            number = _with_values(metric, [next(values) for _ in _scalars(metric)])
            is_optional = isinstance(metric, TensorMean) and metric.is_optional
            if is_optional and isinstance(number, Mean) and number.weight == 0:
                continue
            metrics[name] = number
        fetched.append(metrics)
    return fetched


def mean_metrics(values: Mapping[str, Tensor], mask: Tensor) -> dict[str, LossMetric]:
    """Return token means of `values`, [T] each, where `mask`, bool [T], is True."""
    if not values:
        return {}
    count = mask.to(torch.float32).sum()
    metrics: dict[str, LossMetric] = {}
    for name, value in values.items():
        # where() and not a product: an infinity at a masked position must not become NaN.
        masked = torch.where(mask, value.detach().float(), 0.0)
        metrics[name] = TensorMean(masked.sum(), count)
    return metrics


def _scalars(metric: LossMetric) -> list[Tensor]:
    """Return the tensors [] of a metric; none for one that is a number already."""
    if isinstance(metric, TensorMean):
        weight = [metric.weight] if isinstance(metric.weight, Tensor) else []
        return [metric.total, *weight]
    if isinstance(metric, TensorMax | TensorSum):
        return [metric.value]
    return []


def _with_values(metric: LossMetric, values: Sequence[float]) -> Metric:
    """Return `metric` with `values` in place of the tensors of `_scalars`."""
    if isinstance(metric, TensorMean):
        weight = values[1] if isinstance(metric.weight, Tensor) else metric.weight
        return Mean(values[0], weight)
    if isinstance(metric, TensorMax):
        return Max(values[0])
    if isinstance(metric, TensorSum):
        return Sum(values[0])
    return metric
