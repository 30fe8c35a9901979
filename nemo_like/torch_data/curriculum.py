"""Curriculum: rows in the order of their difficulty, the same for every number of ranks.

A curriculum is either a complete order (`curriculum_order`), or a schedule that raises the
difficulty up to which rows are drawn (`CurriculumSampler`). Both are functions of the difficulties,
the seed, the epoch and the step only; `rank_rows` deals their result to ranks. `sample_sort` sorts
rows that are spread over the ranks of a process group.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from nemo_like.data.row_order import check_rank, epoch_permutation
from nemo_like.integer_math import ceil_div, check_integer
from nemo_like.run.files import replacing

logger = logging.getLogger(__name__)

_DTYPES = (torch.int64, torch.float64)
_NO_PROBLEM, _NOT_ROWS, _HAS_NAN = range(3)
_PROBLEMS = {
    _NOT_ROWS: "gave rows that are not an [n, columns] tensor of int64 or float64",
    _HAS_NAN: "gave rows with NaN, which have no order",
}


def curriculum_order(difficulty: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Return the rows by increasing difficulty, int64 [N].

    `difficulty` is [N] of any real dtype. Rows of equal difficulty are in the order of the epoch
    (`epoch_permutation`). Raises ValueError for a difficulty that is not finite.
    """
    values = _checked_difficulty(difficulty)
    order = epoch_permutation(len(values), seed, epoch)
    return order[np.argsort(values[order], kind="stable")]


def curriculum_keys(
    difficulty: np.ndarray, row_ids: np.ndarray, num_rows: int, *, seed: int, epoch: int
) -> np.ndarray:
    """Return the difficulty, the position in the order of the epoch and the id of rows, float64
    [n, 3].

    Sorted lexicographically, the last column is `curriculum_order`. For rows that are spread over
    ranks, `sample_sort` sorts them and `deal_interleaved` gives each rank what `rank_rows` would.
    `difficulty` is [n] of any real dtype; `row_ids` are integers [n], the indices of the rows among
    all `num_rows` < 2^53. Raises ValueError for a difficulty that is not finite.
    """
    values = _checked_difficulty(difficulty)
    if row_ids.shape != values.shape:
        raise ValueError(f"row_ids has shape {row_ids.shape}: give {values.shape}")
    position_of = np.argsort(epoch_permutation(num_rows, seed, epoch))
    # float64 holds integers of 53 bits exactly.
    return np.stack([values, position_of[row_ids], row_ids], axis=1).astype(np.float64)


def rank_rows(order: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """Return the rows of one rank: every `num_ranks`-th of `order` int64 [N], from `rank` on.

    Ranks have equally many rows to within 1, and at each position rows of nearly the same
    difficulty. Raises ValueError for a rank outside 0 to `num_ranks` - 1.
    """
    check_rank(rank, num_ranks)
    return order[rank::num_ranks]


@dataclass(frozen=True)
class DifficultySchedule:
    """Maximum difficulty of the rows of each step.

    With p = min(step / num_steps, 1), the difficulty is

    * `constant`: end
    * `linear`: start + (end - start) × p
    * `root`: start + (end - start) × p^(1 / degree); degree 2 is the square root
    * `discrete`: `levels[i]`, where i is the number of `boundaries` that are at most the step

    `linear` and `root` are rounded down to multiples of `difficulty_step` before `num_steps`, but
    not below the easier of start and end: few lengths, for kernels that need multiples.
    """

    kind: Literal["constant", "linear", "root", "discrete"]
    start: float = 0.0
    end: float = 0.0
    num_steps: int = 1
    degree: float = 2.0
    levels: tuple[float, ...] = ()
    boundaries: tuple[int, ...] = ()
    difficulty_step: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "root", "discrete"):
            raise ValueError(f"kind is {self.kind!r}: give constant, linear, root or discrete")
        check_integer("num_steps", self.num_steps, 1)
        if not self.degree > 0:
            raise ValueError(f"degree is {self.degree}: give a number above 0")
        if self.difficulty_step is not None and not self.difficulty_step > 0:
            raise ValueError(f"difficulty_step is {self.difficulty_step}: give a number above 0")
        for name in ("start", "end", "levels"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} is {getattr(self, name)}: give finite numbers")
        if self.kind != "discrete":
            return
        if len(self.levels) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.levels)} levels have {len(self.boundaries)} boundaries: give one "
                "boundary, a step, between each two levels"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"boundaries are {self.boundaries}: give increasing steps")

    def at(self, step: int) -> float:
        """Return the maximum difficulty of a step, counted from 0."""
        if self.kind == "constant":
            return self.end
        if self.kind == "discrete":
            return self.levels[bisect_right(self.boundaries, step)]
        progress = min(step / self.num_steps, 1.0)
        if self.kind == "root":
            progress = progress ** (1 / self.degree)
        difficulty = self.start + (self.end - self.start) * progress
        if self.difficulty_step is None or progress == 1.0:
            return difficulty
        rounded = difficulty // self.difficulty_step * self.difficulty_step
        return max(rounded, min(self.start, self.end))


