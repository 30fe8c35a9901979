"""Planning of one optimizer step with context-parallel groups of different sizes.

With a fixed context-parallel size every row is split over as many ranks as the longest row needs.
A short row needs no other rank: split, its keys and values are exchanged, and its chunks are short.
Here all dp x cp ranks run one group each at a time, of 1, 2, 4 ... up to cp ranks, and a group has
a pack of its own. A unit (a row, or rows that stay together) is a malleable task: it takes the
fewest ranks that have memory for it, or more where it would take longer than the mean. Units then
go, largest first, to the group with the least work per rank, and groups of similar time run at the
same time.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from nemo_like.data.packing.packers import Packing, prefix_sums
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan_step import OVERHEAD_TOKENS, row_work
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.integer_math import ceil_div, round_up

EXCHANGE_SHARE = 0.02
"""Time to gather the keys and values of a token from the other ranks of its group, as a share of
its products with weights on one rank. With grouped-query attention and NVLink it is 0.01 to 0.03.
"""
_MAX_SLOWER = (1.0, 1.3, 2.0)
"""Values tried for how many times the mean a unit may take before it gets more ranks."""
_EXTRA_SLOTS = (0, 1, 2)
"""Microbatches tried beyond the fewest for which there is memory."""
_MAX_SKIPPED = 256
"""Groups without room that are tried for a unit, those with the least work first."""


@dataclass(frozen=True, eq=False)
class ContextStep:
    """One optimizer step: K groups, of which R x M microbatches have some each."""

    groups: Packing
    """Row ids of each group, by microbatch (rank after rank) and then by `first`."""
    first: np.ndarray
    """int64 [K]: the first context-parallel rank of each group."""
    size: np.ndarray
    """int64 [K]: its ranks."""
    offsets: np.ndarray
    """int64 [R*M+1]: bounds of the microbatches in the groups."""


class _Units(NamedTuple):
    """U units that each stay in one group."""

    rows: Packing
    """Row ids."""
    work: np.ndarray
    """float64 [U]"""
    tokens: dict[int, np.ndarray]
    """Context-parallel size -> positions in a group of that size, int64 [U]."""
    size: np.ndarray
    """int64 [U]: ranks of the smallest group with room."""


class _Group:
    """A group while units are assigned: its ranks, units, work and positions."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.units: list[int] = []
        self.work = 0.0
        self.tokens = 0

    @property
    def time(self) -> float:
        return self.work / self.size

    def add(self, unit: int, units: _Units) -> None:
        self.units.append(unit)
        self.work += float(units.work[unit])
        self.tokens += int(units.tokens[self.size][unit])


def form_context_step(
    bins: Packing, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec
) -> ContextStep:
    """Assign the rows of a step to groups of the dp x cp ranks; `bins` has row ids.

    Rows of a bin that share prefixes stay together, and the rows of a group (`groups` int64 [B] are
    ids of all rows). Without prefixes the bins do not matter.
    """
    units = _units(bins, fitted, groups, spec)
    num_lanes = spec.num_ranks * spec.cp_size
    limits = {size: spec.of_context(size).capacity for size in spec.context_sizes}
    tokens = int(units.tokens[min(limits)].sum())
    num_slots = max(ceil_div(tokens, num_lanes * limits[min(limits)]), 1)
    found: list[tuple[float, list[list[_Group]]]] = []
    while not found:
        for extra in _EXTRA_SLOTS:
            for slower in _MAX_SLOWER:
                slots = _form_slots(units, limits, num_lanes, num_slots + extra, slower)
                if slots is not None:
                    found.append((_time(slots, spec), slots))
        num_slots += 1
    _, slots = min(found, key=lambda each: each[0])
    return _context_step(slots, units, spec)


def _time(slots: list[list[_Group]], spec: PlanSpec) -> float:
    """Return the time of a step: of the slowest group of each slot, and what each slot costs."""
    exchange = EXCHANGE_SHARE * spec.cost.linear
    time = len(slots) * OVERHEAD_TOKENS * spec.cost.linear
    for slot in slots:
        time += max(group.time + exchange * group.tokens * (1 - 1 / group.size) for group in slot)
    return time


