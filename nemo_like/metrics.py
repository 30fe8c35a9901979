"""Metrics that merge exactly across microbatches, ranks and steps, and the timers that feed them.

A metric merges with another of its kind, so a mean is always a sum over a weight and never a mean
of means. `tracking` writes the metrics.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean, stored as sum and weight. With weight 0 its value is 0.

    Example: `Mean(6.0, 3.0).value == 2.0`.
    """

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight if self.weight else 0.0

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class ExpMean:
    """exp of a weighted mean, stored as the mean's sum and weight: the perplexity of a loss.

    Its value is infinite where exp exceeds the largest float, and 1 with weight 0.
    Example: `ExpMean(6.0, 3.0).value == math.exp(2.0)`.
    """

    total: float
    weight: float = 1.0

    @property
    def value(self) -> float:
        mean = self.total / self.weight if self.weight else 0.0
        try:
            return math.exp(mean)
        except OverflowError:
            return math.inf

    def merge(self, other: ExpMean) -> ExpMean:
        return ExpMean(self.total + other.total, self.weight + other.weight)


@dataclass(frozen=True, slots=True)
class Sum:
    """The total of all merged values."""

    value: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.value + other.value)


@dataclass(frozen=True, slots=True)
class Max:
    """The largest of all merged values."""

    value: float

    def merge(self, other: Max) -> Max:
        return Max(max(self.value, other.value))


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest of all merged values."""

    value: float

    def merge(self, other: Min) -> Min:
        return Min(min(self.value, other.value))


Metric = Mean | ExpMean | Sum | Max | Min
Metrics = dict[str, Metric]


def merge_metrics(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Merge metrics by name; a name may be missing in some parts.

    Raises TypeError for a name with two kinds of metrics.
    """
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            seen = merged.get(name)
            if seen is None:
                merged[name] = metric
            # Silent merging of a mean and a sum would give a number without a meaning.
            elif type(seen) is not type(metric):
                raise TypeError(
                    f"metric {name!r} is a {type(seen).__name__} in one part and a"
                    f" {type(metric).__name__} in another"
                )
            else:
                merged[name] = seen.merge(metric)  # type: ignore[arg-type]
    return merged


def metric_values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Return the values as plain numbers, for logging."""
    return {name: metric.value for name, metric in metrics.items()}


class Timers:
    """Wall-clock seconds by name: `with timers("train"): ...` adds to `timing/train_s`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        # Added, because a phase may run several times per step.
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Return the seconds of `name` so far; 0 if it never ran."""
        return self._seconds.get(name, 0.0)

    def pop(self) -> Metrics:
        """Return `timing/<name>_s` of everything timed since the last call, and reset it."""
        metrics: Metrics = {
            f"timing/{name}_s": Sum(seconds) for name, seconds in self._seconds.items()
        }
        # The time of a step must not count to the next one.
        self._seconds = {}
        return metrics


start_timers = Timers()
"""The phases of the start of this process, which the first step logs."""
