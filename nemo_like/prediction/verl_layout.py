"""The microbatches that verl forms with `use_dynamic_bsz`, for comparison. No run uses them.

Rows of an optimizer step are divided over the ranks, equally many each, and then over the
microbatches of a rank by the Karmarkar-Karp differencing method with an estimate of work. The
number of microbatches is the tokens of the rank over the budget, rounded up, so that a microbatch
may exceed the budget (`verl/utils/seqlen_balancing.py`, revision b178a3cd5).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.oversize import FittedRows, fit_rows
from nemo_like.data.planning.plan import BatchPlan, PlanSpec, join_steps
from nemo_like.data.planning.plan_step import join_ranks
from nemo_like.integer_math import ceil_div, round_up

_LINEAR_WORK = 24576
"""Work of a token over that of a token squared: a 7B model, whatever the trained model is."""


def plan_verl(
    lengths: np.ndarray, spec: PlanSpec, num_trained: np.ndarray | None = None
) -> BatchPlan:
    """Plan rows of `lengths` int64 [B] as verl does, in the packed layout of `spec`.

    `num_trained` int64 [B] are the tokens with loss of each row; verl does not use them.
    """
    fitted = fit_rows(lengths, None, spec, num_trained)
    rows_per_step = spec.global_batch_size or max(len(lengths), 1)
    steps = []
    for start in range(0, len(lengths), rows_per_step):
        rows = np.arange(start, min(start + rows_per_step, len(lengths)))
        steps.append(_plan_step(rows, fitted, spec))
    return join_steps(spec, fitted, steps, ())


def _plan_step(rows: np.ndarray, fitted: FittedRows, spec: PlanSpec) -> Packing:
    """Plan the rows of one step, int64 [n]."""
    lengths = fitted.lengths[rows]
    work = (_LINEAR_WORK * lengths + lengths * lengths).tolist()
    # verl refuses a batch that the ranks do not divide.
    equal_size = len(rows) % spec.num_ranks == 0
    ranks = karmarkar_karp(work, spec.num_ranks, equal_size=equal_size)
    num_microbatches = 1
    for rank in ranks:
        num_tokens = int(fitted.padded_lengths[rows[rank]].sum())
        num_microbatches = max(num_microbatches, ceil_div(num_tokens, spec.capacity or 1))
    num_microbatches = round_up(num_microbatches, spec.microbatch_multiple)
    rank_bins = []
    for rank in ranks:
        # A rank with fewer rows than microbatches has dummies.
        num_bins = min(num_microbatches, max(len(rank), 1))
        parts = karmarkar_karp([work[row] for row in rank], num_bins, equal_size=False)
        parts.sort(key=lambda part: sum(work[rank[row]] for row in part), reverse=True)
        # The smallest ones are at both ends, where a pipeline fills and empties.
        parts = parts[::2][::-1] + parts[1::2]
        own = rows[[rank[row] for part in parts for row in part]]
        sizes = np.array([len(part) for part in parts], dtype=np.int64)
        rank_bins.append(Packing(own, prefix_sums(sizes)))
    return join_ranks(rank_bins, spec.microbatch_multiple)


_Part = tuple[int, int, tuple[int, ...]]
"""Work, number of items and items of one part."""


@dataclass
class _Partition:
    """Items divided into parts, the one with the most work first; empty parts are left out."""

    parts: list[_Part]
    num_parts: int

    def __lt__(self, other: _Partition) -> bool:
        # A heap returns the smallest first: the largest difference between two parts.
        return self._order > other._order

    @property
    def _order(self) -> tuple[int, _Part]:
        is_full = len(self.parts) == self.num_parts
        return self.parts[0][0] - (self.parts[-1][0] if is_full else 0), self.parts[0]

    def joined(self, other: _Partition) -> _Partition:
        """Return both together: the largest part here with the smallest part there."""
        own_alone = self.num_parts - len(other.parts)
        others_alone = self.num_parts - len(self.parts)
        parts = self.parts[:own_alone] + other.parts[:others_alone]
        pairs = zip(self.parts[own_alone:], reversed(other.parts[others_alone:]), strict=True)
        for left, right in pairs:
            parts.append((left[0] + right[0], left[1] + right[1], left[2] + right[2]))
        return _Partition(sorted(parts, reverse=True), self.num_parts)


def karmarkar_karp(work: Sequence[int], num_parts: int, *, equal_size: bool) -> list[list[int]]:
    """Divide items into `num_parts` lists of indices with similar sums of `work`.

    With `equal_size` all have equally many items, which `num_parts` must divide. Some are empty if
    there are fewer items.

    Example: `karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)` is `[[1, 3, 4], [0, 2]]`.
    """
    items = sorted((value, index) for index, value in enumerate(work))
    size = num_parts if equal_size else 1
    heap = []
    for start in range(0, len(items), size):
        parts = [(value, 1, (index,)) for value, index in items[start : start + size]]
        heap.append(_Partition(sorted(parts, reverse=True), num_parts))
    heapq.heapify(heap)
    while len(heap) > 1:
        largest = heapq.heappop(heap)
        heapq.heapreplace(heap, largest.joined(heap[0]))
    found = [sorted(part[2]) for part in heap[0].parts] if heap else []
    return found + [[] for _ in range(num_parts - len(found))]
