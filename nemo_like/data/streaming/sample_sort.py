"""Lexicographic sort of rows that are spread over the ranks of a process group.

Sample sort (Frazer and McKellar 1970) with regular samples (Shi and Schaeffer 1992): every rank
sorts its rows and contributes samples, pivots are chosen among all samples, and each rank receives
the rows between two pivots. A row is identified by its columns, its rank and its position after the
local sort, so that equal rows can be split between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from nemo_like.integer_math import ceil_div

_DTYPES = (torch.int64, torch.float64)
_NO_PROBLEM, _NOT_ROWS, _HAS_NAN = range(3)
_PROBLEMS = {
    _NOT_ROWS: "gave rows that are no [n, columns] tensor of int64 or float64",
    _HAS_NAN: "gave rows with NaN, which have no order",
}


def sample_sort(
    rows: torch.Tensor, group: dist.ProcessGroup | None = None, num_samples: int = 100
) -> torch.Tensor:
    """Sort the rows of all ranks by the first column, then the second, and so on.

    Collective over `group`; None is the default group, or this process alone without one. The
    result of rank 0, followed by those of rank 1, 2, ..., is the sorted sequence. With N rows on
    all ranks and n_r on rank r, a rank receives at most `N / ranks + c + sum(c_r - 1) + 1` rows,
    where `c_r = ceil(n_r / s)`, c is the largest of them and s is the larger of `num_samples` and
    twice the number of ranks. With n_r <= s on every rank the counts differ by at most 1. Equal
    rows may be split between ranks. The sorted sequence depends on nothing but the rows.

    Args:
        rows: the rows of this rank, int64 or float64 [n, columns]; n may be 0 and may differ
            between ranks, dtype and columns are the same. On a device that the backend supports.
        group: the process group.
        num_samples: rows of each rank among which the pivots are chosen.

    Returns:
        The rows of this rank, [m, columns], same dtype and device.

    Raises:
        ValueError: on every rank, if a rank gave NaN, another dtype or other dimensions, or if
            dtype or columns differ between ranks.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}: give at least 1")
    if group is None and not dist.is_initialized():
        _raise_problem(0, _problem_of(rows))
        return _sort_rows(rows)
    ranks = _Ranks.of(group, rows.device)
    counts = _exchange_counts(rows, ranks)
    if int(counts.sum()) == 0:
        return rows
    rows = _sort_rows(rows)
    pivots = _choose_pivots(rows, counts, ranks, max(num_samples, 2 * ranks.size))
    bounds = [0, *(_rows_up_to(rows, pivot, ranks.rank) for pivot in pivots), len(rows)]
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
    if group is None and not dist.is_initialized():
        return rows
    ranks = _Ranks.of(group, rows.device)
    counts = ranks.all_gather(torch.tensor([len(rows)], device=rows.device))[:, 0].tolist()
    first = sum(counts[: ranks.rank])
    # Row j here is row `first + j` of the sequence, so rank r gets j = r - first modulo the ranks.
    parts = [rows[(rank - first) % ranks.size :: ranks.size] for rank in range(ranks.size)]
    return _exchange_rows(torch.cat(parts), [len(part) for part in parts], ranks)