class CurriculumSampler:
    """Draws the rows of each step from those up to the difficulty of a schedule.

    Rows that become eligible join the others, and rows are drawn in the order of the epoch
    (`epoch_permutation`). An epoch has each row exactly once. If fewer rows are eligible than a
    step requires, the difficulty is raised until there are enough: rows are never repeated. Such
    steps are counted in `num_early_raises`, and the first, second, fourth, eighth, ... is logged.
    The last step of an epoch may have fewer rows.

    Every rank draws the same rows and selects its own with `rank_rows`.

    Example: difficulties 1 to 8 and the levels 2, 4, 8 at steps 0, 1, 2: with two rows per step,
    step 0 has rows 0 and 1, step 1 rows 2 and 3, the following any of the others.
    """

    def __init__(
        self, difficulty: np.ndarray, schedule: DifficultySchedule, *, seed: int = 0
    ) -> None:
        """Initialize from `difficulty` [N] of any real dtype. Raises ValueError."""
        self.epoch = 0
        """Number of `start_epoch` calls."""
        self.step = 0
        """Number of `take` calls in all epochs."""
        self.num_early_raises = 0
        """Steps in all epochs whose difficulty was raised above the schedule."""
        self._difficulty = _checked_difficulty(difficulty)
        self._ascending = np.sort(self._difficulty)
        self._schedule = schedule
        self._seed = seed
        self._reset_epoch()

    @property
    def num_left(self) -> int:
        """Rows of this epoch that were not drawn yet."""
        return len(self._left)

    def take(self, num_rows: int) -> np.ndarray:
        """Draw the rows of the next step, int64 [n]; n is less than `num_rows` at the end only.

        Raises ValueError for `num_rows` below 1, and at the end of an epoch.
        """
        check_integer("num_rows", num_rows, 1)
        if self.num_left == 0:
            raise ValueError(f"epoch {self.epoch} has no more rows: call start_epoch first")
        scheduled = self._schedule.at(self.step)
        self._join_up_to(scheduled)
        eligible = self._eligible()
        num_missing = min(num_rows, self.num_left) - len(eligible)
        if num_missing > 0:
            # Rows beyond the eligible ones have not been drawn.
            required = self._ascending[self._num_joined + num_missing - 1]
            self._join_up_to(required)
            eligible = self._eligible()
            self.num_early_raises += 1
            self._log_early_raise(scheduled, required)
        drawn = eligible[:num_rows]
        rows = self._left[drawn]
        self._left = np.delete(self._left, drawn)
        self.step += 1
        return rows

    def start_epoch(self) -> None:
        """Make all rows available again; steps of the schedule continue.

        Raises ValueError if the epoch has rows left.
        """
        if self.num_left:
            raise ValueError(f"epoch {self.epoch} has {self.num_left} rows left: draw them first")
        self.epoch += 1
        self._reset_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON serializable: N / 4 characters for the drawn rows."""
        is_drawn = np.ones(len(self._difficulty), dtype=bool)
        is_drawn[self._left] = False
        return {
            "num_rows": len(self._difficulty),
            "seed": self._seed,
            "epoch": self.epoch,
            "step": self.step,
            "num_early_raises": self.num_early_raises,
            "num_joined": self._num_joined,
            "drawn": np.packbits(is_drawn).tobytes().hex(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a position exactly.

        Raises ValueError if the state has another number of rows or another seed.
        """
        expected = {"num_rows": len(self._difficulty), "seed": self._seed}
        for name, value in expected.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"the state has {name}={state_dict[name]}, this sampler {value}: use the rows "
                    "and the seed of the state"
                )
        self.epoch = state_dict["epoch"]
        self.step = state_dict["step"]
        self.num_early_raises = state_dict["num_early_raises"]
        self._reset_epoch()
        self._num_joined = state_dict["num_joined"]
        bits = np.frombuffer(bytes.fromhex(state_dict["drawn"]), dtype=np.uint8)
        is_drawn = np.unpackbits(bits, count=len(self._difficulty)).astype(bool)
        self._left = self._left[~is_drawn[self._left]]

    def _reset_epoch(self) -> None:
        """Make all rows of the present epoch available and none eligible."""
        self._left = epoch_permutation(len(self._difficulty), self._seed, self.epoch)
        # Rows by difficulty, drawn ones included, that are eligible.
        self._num_joined = 0

    def _join_up_to(self, difficulty: float) -> None:
        num_joined = int(np.searchsorted(self._ascending, difficulty, side="right"))
        self._num_joined = max(self._num_joined, num_joined)

    def _eligible(self) -> np.ndarray:
        """Return the positions of the eligible rows in `_left`, int64 [n]."""
        if self._num_joined == 0:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(self._difficulty[self._left] <= self._ascending[self._num_joined - 1])

    def _log_early_raise(self, scheduled: float, required: float) -> None:
        # A schedule that ends below the largest difficulty raises it on very many steps.
        if self.num_early_raises.bit_count() > 1:
            return
        logger.warning(
            "step %d raised the difficulty from %g to %g, since too few rows were left "
            "(%d such steps so far)",
            self.step,
            scheduled,
            required,
            self.num_early_raises,
        )


