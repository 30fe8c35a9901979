"""The schedule: rows to microbatches and microbatches to data-parallel ranks, decided together from
lengths and work.

What every schedule keeps, whatever the lengths:
* each row is in one bin, and the rows of a group are in the same one;
* no bin holds more than `max_tokens`;
* every rank has the same number of bins, a multiple of `microbatch_multiple`, and the least
  possible where a start fits;
* no bin is empty unless there are fewer rows (or groups) than bins;
* the same arguments give the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning import balance_kernels
from nemo_like.data.planning.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.cost import CostModel
from nemo_like.data.planning.local_search import Refiner, Rows

Sync = Literal["microbatch", "step"]

_STEPS_PER_ROW = 1000
"""Refinement steps per row at effort 1: past it little is gained. A compiled step takes some 2
ns.
"""
_MAX_INTERPRETED_STEPS = 200_000
"""Refinement steps at effort 1 without compiled code, where a step takes some 1 us."""
_LEVEL_ENOUGH = 4e-3
"""Ranks of r rows each are level when the dearest is above the mean by this share over r: the fewer
rows, the coarser.
"""
_MIN_COMPILED_ROWS = 128
"""Rows from which compiled code is worth importing numba for."""
_MAX_EQUAL_ROWS = _MAX_INTERPRETED_STEPS // _STEPS_PER_ROW
"""Rows up to which an interpreted search takes as many steps as a compiled one, and so finds the
same schedule.
"""
_few_plans: ContextVar[bool] = ContextVar("few_plans", default=False)


@dataclass(frozen=True, eq=False)
class Schedule:
    """Bins as two arrays, rank-major: bin m of rank r is rows `perm[offsets[r * M + m] : offsets[r
    * M + m + 1]]`.

    The bins of a rank are in order of their work, dearest first.

    Example: two ranks of two microbatches, `perm=[0, 3, 1, 2]` and `offsets=[0, 1, 2, 4, 4]`: rank
    0 runs rows [0] and [3], rank 1 runs rows [1, 2] and, as rows have run out, an empty bin.
    """

    perm: np.ndarray
    """int64 [n], each row once."""
    offsets: np.ndarray
    """int64 [R * M + 1]."""
    num_ranks: int
    num_microbatches: int
    """M, of every rank; 0 where there are no rows."""
    min_microbatches: int
    """The least M any schedule of these rows can have, as far as the L2 bound proves."""
    max_tokens: int
    lengths: np.ndarray
    """int64 [n], as given."""
    work: np.ndarray
    """float64 [n], as given or by the cost model."""

    def bins(self) -> list[list[list[int]]]:
        """Rows by rank and microbatch."""
        rows, bounds, count = self.perm.tolist(), self.offsets.tolist(), self.num_microbatches
        flat = [rows[start:stop] for start, stop in pairwise(bounds)]
        return [flat[rank * count : (rank + 1) * count] for rank in range(self.num_ranks)]

    @cached_property
    def bin_tokens(self) -> np.ndarray:
        """int64 [R, M]."""
        return self._by_bin(self.lengths)

    @cached_property
    def bin_work(self) -> np.ndarray:
        """float64 [R, M]."""
        return self._by_bin(self.work)

    @cached_property
    def stats(self) -> dict[str, float]:
        """What the schedule is like, beside what is proven of the best one.

        `rank_imbalance` is the dearest rank over the larger of the mean rank and the dearest row,
        `lockstep_ratio` the sum over microbatches of the dearest rank over the same.
        `rank_over_bound` and `lockstep_over_bound` are the two over the least they can be under
        this cap with this many microbatches: 1 is proven to be the best.
        """
        rank_work, lockstep = (
            self.bin_work.sum(axis=1),
            float(self.bin_work.max(axis=0, initial=0.0).sum()),
        )
        floor = (
            max(float(self.work.sum()) / self.num_ranks, float(self.work.max(initial=0.0))) or 1.0
        )
        shape = (self.lengths, self.work, self.max_tokens, self.num_ranks, self.num_microbatches)
        may_be_empty = bool((np.diff(self.offsets) == 0).any())
        dearest = float(rank_work.max(initial=0.0))
        return {
            "num_microbatches": float(self.num_microbatches),
            "min_microbatches": float(self.min_microbatches),
            "utilization": float(self.lengths.sum())
            / max(1, self.bin_tokens.size * self.max_tokens),
            "rank_imbalance": dearest / floor,
            "rank_over_bound": dearest / max(rank_bound(*shape, may_be_empty=may_be_empty), floor),
            "lockstep_ratio": lockstep / floor,
            "lockstep_over_bound": lockstep / max(lockstep_bound(*shape), floor),
        }

    def _by_bin(self, values: np.ndarray) -> np.ndarray:
        num_bins = len(self.offsets) - 1
        sums = np.bincount(
            np.repeat(np.arange(num_bins), np.diff(self.offsets)),
            values[self.perm],
            minlength=num_bins,
        )
        return sums.astype(values.dtype).reshape(self.num_ranks, self.num_microbatches)


@contextmanager
def few_plans() -> Iterator[None]:
    """Within the block, batches of up to 200 rows are planned without numba; the plans are the
    same.

    Importing numba takes more than a second of CPU time, which a process that plans a few steps
    does not get back: without it such a plan takes at most some 0.03 s.
    """
    token = _few_plans.set(True)
    try:
        yield
    finally:
        _few_plans.reset(token)


def schedule(
    lengths: Sequence[int] | np.ndarray,
    max_tokens: int,
    num_ranks: int,
    *,
    work: CostModel | np.ndarray | None = None,
    sync: Sync = "microbatch",
    microbatch_multiple: int = 1,
    min_microbatches: int = 1,
    groups: Sequence[int] | np.ndarray | None = None,
    packed_bins: tuple[np.ndarray, np.ndarray] | None = None,
    effort: float = 1.0,
    use_numba: bool | None = None,
) -> Schedule:
    """Rows to bins and bins to ranks under a hard cap, with the fewest microbatches and then the
    least waiting.

    `lengths` int [n] are the tokens each row occupies, `work` float [n] what it costs, or the cost
    model that says. With `sync="microbatch"` the sum over microbatches of the dearest rank is made
    small, with `"step"` the dearest rank's total. `groups` int [n]: rows of equal value stay in one
    bin, in their given order. `packed_bins` (perm, offsets) are a packer's bins to start from
    besides our own. `effort` scales the bound on refinement, 0 is none. `use_numba`: None compiles
    where numba is installed and there are rows enough, False interprets with less effort, True
    insists.

    Raises ValueError for a row or group above `max_tokens`, for counts below 1 and for arrays that
    do not match.

    Example: `schedule([6, 4, 4, 4, 2], max_tokens=10, num_ranks=2).bins()` is `[[[0, 3]], [[1, 2,
    4]]]`, two full bins.
    """
    counts = {
        "max_tokens": max_tokens,
        "num_ranks": num_ranks,
        "microbatch_multiple": microbatch_multiple,
    }
    _check_settings(counts, sync, effort)
    lengths = _checked_lengths(lengths)
    work = _checked_work(work, lengths)
    if len(lengths) == 0:
        return Schedule(
            np.empty(0, np.int64), np.zeros(1, np.int64), num_ranks, 0, 0, max_tokens, lengths, work
        )
    group_of, rows = _sorted_groups(groups, lengths, work)
    _check_cap(group_of, rows.tokens, max_tokens, groups is not None)
    packed = (
        None
        if packed_bins is None
        else _group_packing(packed_bins, group_of, rows.tokens, max_tokens)
    )
    least = max(min_microbatches, -(-l2_bound(rows.tokens, max_tokens) // num_ranks))
    fewest = num_microbatches = -(-least // microbatch_multiple) * microbatch_multiple
    kernels = _kernels(use_numba, len(rows))
    max_steps = (
        _STEPS_PER_ROW * len(rows)
        if kernels
        else min(_STEPS_PER_ROW * len(rows), _MAX_INTERPRETED_STEPS)
    )
    refine = _lockstep if sync == "microbatch" else _by_step
    while True:
        refiner = Refiner(rows, max_tokens, num_ranks, num_microbatches * num_ranks, kernels)
        found = refine(refiner, packed, int(effort * max_steps))
        if found is not None:
            break
        num_microbatches += microbatch_multiple
    bin_of, rank_of = found
    slots = _slots(refiner.bin_work(bin_of), rank_of)
    perm, offsets = _in_slots(slots[bin_of[group_of]], group_of, refiner.num_bins)
    return Schedule(perm, offsets, num_ranks, num_microbatches, fewest, max_tokens, lengths, work)


def assign_bins(
    bin_work: Sequence[float] | np.ndarray,
    num_ranks: int,
    *,
    sync: Sync = "microbatch",
    microbatch_multiple: int = 1,
) -> np.ndarray:
    """Given bins to ranks, none of them changed: bin ids int64 [R, M], -1 where there is none,
    dearest first on each rank.

    M is the least multiple of `microbatch_multiple` with a place for every bin of `bin_work` [K].
    Microbatches of bins of like work make the sum of their dearest least; with `sync="step"` bins
    are then exchanged between ranks.

    Example: work [5, 1, 4, 2] over 2 ranks is `[[0, 1], [2, 3]]`: lockstep 5 + 2, ranks 6 and 6.
    """
    _check_settings({"num_ranks": num_ranks, "microbatch_multiple": microbatch_multiple}, sync, 0.0)
    work = np.asarray(bin_work, dtype=np.float64)
    num_microbatches = -(-len(work) // (num_ranks * microbatch_multiple)) * microbatch_multiple
    order = np.argsort(-work, kind="stable")
    rows = Rows(np.ones(len(work), dtype=np.int64), work[order])
    refiner = Refiner(rows, 1, num_ranks, num_microbatches * num_ranks, _kernels(None, len(work)))
    bin_of = np.arange(len(work))
    rank_of = refiner.deal(refiner.bin_work(bin_of))
    if sync == "step" and len(work):
        bin_of, _ = refiner.level_ranks(
            bin_of, rank_of, min(_STEPS_PER_ROW * len(work), _MAX_INTERPRETED_STEPS)
        )
    ids = np.full(refiner.num_bins, -1)
    ids[_slots(refiner.bin_work(bin_of), rank_of)[bin_of]] = order
    return ids.reshape(num_ranks, num_microbatches)


def _lockstep(
    refiner: Refiner, packed: Packing | None, max_steps: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Bins levelled by microbatch: (bin of each row, rank of each bin), or None where no start
    fits.

    Every start is tried and the best one finished; best fit decreasing, good at nothing but
    fitting, is the last resort.
    """
    starts = [refiner.complete(), refiner.fill(refiner.targets()), refiner.spread(packed)]
    starts = [start for start in starts if start is not None] or [refiner.best_fit()]
    tried, left = [], max_steps
    for start in starts:
        if start is None:
            return None
        bin_of, steps = refiner.level_bins(start, max_steps // (2 * len(starts)))
        left -= steps
        tried.append(bin_of)
    bin_of, _ = refiner.level_bins(min(tried, key=refiner.lockstep_work), left)
    return bin_of, refiner.deal(refiner.bin_work(bin_of))


def _by_step(
    refiner: Refiner, packed: Packing | None, max_steps: int
) -> tuple[np.ndarray, np.ndarray] | None:
    """Ranks levelled: (bin of each row, rank of each bin), or None where no start fits.

    Tried from one start after the other as it is, then with its bins levelled first, until ranks
    are as level as can be.
    """
    floor = refiner.rank_bound()
    starts = [
        partial(refiner.fill, np.zeros(refiner.num_bins)),
        refiner.complete,
        partial(refiner.spread, packed),
        refiner.best_fit,
    ]
    enough = floor * (1 + _LEVEL_ENOUGH * refiner.num_ranks / len(refiner.rows))
    best, least, left = None, np.inf, max_steps
    for bin_steps, start in [
        (bin_steps, start) for bin_steps in (0, max_steps // 3) for start in starts
    ]:
        bin_of = start()
        if bin_of is None:
            continue
        bin_of, steps = refiner.level_bins(bin_of, min(bin_steps, left))
        rank_of = refiner.deal(refiner.bin_work(bin_of))
        rank_of, bin_exchange_steps = refiner.exchange_bins(
            bin_of, rank_of, min(max_steps // 6, left - steps)
        )
        steps += bin_exchange_steps
        bin_of, more_steps = refiner.level_ranks(
            bin_of, rank_of, max(0, min(max_steps // 6, left - steps))
        )
        left -= steps + more_steps
        work = refiner.max_rank_work(bin_of, rank_of)
        if work < least:
            best, least = (bin_of, rank_of), work
        if least <= enough or left <= 0:
            break
    if best is None:
        return None
    bin_of, _ = refiner.level_ranks(*best, max(left, max_steps // 6))
    return bin_of, best[1]


def _slots(bin_work: np.ndarray, rank_of: np.ndarray) -> np.ndarray:
    """The place of each bin, int64 [K]: by rank, within a rank dearest first."""
    slots = np.empty(len(bin_work), dtype=np.int64)
    slots[np.lexsort((-bin_work, rank_of))] = np.arange(len(bin_work))
    return slots


def _in_slots(
    slot_of: np.ndarray, group_of: np.ndarray, num_slots: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows sorted by slot, within a slot by group (dearest first), within a group as given: (perm,
    offsets).
    """
    offsets = np.zeros(num_slots + 1, dtype=np.int64)
    np.cumsum(np.bincount(slot_of, minlength=num_slots), out=offsets[1:])
    return np.lexsort((group_of, slot_of)), offsets


def _sorted_groups(
    groups: Sequence[int] | np.ndarray | None, lengths: np.ndarray, work: np.ndarray
) -> tuple[np.ndarray, Rows]:
    """(the group of each row, numbered by decreasing work, int64 [n]; tokens and work of the
    groups).
    """
    if groups is None:
        order = np.argsort(-work, kind="stable")
        group_of = np.empty(len(order), dtype=np.int64)
        group_of[order] = np.arange(len(order))
        return group_of, Rows(lengths[order], work[order])
    groups = np.asarray(groups)
    if groups.shape != lengths.shape:
        raise ValueError(
            f"groups has shape {groups.shape} but there are {len(lengths)} rows; give one group id"
            f" per row"
        )
    ids = np.unique(groups, return_inverse=True)[1].reshape(-1)
    tokens, group_work = np.bincount(ids, lengths).astype(np.int64), np.bincount(ids, work)
    order = np.argsort(-group_work, kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    return rank[ids], Rows(tokens[order], group_work[order])


def _group_packing(
    packed_bins: tuple[np.ndarray, np.ndarray],
    group_of: np.ndarray,
    tokens: np.ndarray,
    max_tokens: int,
) -> Packing:
    """A packing of rows as one of their groups; raises ValueError if it is no packing of these rows
    under the cap.
    """
    perm, offsets = (np.asarray(array, dtype=np.int64) for array in packed_bins)
    sizes = np.diff(offsets)
    if (
        len(perm) != len(group_of)
        or offsets[-1] != len(perm)
        or np.any(np.bincount(perm, minlength=len(perm)) != 1)
    ):
        raise ValueError(
            f"packed_bins must hold each of the {len(group_of)} rows once; got {len(perm)} rows"
        )
    bin_of_row = np.empty(len(perm), dtype=np.int64)
    bin_of_row[perm] = np.repeat(np.arange(len(sizes)), sizes)
    bin_of = np.empty(len(tokens), dtype=np.int64)
    bin_of[group_of] = bin_of_row
    if np.any(bin_of[group_of] != bin_of_row):
        raise ValueError("packed_bins splits a group over bins; pack groups whole")
    loads = np.bincount(bin_of, tokens, minlength=len(sizes))
    if loads.max() > max_tokens:
        b, load = int(loads.argmax()), int(loads.max())
        raise ValueError(
            f"bin {b} of packed_bins holds {load} tokens, above max_tokens={max_tokens}"
        )
    used = np.flatnonzero(np.bincount(bin_of, minlength=len(sizes)))
    group_offsets = np.concatenate(
        [[0], np.cumsum(np.bincount(bin_of, minlength=len(sizes))[used])]
    )
    return Packing(np.argsort(bin_of, kind="stable"), group_offsets)


def _kernels(use_numba: bool | None, num_rows: int) -> Any | None:
    min_rows = _MAX_EQUAL_ROWS + 1 if _few_plans.get() else _MIN_COMPILED_ROWS
    if use_numba is False or (use_numba is None and num_rows < min_rows):
        return None
    kernels = balance_kernels.compiled()
    if use_numba and kernels is None:
        raise ValueError(
            "use_numba=True but numba is not installed; install nemo-like[speed] or leave use_numba"
            " at None"
        )
    return kernels


def _checked_lengths(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    array = np.asarray(lengths)
    if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are one list of integers; got {array.dtype} of shape {array.shape}"
        )
    if len(array) and array.min() < 1:
        row = int(array.argmin())
        raise ValueError(f"row {row} has length {array[row]}; a row has at least one token")
    return array.astype(np.int64)


def _checked_work(work: CostModel | np.ndarray | None, lengths: np.ndarray) -> np.ndarray:
    if work is None or isinstance(work, CostModel):
        return (work or CostModel()).of(lengths)
    array = np.asarray(work, dtype=np.float64)
    if array.shape != lengths.shape:
        raise ValueError(
            f"work has shape {array.shape} but there are {len(lengths)} rows; give one number per"
            f" row"
        )
    if len(array) and not (np.isfinite(array).all() and array.min() >= 0):
        row = int(np.flatnonzero(~(np.isfinite(array) & (array >= 0)))[0])
        raise ValueError(f"row {row} has work {array[row]}; work is a finite number >= 0")
    return array


def _check_cap(group_of: np.ndarray, tokens: np.ndarray, max_tokens: int, has_groups: bool) -> None:
    if tokens.max() <= max_tokens:
        return
    rows = np.flatnonzero(group_of == tokens.argmax()).tolist()
    what = f"the group of rows {rows}" if has_groups and len(rows) > 1 else f"row {rows[0]}"
    raise ValueError(
        f"{what} has {tokens.max()} tokens, above max_tokens={max_tokens}; raise the cap or shorten"
        f" it"
    )


def _check_settings(counts: dict[str, int], sync: str, effort: float) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is an integer >= 1; got {value}")
    if sync not in get_args(Sync):
        raise ValueError(f"sync is one of {', '.join(get_args(Sync))}; got {sync!r}")
    if not effort >= 0:
        raise ValueError(f"effort is a number >= 0; got {effort}")