@dataclass(frozen=True)
class _Ranks:
    """The ranks of a process group and the device of their tensors."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, device: torch.device) -> _Ranks:
        """Return the ranks of a group, or of the default group."""
        if group is None:
            group = dist.group.WORLD
        assert group is not None
        return cls(group, group.rank(), group.size(), device)

    def all_gather(self, values: torch.Tensor) -> torch.Tensor:
        """Gather `values` [...], of the same shape on all ranks, as [ranks, ...]."""
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return torch.stack(gathered)


@dataclass(frozen=True)
class _Pivot:
    """The last row before a boundary between two ranks."""

    row: torch.Tensor
    """[columns], with a scalar per column on the device of the rows."""
    rank: int
    position: int
    """Position of the row among the sorted rows of its rank."""


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


def _exchange_counts(rows: torch.Tensor, ranks: _Ranks) -> torch.Tensor:
    """Gather the number of rows of all ranks, int64 [ranks] on the CPU.

    Problems are raised on all ranks, since the others would wait for a rank that raises alone.
    """
    problem = _problem_of(rows)
    header = torch.tensor([0, 0, 0, problem], device=rows.device)
    if problem != _NOT_ROWS:
        header[:3] = torch.tensor([len(rows), rows.shape[1], _DTYPES.index(rows.dtype)])
    headers = ranks.all_gather(header).cpu()
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
    order = torch.arange(len(rows), device=rows.device)
    for column in reversed(range(rows.shape[1])):
        order = order[torch.argsort(rows[order, column], stable=True)]
    return rows[order]


def _sample_positions(num_rows: int, num_samples: int) -> torch.Tensor:
    """Return the positions of the last rows of up to `num_samples` equal chunks, int64 [samples].

    `num_rows` rows are split into chunks whose sizes differ by at most 1.
    """
    num_chunks = min(num_rows, num_samples)
    if num_chunks == 0:
        return torch.empty(0, dtype=torch.int64)
    return (torch.arange(num_chunks) + 1) * num_rows // num_chunks - 1


def _choose_pivots(
    rows: torch.Tensor, counts: torch.Tensor, ranks: _Ranks, num_samples: int
) -> list[_Pivot]:
    """Choose the last row of every rank but the last from samples of all ranks.

    Takes the sorted `rows` [n, columns] of this rank and the `counts` int64 [ranks] of all. The
    weight of a sample is the number of rows of its chunk, so the rows up to a sample are at least
    the weight of all samples up to it.
    """
    samples = rows.new_zeros((min(num_samples, int(counts.max())), rows.shape[1]))
    own_positions = _sample_positions(len(rows), num_samples)
    samples[: len(own_positions)] = rows[own_positions.to(rows.device)]
    gathered = ranks.all_gather(samples).cpu()
    columns, sample_ranks, positions, weights = [], [], [], []
    for rank, num_rows in enumerate(counts.tolist()):
        of_rank = _sample_positions(num_rows, num_samples)
        columns.append(gathered[rank, : len(of_rank)])
        sample_ranks.append(torch.full_like(of_rank, rank))
        positions.append(of_rank)
        weights.append(torch.diff(of_rank, prepend=torch.tensor([-1])))
    all_rows = torch.cat(columns)
    all_ranks = torch.cat(sample_ranks)
    all_positions = torch.cat(positions)
    order = torch.arange(len(all_rows))
    # The samples are sorted by rank and position already, and the sort is stable.
    for column in reversed(range(all_rows.shape[1])):
        order = order[torch.argsort(all_rows[order, column], stable=True)]
    weight_up_to = torch.cumsum(torch.cat(weights)[order], dim=0)
    num_rows = int(counts.sum())
    targets = torch.tensor([ceil_div(rank * num_rows, ranks.size) for rank in range(1, ranks.size)])
    chosen = order[torch.searchsorted(weight_up_to, targets.to(torch.int64))].tolist()
    return [
        _Pivot(all_rows[index], int(all_ranks[index]), int(all_positions[index]))
        for index in chosen
    ]


def _rows_up_to(rows: torch.Tensor, pivot: _Pivot, rank: int) -> int:
    """Count the sorted rows [n, columns] of `rank` that are not after the pivot."""
    start = 0
    stop = len(rows)
    # Rows that equal the pivot in all columns so far, whose next column is therefore sorted.
    for column, value in enumerate(pivot.row.to(rows.device)):
        values = rows[start:stop, column].contiguous()
        stop = start + int(torch.searchsorted(values, value, right=True))
        start += int(torch.searchsorted(values, value))
    if rank < pivot.rank:
        return stop
    if rank > pivot.rank:
        return start
    return pivot.position + 1


def _exchange_rows(rows: torch.Tensor, num_sent: list[int], ranks: _Ranks) -> torch.Tensor:
    """Send the first `num_sent[0]` rows to rank 0, the following to rank 1, and so on.

    Takes rows [n, columns]; returns the received rows [m, columns] in the order of their ranks.
    """
    sent = torch.tensor(num_sent, device=rows.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ranks.group)
    num_received = received.tolist()
    result = rows.new_empty((sum(num_received), rows.shape[1]))
    dist.all_to_all_single(result, rows.contiguous(), num_received, num_sent, group=ranks.group)
    return result