def _units(bins: Packing, fitted: FittedRows, groups: np.ndarray | None, spec: PlanSpec) -> _Units:
    bins, _, shared = fitted.place(bins, spec)
    rows = bins.perm
    unit_of = _unit_ids(bins, shared, groups)
    _, unit_of = np.unique(unit_of, return_inverse=True)
    num_units = int(unit_of.max()) + 1 if len(rows) else 0
    computed = fitted.lengths[rows] if shared is None else fitted.lengths[rows] - shared
    trained = None if fitted.num_trained is None else fitted.num_trained[rows]
    work = row_work(computed, spec, trained, shared)
    work = computed.astype(np.float64) if work is None else work
    tokens = {}
    size = np.full(num_units, spec.cp_size, dtype=np.int64)
    for ranks in sorted(spec.context_sizes, reverse=True):
        multiple = spec.of_context(ranks).row_multiple
        padded = np.bincount(unit_of, round_up(computed, multiple), minlength=num_units)
        tokens[ranks] = padded.astype(np.int64)
        size[tokens[ranks] <= spec.of_context(ranks).capacity] = ranks
    order = np.argsort(unit_of, kind="stable")
    sizes = np.bincount(unit_of, minlength=num_units)
    return _Units(
        Packing(rows[order], prefix_sums(sizes)),
        np.bincount(unit_of, work, minlength=num_units),
        tokens,
        size,
    )


def _form_slots(
    units: _Units, limits: dict[int, int], num_lanes: int, num_slots: int, max_slower: float
) -> list[list[_Group]] | None:
    """Return the groups of each slot of `num_lanes` ranks with all units; None if they do not fit.

    `limits` are the positions of a group by its size. A unit above the largest one is alone. A unit
    that would take `max_slower` times the mean gets more ranks than it needs. Slots with a slower
    group than the mean of what remains are filled up to its time first; all other units go to the
    group with the least work per rank.
    """
    sizes = sorted(limits)
    size_of = units.size.copy()
    mean = float(units.work.sum()) / (num_lanes * num_slots)
    for size, larger in pairwise(sizes):
        is_slow = (size_of == size) & (units.work > max_slower * mean * size)
        size_of[is_slow] = larger
    wide = np.flatnonzero(size_of > 1)
    waiting = [_Group(int(size_of[unit])) for unit in wide]
    for group, unit in zip(waiting, wide.tolist(), strict=True):
        group.add(unit, units)
    short = np.flatnonzero(size_of == 1)
    rest = short[np.argsort(units.work[short], kind="stable")].tolist()
    slots: list[list[_Group]] = []
    waiting.sort(key=lambda group: -group.time)
    while waiting:
        slot, others = _next_slot(waiting, num_lanes)
        num_left = num_lanes * (num_slots - len(slots))
        work = sum(group.work for group in waiting) + float(units.work[rest].sum())
        if num_left <= 0 or slot[0].time * num_left <= work:
            break
        slot += [_Group(1) for _ in range(num_lanes - sum(group.size for group in slot))]
        for group in slot:
            _fill(group, slot[0].time, rest, units, limits)
        slots.append([group for group in slot if group.units])
        waiting = others
    num_left = num_lanes * (num_slots - len(slots)) - sum(group.size for group in waiting)
    if num_left < 0:
        return None
    waiting += [_Group(1) for _ in range(num_left)]
    heap = [(group.time, index) for index, group in enumerate(waiting)]
    heapq.heapify(heap)
    for unit in reversed(rest):
        if not _add_to_least_loaded(unit, units, waiting, heap, limits):
            return None
    num_idle = sum(group.size for group in waiting if not group.units)
    waiting = [group for group in waiting if group.units]
    _widen_slowest(waiting, units, sizes, num_idle)
    waiting.sort(key=lambda group: -group.time)
    while waiting:
        slot, waiting = _next_slot(waiting, num_lanes)
        slots.append(slot)
    # In the order of their sizes, each of which divides the next, groups are aligned.
    return [sorted(slot, key=lambda group: -group.size) for slot in slots]


def _next_slot(waiting: Sequence[_Group], num_lanes: int) -> tuple[list[_Group], list[_Group]]:
    """Divide groups, by decreasing time, into those that run next on `num_lanes` and the others."""
    slot = []
    others = []
    for group in waiting:
        if group.size <= num_lanes:
            slot.append(group)
            num_lanes -= group.size
        else:
            others.append(group)
    return slot, others


def _fill(
    group: _Group, time: float, rest: list[int], units: _Units, limits: dict[int, int]
) -> None:
    """Add the largest units of `rest` that have room in the group until it takes `time`.

    `rest`, by increasing work, loses them.
    """
    work_of = units.work
    tokens = units.tokens[group.size]
    while rest:
        free = time * group.size - group.work
        index = bisect.bisect_right(rest, free, key=lambda unit: float(work_of[unit])) - 1
        room = limits[group.size] - group.tokens
        while index >= 0 and int(tokens[rest[index]]) > room:
            index = min(
                index - 1,
                bisect.bisect_right(rest, room, hi=index, key=lambda unit: int(tokens[unit])) - 1,
            )
        if index < 0:
            return
        group.add(rest.pop(index), units)


