"""Balance of two kinds of work between ranks: the vision tower, then the language model.

Ranks that shard a model wait for each other after the tower and after the language model, so a
microbatch takes the largest work of the tower of any rank and the largest work of the language
model of any rank. A balanced sum may still leave both unbalanced.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums

_EXCHANGES_PER_RANK = 12
_MAX_PARTNERS = 6
"""Ranks of the least work with which rows are exchanged."""
_MIN_GAIN = 1e-4


class RowCosts(NamedTuple):
    """Costs of all rows of a batch."""

    sizes: np.ndarray
    """int64 [B]: what counts for the limit of a microbatch."""
    vision: np.ndarray
    """float64 [B]: work of the tower."""
    language: np.ndarray
    """float64 [B]: work of the language model."""


class _Exchange(NamedTuple):
    from_rank: int
    to_rank: int
    row: int
    other: int
    """Index of the row that comes back; -1: none."""


def exchange_rows(step: Packing, costs: RowCosts, num_ranks: int, capacity: int) -> Packing:
    """Exchange rows between the ranks of each microbatch to lower `max V + max L`.

    `step` has bins of row ids, rank after rank. No bin exceeds `capacity` or becomes empty by it.
    """
    bins = [step.perm[start:end] for start, end in pairwise(step.offsets.tolist())]
    num_microbatches = len(bins) // num_ranks
    for index in range(num_microbatches):
        own = bins[index::num_microbatches]
        for _ in range(_EXCHANGES_PER_RANK * num_ranks):
            found = _best_exchange(own, costs, capacity)
            if found is None:
                break
            _apply(own, found)
        bins[index::num_microbatches] = own
    sizes = np.array([len(each) for each in bins], dtype=np.int64)
    return Packing(np.concatenate(bins), prefix_sums(sizes))


def _best_exchange(bins: list[np.ndarray], costs: RowCosts, capacity: int) -> _Exchange | None:
    """Return the exchange that lowers the time of a microbatch most; None without one."""
    sizes, vision, language = (np.array([values[rows].sum() for rows in bins]) for values in costs)
    best = (vision.max() + language.max()) * (1.0 - _MIN_GAIN)
    found = None
    partners = np.argsort(vision + language, kind="stable")[:_MAX_PARTNERS].tolist()
    for source in sorted({int(vision.argmax()), int(language.argmax())}):
        for target in partners:
            if target == source:
                continue
            moved = _differences(costs, bins[source], bins[target])
            is_other = np.ones(len(bins), dtype=bool)
            is_other[[source, target]] = False
            value = 0.0
            for totals, change in ((vision, moved.vision), (language, moved.language)):
                both = np.maximum(totals[source] - change, totals[target] + change)
                value = value + np.maximum(both, totals[is_other].max(initial=0.0))
            is_full = (sizes[target] + moved.sizes > capacity) & (moved.sizes > 0)
            is_full |= (sizes[source] - moved.sizes > capacity) & (moved.sizes < 0)
            if len(bins[source]) == 1:
                is_full[:, 0] = True
            value = np.where(is_full, np.inf, value)
            if value.size and value.min() < best:
                best = float(value.min())
                row, other = np.unravel_index(int(value.argmin()), value.shape)
                found = _Exchange(source, target, int(row), int(other) - 1)
    return found


def _differences(costs: RowCosts, own: np.ndarray, others: np.ndarray) -> RowCosts:
    """Return what moves for each row of `own` and none or one of `others`, [n, 1 + m] each."""
    return RowCosts(
        *(values[own][:, None] - np.concatenate([[0], values[others]])[None, :] for values in costs)
    )


def _apply(bins: list[np.ndarray], exchange: _Exchange) -> None:
    source, target, row, other = exchange
    arriving = bins[source][row : row + 1]
    leaving = bins[target][other : other + 1] if other >= 0 else arriving[:0]
    kept = bins[target] if other < 0 else np.delete(bins[target], other)
    bins[source] = np.append(np.delete(bins[source], row), leaving)
    bins[target] = np.append(kept, arriving)
