"""Metrics of all samples: the same files for any number of ranks and workers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.torch_data.curriculum import curriculum_order, file_write_ordered
from nemo_like.torch_data.data_analyzer import DataAnalyzer
from tests.policy.thread_ranks import run_thread_ranks

ROWS = [list(range(length)) for length in (5, 2, 9, 2, 7, 1, 5, 3)]


def first_token(row: list[int]) -> float:
    return -row[0] / 2


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from([torch.int64, torch.float64, torch.float32, torch.uint8]),
    st.sampled_from([(), (2,), (2, 3)]),
)
def test_the_file_has_the_rows_of_all_ranks_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    counts: list[int],
    dtype: torch.dtype,
    shape: tuple[int, ...],
) -> None:
    path = tmp_path_factory.mktemp("ordered") / "rows.npy"
    generator = torch.Generator().manual_seed(sum(counts))
    parts = [
        torch.randint(0, 200, (count, *shape), generator=generator).to(dtype) for count in counts
    ]
    run_thread_ranks(
        len(counts), lambda group: file_write_ordered(parts[group.rank()], path, group)
    )
    expected = torch.cat(parts).numpy()
    written = np.load(path, mmap_mode="r")
    assert written.dtype == expected.dtype
    assert np.array_equal(written, expected)


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(1, 0), (1, 2), (3, 0), (11, 0)])
def test_files_are_the_same_for_any_number_of_ranks_and_workers(
    num_ranks: int, num_workers: int, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "metrics"

    def run(group: dist.ProcessGroup | None) -> None:
        DataAnalyzer(
            ROWS,
            metric_names=["length", "first"],
            metric_functions=[len, first_token],
            save_path=out,
            num_workers=num_workers,
            batch_size=2,
            comm_group=group,
        ).run_map_reduce()

    if num_ranks == 1:
        # A process that forks DataLoader workers must do so from its main thread.
        run(None)
    else:
        run_thread_ranks(num_ranks, run)
    lengths = [len(row) for row in ROWS]
    assert np.load(out / "length_sample_to_metric.npy").tolist() == lengths
    pairs = sorted((length, index) for index, length in enumerate(lengths))
    assert np.load(out / "length_metric_to_sample.npy").tolist() == [list(pair) for pair in pairs]
    assert np.load(out / "first_sample_to_metric.npy").tolist() == [0.0] * len(ROWS)
    # The files are the input of a curriculum.
    difficulty = np.load(out / "length_sample_to_metric.npy", mmap_mode="r")
    order = curriculum_order(difficulty, seed=0, epoch=0)
    assert sorted(order.tolist()) == list(range(len(ROWS)))
    assert [lengths[row] for row in order] == sorted(lengths)


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 metric_names have 1 metric_functions"):
        DataAnalyzer(ROWS, ["a", "b"], [len], tmp_path)
    with pytest.raises(ValueError, match="NaN"):
        DataAnalyzer(ROWS, ["a"], [lambda row: float("nan")], tmp_path).run_map_reduce()
    assert list(tmp_path.iterdir()) == []