def _add_to_least_loaded(
    unit: int,
    units: _Units,
    groups: list[_Group],
    heap: list[tuple[float, int]],
    limits: dict[int, int],
) -> bool:
    """Add a unit to the group with the least time that has room; False if none was found."""
    skipped = []
    found = False
    while heap and not found and len(skipped) < _MAX_SKIPPED:
        time, index = heapq.heappop(heap)
        group = groups[index]
        room = limits[group.size] - group.tokens
        if int(units.tokens[group.size][unit]) <= room:
            group.add(unit, units)
            time = group.time
            found = True
        # Units come with decreasing work, and the last ones are the shortest.
        if room > 0:
            skipped.append((time, index))
    for entry in skipped:
        heapq.heappush(heap, entry)
    return found


def _widen_slowest(
    groups: list[_Group], units: _Units, sizes: Sequence[int], num_idle: int
) -> None:
    """Give `num_idle` ranks without a unit to the groups that take longest."""
    heap = [(-group.time, index) for index, group in enumerate(groups)]
    heapq.heapify(heap)
    while heap:
        _, index = heapq.heappop(heap)
        group = groups[index]
        larger = [size for size in sizes if size > group.size]
        if not larger or larger[0] - group.size > num_idle:
            # Another group is not the slowest one.
            return
        num_idle -= larger[0] - group.size
        group.size = larger[0]
        group.tokens = int(units.tokens[group.size][group.units].sum())
        heapq.heappush(heap, (-group.time, index))


def _context_step(slots: list[list[_Group]], units: _Units, spec: PlanSpec) -> ContextStep:
    """Place the groups of each slot on the ranks, in their order."""
    multiple = spec.microbatch_multiple
    num_slots = max(ceil_div(len(slots), multiple), 1) * multiple
    placed: list[list[tuple[int, _Group]]] = [[] for _ in range(spec.num_ranks * num_slots)]
    for index, slot in enumerate(slots):
        lane = 0
        for group in slot:
            rank, first = divmod(lane, spec.cp_size)
            placed[rank * num_slots + index].append((first, group))
            lane += group.size
    ordered = [entry for microbatch in placed for entry in microbatch]
    bins = Packing(
        np.array([unit for _, group in ordered for unit in group.units], dtype=np.int64),
        prefix_sums(np.array([len(group.units) for _, group in ordered], dtype=np.int64)),
    )
    return ContextStep(
        bins.expand(units.rows),
        np.array([first for first, _ in ordered], dtype=np.int64),
        np.array([group.size for _, group in ordered], dtype=np.int64),
        prefix_sums(np.array([len(each) for each in placed], dtype=np.int64)),
    )


def join_context_ranks(ranks: Sequence[ContextStep], microbatch_multiple: int) -> ContextStep:
    """Join steps of one data-parallel rank each; all get as many microbatches."""
    largest = max(len(rank.offsets) - 1 for rank in ranks)
    num_microbatches = max(ceil_div(largest, microbatch_multiple), 1) * microbatch_multiple
    padded = []
    for rank in ranks:
        # A microbatch that ends where it starts has no group.
        ends = np.full(num_microbatches + 1, rank.offsets[-1])
        ends[: len(rank.offsets)] = rank.offsets
        padded.append(replace(rank, offsets=ends))
    return _concatenated(padded)


def join_context_steps(steps: Sequence[ContextStep], num_ranks: int) -> ContextStep:
    """Join the steps of a batch: the microbatches of rank 0 over all steps come first."""
    parts = []
    for rank in range(num_ranks):
        for step in steps:
            num_microbatches = (len(step.offsets) - 1) // num_ranks
            own = step.offsets[rank * num_microbatches : (rank + 1) * num_microbatches + 1]
            ids = np.arange(own[0], own[-1])
            groups = step.groups.take(ids)
            parts.append(ContextStep(groups, step.first[ids], step.size[ids], own - own[0]))
    return _concatenated(parts)


def _concatenated(parts: Sequence[ContextStep]) -> ContextStep:
    """Return the microbatches of `parts`, one part after the other."""
    empty = np.empty(0, dtype=np.int64)
    num_rows = [np.diff(part.groups.offsets) for part in parts]
    num_groups = [np.diff(part.offsets) for part in parts]
    return ContextStep(
        Packing(
            np.concatenate([empty, *(part.groups.perm for part in parts)]),
            prefix_sums(np.concatenate([empty, *num_rows])),
        ),
        np.concatenate([empty, *(part.first for part in parts)]),
        np.concatenate([empty, *(part.size for part in parts)]),
        prefix_sums(np.concatenate([empty, *num_groups])),
    )


