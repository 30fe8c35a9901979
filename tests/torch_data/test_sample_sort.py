"""Sample sort across ranks against Python's sort: any distribution of rows, balanced results."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.torch_data.curriculum import (
    curriculum_keys,
    curriculum_order,
    deal_interleaved,
    rank_rows,
    sample_sort,
)
from tests.policy.thread_ranks import run_thread_ranks

Rows = list[tuple[float, ...]]


@st.composite
def rows_of_ranks(draw: st.DrawFn) -> list[Rows]:
    """Rows of 1 to 6 ranks: few or many distinct keys, any of the ranks empty."""
    num_columns = draw(st.integers(1, 3))
    max_key = draw(st.sampled_from([0, 1, 5, 2**62]))
    row = st.tuples(*[st.integers(-max_key, max_key)] * num_columns)
    return draw(st.lists(st.lists(row, max_size=30), min_size=1, max_size=6))


def tensor_of(rows: Rows, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(rows, dtype=dtype).reshape(len(rows), num_columns)


def num_columns_of(ranks: list[Rows]) -> int:
    return max((len(row) for rows in ranks for row in rows), default=2)


def max_share(ranks: list[Rows], num_samples: int) -> float:
    """The documented limit of the rows of one rank."""
    samples = max(num_samples, 2 * len(ranks))
    chunks = [-(-len(rows) // samples) for rows in ranks]
    excess = sum(chunk - 1 for chunk in chunks if chunk)
    return sum(len(rows) for rows in ranks) / len(ranks) + max(chunks) + excess + 1


def sort_and_deal(
    ranks: list[Rows], dtype: torch.dtype, num_samples: int, group: dist.ProcessGroup
) -> tuple[Rows, Rows]:
    rows = tensor_of(ranks[group.rank()], num_columns_of(ranks), dtype)
    result = sample_sort(rows, group, len(ranks), num_samples)
    assert result.dtype == dtype
    dealt = deal_interleaved(result, group)
    as_tuples = [tuple(row) for row in result.tolist()]
    return as_tuples, [tuple(row) for row in dealt.tolist()]


def check(ranks: list[Rows], results: list[tuple[Rows, Rows]], num_samples: int) -> None:
    expected = sorted(row for rows in ranks for row in rows)
    assert [row for rows, _ in results for row in rows] == expected
    shares = [len(rows) for rows, _ in results]
    assert max(shares) <= max_share(ranks, num_samples)
    if max(len(rows) for rows in ranks) <= max(num_samples, 2 * len(ranks)):
        assert max(shares) - min(shares) <= 1
    for rank, (_, dealt) in enumerate(results):
        assert dealt == expected[rank :: len(ranks)]


@settings(max_examples=60, deadline=None)
@given(rows_of_ranks(), st.sampled_from([1, 3, 100]), st.booleans())
def test_it_sorts_any_distribution(ranks: list[Rows], num_samples: int, is_float: bool) -> None:
    if is_float:
        ranks = [[tuple(float(value) / 4 for value in row) for row in rows] for rows in ranks]
    dtype = torch.float64 if is_float else torch.int64
    results = run_thread_ranks(
        len(ranks), lambda group: sort_and_deal(ranks, dtype, num_samples, group)
    )
    check(ranks, results, num_samples)


def test_equal_rows_are_split_between_ranks() -> None:
    """The reference gives all equal keys to one rank."""
    ranks: list[Rows] = [[(7, 7)] * 1000, [], [(7, 7)] * 10, [(7, 7)] * 190]
    results = run_thread_ranks(4, lambda group: sort_and_deal(ranks, torch.int64, 100, group))
    check(ranks, results, 100)
    assert all(280 <= len(rows) <= 320 for rows, _ in results)


def run_process_rank(
    rendezvous: str, rank: int, ranks_of_case: list[tuple[list[Rows], bool, int]]
) -> list[tuple[Rows, Rows]]:
    """Every case in one process group of real processes; the default group for every second."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=len(ranks_of_case[0][0]),
        timeout=timedelta(seconds=60),
    )
    try:
        results = []
        for number, (ranks, is_float, num_samples) in enumerate(ranks_of_case):
            dtype = torch.float64 if is_float else torch.int64
            rows = tensor_of(ranks[rank], num_columns_of(ranks), dtype)
            group = dist.group.WORLD if number % 2 else None
            result = sample_sort(rows, group, len(ranks), num_samples)
            dealt = deal_interleaved(result, group)
            results.append(
                ([tuple(row) for row in result.tolist()], [tuple(row) for row in dealt.tolist()])
            )
        return results
    finally:
        dist.destroy_process_group()