def _checked_difficulty(difficulty: np.ndarray) -> np.ndarray:
    """Return `difficulty` as float64 [N]; raises ValueError unless all are finite."""
    values = np.asarray(difficulty, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"difficulty has shape {values.shape}: give [N]")
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"row {row} has difficulty {values[row]}: give a finite number")
    return values


def sample_sort(
    tensor: torch.Tensor,
    comm_group: dist.ProcessGroup | None = None,
    num_workers: int | None = None,
    n_samples: int = 100,
) -> torch.Tensor:
    """Sort the rows of all ranks by the first column, then the second, and so on.

    The arguments are as in DeepSpeed. Collective over `comm_group`; None is the default group,
    or this process alone without one. The result of rank 0, followed by the results of ranks 1, 2,
    ..., is the sorted sequence. With N rows on all ranks and n_r on rank r, a rank receives at most
    `N / ranks + c + sum(c_r - 1) + 1` rows, where `c_r = ceil(n_r / s)`, c is the largest of them
    and s is the larger of `n_samples` and twice the number of ranks. With n_r <= s on every rank
    the counts differ by at most 1. Equal rows may be split between ranks. The sorted sequence
    depends on nothing but the rows.

    Sample sort (Frazer and McKellar 1970) with regular samples (Shi and Schaeffer 1992): every rank
    sorts its rows and contributes samples, pivots are chosen among all samples, and each rank
    receives the rows between two pivots. A row is identified by its columns, its rank and its
    position after the local sort, so that equal rows can be split between ranks.

    Args:
        tensor: the rows of this rank, int64 or float64 [n, columns]; n may be 0 and may differ
            between ranks, dtype and columns are the same. On a device that the backend supports.
        comm_group: the process group.
        num_workers: its number of ranks, which is only checked.
        n_samples: rows of each rank among which the pivots are chosen.

    Returns:
        The rows of this rank, [m, columns], same dtype and device.

    Raises:
        ValueError: on every rank, if a rank gave NaN, another dtype or other dimensions, or if
            dtype or columns differ between ranks, or for another `num_workers`.
    """
    check_integer("n_samples", n_samples, 1)
    ranks = _ranks_of(comm_group)
    num_ranks = ranks.size() if ranks else 1
    if num_workers not in (None, num_ranks):
        raise ValueError(f"num_workers is {num_workers}: the group has {num_ranks} ranks")
    if ranks is None:
        _raise_problem(0, _problem_of(tensor))
        return _sort_rows(tensor)
    counts = _exchange_counts(tensor, ranks)
    if int(counts.sum()) == 0:
        return tensor
    rows = _sort_rows(tensor)
    pivots = _choose_pivots(rows, counts, ranks, max(n_samples, 2 * ranks.size()))
    bounds = [0, *(_rows_up_to(rows, *pivot, ranks.rank()) for pivot in pivots), len(rows)]
    num_sent = [stop - start for start, stop in pairwise(bounds)]
    return _sort_rows(_exchange_rows(rows, num_sent, ranks))