def place_groups(
    step: ContextStep, fitted: FittedRows, spec: PlanSpec
) -> tuple[Packing, np.ndarray, np.ndarray | None, tuple[np.ndarray, np.ndarray]]:
    """Return the rows in the order in which the groups compute them.

    (Microbatches of row ids, positions int64 [n], leading tokens computed by earlier rows int64 [n]
    or None, (first rank, ranks) of each row's group int64 [n]) of the n rows.
    """
    groups, _, shared = fitted.place(step.groups, spec)
    num_rows = np.diff(groups.offsets)
    sizes = np.repeat(step.size, num_rows)
    computed = fitted.lengths[groups.perm]
    computed = computed if shared is None else computed - shared
    padded = np.zeros_like(computed)
    for size in spec.context_sizes:
        own = sizes == size
        padded[own] = round_up(computed[own], spec.of_context(size).row_multiple)
    bins = Packing(groups.perm, groups.offsets[step.offsets])
    return bins, padded, shared, (np.repeat(step.first, num_rows), sizes)


def sums_of_ranks(
    values: np.ndarray, offsets: np.ndarray, first: np.ndarray, size: np.ndarray, spec: PlanSpec
) -> np.ndarray:
    """Sum `values` [n] of rows for each rank, float64 [R * cp, M]; a row is shared equally.

    `offsets` int64 [R*M+1] are bounds of microbatches in the rows, `first` and `size` int64 [n] the
    group of each row.
    """
    row = np.repeat(np.arange(len(size)), size)
    rank = np.arange(len(row)) - prefix_sums(size)[:-1][row] + first[row]
    num_bins = len(offsets) - 1
    bin_of = np.repeat(np.arange(num_bins), np.diff(offsets))
    shares = np.asarray(values, dtype=np.float64)[row] / size[row]
    cp = spec.cp_size
    sums = np.bincount(bin_of[row] * cp + rank, weights=shares, minlength=num_bins * cp)
    # [R, M, cp] to [R, cp, M].
    by_rank = sums.reshape(spec.num_ranks, -1, cp).swapaxes(1, 2)
    return by_rank.reshape(spec.num_ranks * cp, -1)


def tokens_of_groups(
    padded: np.ndarray, offsets: np.ndarray, first: np.ndarray, size: np.ndarray, spec: PlanSpec
) -> np.ndarray:
    """Return the positions of each microbatch, int64 [R, M].

    They are those of its groups, and of the dummies of ranks without one. `padded` int64 [n] are
    positions of rows; see `sums_of_ranks` for the others.
    """
    num_bins = len(offsets) - 1
    bin_of = np.repeat(np.arange(num_bins), np.diff(offsets))
    keys, group_of = np.unique(bin_of * spec.cp_size + first, return_inverse=True)
    sizes = np.zeros(len(keys), dtype=np.int64)
    sizes[group_of] = size
    tokens = np.bincount(group_of, padded, minlength=len(keys)).astype(np.int64)
    for each in spec.context_sizes:
        is_of_size = sizes == each
        multiple = spec.of_context(each).total_multiple
        tokens[is_of_size] = round_up(tokens[is_of_size], multiple)
    bins = keys // spec.cp_size
    num_idle = spec.cp_size - np.bincount(bins, sizes, minlength=num_bins).astype(np.int64)
    filled = np.bincount(bins, tokens, minlength=num_bins).astype(np.int64)
    filled += num_idle * spec.of_context(1).dummy_tokens
    return filled.reshape(spec.num_ranks, -1)


def _unit_ids(bins: Packing, shared: np.ndarray | None, groups: np.ndarray | None) -> np.ndarray:
    """Return the unit of each of the n rows of `bins`, int64 [n].

    Rows of a tree of shared prefixes are one unit (`shared` int64 [n]: leading tokens that the row
    before has in common), and so are the rows of a group (`groups` int64 [B] by row id).
    """
    units = np.arange(len(bins.perm))
    if shared is not None and shared.any():
        starts = np.flatnonzero(shared == 0)
        units = starts[np.searchsorted(starts, units, side="right") - 1]
    if groups is None:
        return units
    # The trees of the rows of one group are one unit: the union of both relations.
    unit_of_group: dict[int, int] = {}
    merged: dict[int, int] = {}
    for unit, group in zip(units.tolist(), groups[bins.perm].tolist(), strict=True):
        root = _root(merged, unit)
        other = _root(merged, unit_of_group.setdefault(group, root))
        merged[max(root, other)] = min(root, other)
    return np.array([_root(merged, unit) for unit in units.tolist()], dtype=np.int64)


def _root(merged: dict[int, int], unit: int) -> int:
    while merged.get(unit, unit) != unit:
        unit = merged[unit]
    return unit