def random_case(world_size: int, seed: int) -> tuple[list[Rows], bool, int]:
    generator = torch.Generator().manual_seed(seed)

    def draw(stop: int) -> int:
        return int(torch.randint(stop, (1,), generator=generator))

    num_columns = 1 + draw(3)
    max_key = [1, 2, 4, 1000, 2**40][draw(5)]
    largest = [1, 5, 60, 400][draw(4)]
    ranks: list[Rows] = []
    for _ in range(world_size):
        num_rows = draw(largest) * (draw(4) > 0)
        values = torch.randint(-max_key, max_key, (num_rows, num_columns), generator=generator)
        ranks.append([tuple(row) for row in values.tolist()])
    if seed == 0:
        ranks = [[] for _ in range(world_size)]
    is_float = draw(2) == 1
    if is_float:
        ranks = [[tuple(value / 8 for value in row) for row in rows] for rows in ranks]
    return ranks, is_float, [1, 10, 100][draw(3)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes(world_size: int, tmp_path: Path) -> None:
    cases = [random_case(world_size, seed) for seed in range(80)]
    method = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(world_size, mp_context=method) as pool:
        futures = [
            pool.submit(run_process_rank, str(tmp_path / "rendezvous"), rank, cases)
            for rank in range(world_size)
        ]
        of_ranks = [future.result(timeout=600) for future in futures]
    for number, (ranks, _, num_samples) in enumerate(cases):
        check(ranks, [results[number] for results in of_ranks], num_samples)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_a_curriculum_is_the_same_for_any_number_of_ranks(num_ranks: int) -> None:
    """Difficulties that only their rank knows: sorted, dealt, and equal to the complete order."""
    difficulty = np.random.default_rng(0).integers(0, 6, 101) / 4
    owners = np.random.default_rng(num_ranks).integers(0, num_ranks, 101)
    order = curriculum_order(difficulty, seed=7, epoch=2)

    def run(group: dist.ProcessGroup) -> list[int]:
        row_ids = np.flatnonzero(owners == group.rank())
        keys = curriculum_keys(difficulty[row_ids], row_ids, 101, seed=7, epoch=2)
        rows = deal_interleaved(sample_sort(torch.from_numpy(keys), group, n_samples=5), group)
        return rows[:, 2].to(torch.int64).tolist()

    for rank, rows in enumerate(run_thread_ranks(num_ranks, run)):
        assert rows == rank_rows(order, rank, num_ranks).tolist()


def test_without_a_process_group() -> None:
    rows = torch.tensor([[2, 1], [1, 9], [2, 0], [1, 9]])
    assert sample_sort(rows).tolist() == [[1, 9], [1, 9], [2, 0], [2, 1]]
    assert deal_interleaved(rows).tolist() == rows.tolist()
    with pytest.raises(ValueError, match="rank 0 gave rows with NaN"):
        sample_sort(torch.tensor([[float("nan")]], dtype=torch.float64))
    with pytest.raises(ValueError, match="n_samples is 0"):
        sample_sort(rows, n_samples=0)
    with pytest.raises(ValueError, match="num_workers is 2: the group has 1 ranks"):
        sample_sort(rows, num_workers=2)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            torch.zeros((2, 3), dtype=torch.int64),
            r"rank 1 has 3 columns of torch.int64, rank 0 has 2",
        ),
        (torch.zeros((2, 2), dtype=torch.float64), r"rank 1 has 2 columns of torch.float64"),
        (torch.zeros((2, 2), dtype=torch.int32), r"gave rows that are not an \[n, columns\]"),
        (torch.zeros(2, dtype=torch.int64), r"gave rows that are not an \[n, columns\]"),
    ],
)
def test_errors_are_raised_on_all_ranks(second: torch.Tensor, message: str) -> None:
    def run(group: dist.ProcessGroup) -> str:
        rows = second if group.rank() else torch.zeros((4, 2), dtype=torch.int64)
        with pytest.raises(ValueError, match=message) as caught:
            sample_sort(rows, group)
        return str(caught.value)

    first, other = run_thread_ranks(2, run)
    assert first == other