def deal_interleaved(rows: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Give row i of a sequence that is spread over the ranks to rank `i % ranks`.

    Collective over `group`, as `sample_sort`, whose result is such a sequence: rank 0 has its first
    rows, rank 1 the following, and so on. The ranks then have equally many rows to within 1, and
    row i of every rank has nearly the same position in the sequence.

    Takes the rows of this rank, [n, columns] of any dtype; n may be 0. Returns the rows of this
    rank in the order of the sequence, [m, columns].

    Example: ranks with [a, b, c] and [d] have [a, c] and [b, d] afterwards.
    """
    ranks = _ranks_of(group)
    if ranks is None:
        return rows
    counts = _all_gather(torch.tensor([len(rows)], device=rows.device), ranks)[:, 0].tolist()
    first = sum(counts[: ranks.rank()])
    # Row j here is row `first + j` of the sequence, so rank r gets j = r - first modulo the ranks.
    size = ranks.size()
    parts = [rows[(rank - first) % size :: size] for rank in range(size)]
    return _exchange_rows(torch.cat(parts), [len(part) for part in parts], ranks)


def file_write_ordered(
    tensor: torch.Tensor, fname: str | Path, comm_group: dist.ProcessGroup | None = None
) -> None:
    """Write the rows of all ranks, in the order of the ranks, to one .npy file [N, ...].

    Collective over `comm_group`, as `sample_sort`, whose result it writes as one sorted file for
    `numpy.load(fname, mmap_mode="r")`. Rank 0 receives one rank after the other and writes all: it
    holds the rows of two ranks at most, and the others need not see its file system. The file
    appears, or is replaced, when it is complete, before any rank returns.

    `tensor` is [n, ...] of any dtype that NumPy has; n may be 0, the rest is equal on all ranks.
    Raises WriteError on rank 0.
    """
    ranks = _ranks_of(comm_group)
    if ranks is None:
        with replacing(Path(fname)) as path:
            _write_npy(path, [tensor], len(tensor))
        return
    counts = _all_gather(torch.tensor([len(tensor)], device=tensor.device), ranks)[:, 0].tolist()
    parts = _parts_on_rank_0(tensor, ranks)
    if ranks.rank() == 0:
        with replacing(Path(fname)) as path:
            _write_npy(path, parts, sum(counts))
    else:
        for _ in parts:
            pass
    # The file is complete when all ranks are here.
    _all_gather(tensor.new_zeros(1), ranks)


def _parts_on_rank_0(tensor: torch.Tensor, ranks: dist.ProcessGroup) -> Iterator[torch.Tensor]:
    """Yield the rows of each rank in turn, on rank 0; other ranks get empty tensors."""
    for rank in range(ranks.size()):
        own = tensor if rank == ranks.rank() else tensor[:0]
        yield _exchange_rows(own, [len(own)] + [0] * (ranks.size() - 1), ranks)


def _write_npy(path: Path, parts: Iterable[torch.Tensor], num_rows: int) -> None:
    """Write `parts`, [n, ...] each, one after the other as an array of `num_rows` rows."""
    with path.open("wb") as file:
        for number, part in enumerate(parts):
            rows = np.ascontiguousarray(part.cpu().numpy())
            if number == 0:
                descr = np.lib.format.dtype_to_descr(rows.dtype)
                shape = (num_rows, *rows.shape[1:])
                header = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
            rows.tofile(file)


def _ranks_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return `group`, by default the default group; None without one: this process is alone."""
    if group is None and dist.is_initialized():
        return dist.group.WORLD
    return group


def _all_gather(values: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    """Gather `values` [...], of the same shape on all ranks, as [ranks, ...]."""
    gathered = [torch.empty_like(values) for _ in range(ranks.size())]
    dist.all_gather(gathered, values.contiguous(), group=ranks)
    return torch.stack(gathered)


def _problem_of(rows: torch.Tensor) -> int:
    """Return which of the problems `rows` has."""
    if rows.ndim != 2 or rows.dtype not in _DTYPES or rows.shape[1] == 0:
        return _NOT_ROWS
    if rows.is_floating_point() and bool(rows.isnan().any()):
        return _HAS_NAN
    return _NO_PROBLEM


def _raise_problem(rank: int, problem: int) -> None:
    """Raise ValueError for the rows of a rank that have a problem."""
    if problem != _NO_PROBLEM:
        raise ValueError(f"rank {rank} {_PROBLEMS[problem]}")


def _exchange_counts(rows: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    """Gather the number of rows of all ranks, int64 [ranks] on the CPU.

    Problems are raised on all ranks, since the others would wait for a rank that raises alone.
    """
    problem = _problem_of(rows)
    header = torch.tensor([0, 0, 0, problem], device=rows.device)
    if problem != _NOT_ROWS:
        header[:3] = torch.tensor([len(rows), rows.shape[1], _DTYPES.index(rows.dtype)])
    headers = _all_gather(header, ranks).cpu()
    for rank, values in enumerate(headers.tolist()):
        _raise_problem(rank, values[3])
        if values[1:3] != headers[0, 1:3].tolist():
            num_columns, dtype = values[1:3]
            raise ValueError(
                f"rank {rank} has {num_columns} columns of {_DTYPES[dtype]}, rank 0 has "
                f"{int(headers[0, 1])} of {_DTYPES[int(headers[0, 2])]}: give the same on all ranks"
            )
    return headers[:, 0]


def _sort_rows(rows: torch.Tensor) -> torch.Tensor:
    """Sort rows [n, columns] lexicographically and stably."""
    return rows[_sorted_order(rows)]


def _sorted_order(rows: torch.Tensor) -> torch.Tensor:
    """Return the order that sorts rows [n, columns] lexicographically and stably, int64 [n]."""
    order = torch.arange(len(rows), device=rows.device)
    for column in reversed(range(rows.shape[1])):
        order = order[torch.argsort(rows[order, column], stable=True)]
    return order


def _sample_positions(num_rows: int, num_samples: int) -> torch.Tensor:
    """Return the positions of the last rows of up to `num_samples` equal chunks, int64 [samples].

    `num_rows` rows are split into chunks whose sizes differ by at most 1.
    """
    num_chunks = min(num_rows, num_samples)
    if num_chunks == 0:
        return torch.empty(0, dtype=torch.int64)
    return (torch.arange(num_chunks) + 1) * num_rows // num_chunks - 1


def _choose_pivots(
    rows: torch.Tensor, counts: torch.Tensor, ranks: dist.ProcessGroup, num_samples: int
) -> list[tuple[torch.Tensor, int, int]]:
    """Choose the last row of every rank but the last from samples of all ranks.

    Takes the sorted `rows` [n, columns] of this rank and the `counts` int64 [ranks] of all. Returns
    for each pivot its columns, its rank and its position among the sorted rows of its rank. The
    weight of a sample is the number of rows of its chunk, so the rows up to a sample are at least
    the weight of all samples up to it.
    """
    samples = rows.new_zeros((min(num_samples, int(counts.max())), rows.shape[1]))
    own_positions = _sample_positions(len(rows), num_samples)
    samples[: len(own_positions)] = rows[own_positions.to(rows.device)]
    gathered = _all_gather(samples, ranks).cpu()
    positions = [_sample_positions(num_rows, num_samples) for num_rows in counts.tolist()]
    weights = torch.cat([torch.diff(own, prepend=torch.tensor([-1])) for own in positions])
    all_rows = torch.cat([gathered[rank, : len(own)] for rank, own in enumerate(positions)])
    all_ranks = torch.cat([torch.full_like(own, rank) for rank, own in enumerate(positions)])
    all_positions = torch.cat(positions)
    # The samples are sorted by rank and position already, and the sort is stable.
    order = _sorted_order(all_rows)
    weight_up_to = torch.cumsum(weights[order], dim=0)
    num_rows = int(counts.sum())
    size = ranks.size()
    targets = torch.tensor([ceil_div(rank * num_rows, size) for rank in range(1, size)])
    chosen = order[torch.searchsorted(weight_up_to, targets.to(torch.int64))].tolist()
    return [(all_rows[i], int(all_ranks[i]), int(all_positions[i])) for i in chosen]


def _rows_up_to(
    rows: torch.Tensor, pivot: torch.Tensor, pivot_rank: int, position: int, rank: int
) -> int:
    """Count the sorted rows [n, columns] of `rank` that are not after the pivot [columns]."""
    start = 0
    stop = len(rows)
    # Rows that equal the pivot in all columns so far, whose next column is therefore sorted.
    for column, value in enumerate(pivot.to(rows.device)):
        values = rows[start:stop, column].contiguous()
        stop = start + int(torch.searchsorted(values, value, right=True))
        start += int(torch.searchsorted(values, value))
    if rank < pivot_rank:
        return stop
    if rank > pivot_rank:
        return start
    return position + 1


def _exchange_rows(
    rows: torch.Tensor, num_sent: list[int], ranks: dist.ProcessGroup
) -> torch.Tensor:
    """Send the first `num_sent[0]` rows to rank 0, the following to rank 1, and so on.

    Takes rows [n, columns]; returns the received rows [m, columns] in the order of their ranks.
    """
    sent = torch.tensor(num_sent, device=rows.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks)
    num_received = received.tolist()
    result = rows.new_empty((sum(num_received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), num_received, num_sent, group=ranks)
    return result
