"""Rows of a Ray Dataset that is split over ranks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import AlignedPlanner
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.torch_data.online import OnlineBatchLoader

pytest.importorskip("pandas", reason="needs the extra ray-data")
ray = pytest.importorskip("ray")

from nemo_like.distributed.ray.data_source import RayDataSource, split_over_ranks  # noqa: E402
from tests.distributed.ray_cluster import cluster_of  # noqa: E402


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of two CPUs, to which this process is connected."""
    node = {"num_cpus": 2}
    with cluster_of(node, node, modules=("pandas", "pyarrow.dataset")) as nodes:
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


class ThreadCoordinator:
    """A rank that exchanges its values with those of other threads."""

    def __init__(self, rank: int, slots: list[list[int]], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.num_ranks = len(slots)
        self._slots = slots
        self._barrier = barrier

    def all_gather(self, values: Sequence[int]) -> np.ndarray:
        self._slots[self.rank] = list(values)
        self._barrier.wait(60)
        gathered = np.array(self._slots, dtype=np.int64)
        self._barrier.wait(60)
        return gathered


def aligned_rows(source: RayDataSource, planner: AlignedPlanner) -> Iterator[tuple[int, list[int]]]:
    """(number of microbatches, row ids) of each step of a rank."""
    samples = iter(source)
    while not planner.is_finished:
        while planner.needs_rows:
            sample = next(samples, None)
            if sample is None:
                planner.close()
            else:
                planner.push(int(sample["row"]), len(sample["ids"]))
        step = planner.next_step()
        if step is not None:
            yield step.own.plan.num_microbatches, list(step.own.rows)


def online_rows(source: RayDataSource, coordinator: ThreadCoordinator) -> Iterator[list[int]]:
    """Row ids of each step of a rank, without dummies."""
    loader = OnlineBatchLoader(
        source,
        StreamSpec(plan=PlanSpec(max_tokens=64), window_rows=8),
        collate_fn=lambda samples: [int(sample["row"]) for sample in samples],
        length_of=lambda sample: len(sample["ids"]),
        num_trained_of=lambda sample: len(sample["ids"]),
        coordinator=coordinator,
    )
    for step in loader:
        rows: list[int] = []
        for microbatch, is_dummy in zip(step.microbatches, step.is_dummy, strict=True):
            rows += [] if is_dummy else microbatch
        yield rows


def test_every_row_of_a_split_dataset_is_in_one_aligned_step(cluster: None) -> None:
    import pyarrow
    import ray.data

    generator = np.random.default_rng(0)
    tables = []
    rows: list[int] = []
    for size in (40, 3, 1, 29, 2, 18):
        numbers = list(range(len(rows), len(rows) + size))
        rows += numbers
        ids = [list(range(length)) for length in generator.integers(1, 33, size)]
        tables.append(pyarrow.table({"row": numbers, "ids": ids}))
    dataset = ray.data.from_arrow(tables)
    sources = split_over_ranks(dataset, 2, max_bytes=2**22, rows_per_batch=4)
    slots: list[list[int]] = [[], []]
    barrier = threading.Barrier(2)
    spec = StreamSpec(plan=PlanSpec(max_tokens=64), window_rows=8)
    steps: list[list[tuple[int, list[int]]]] = [[], []]
    online: list[list[list[int]]] = [[], []]

    def run_rank(rank: int) -> None:
        coordinator = ThreadCoordinator(rank, slots, barrier)
        planner = AlignedPlanner(spec, coordinator)
        steps[rank] = list(aligned_rows(sources[rank], planner))
        online[rank] = list(online_rows(sources[rank], coordinator))

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(row for rank in steps for _, ids in rank for row in ids) == rows
    assert [count for count, _ in steps[0]] == [count for count, _ in steps[1]]
    assert sorted(row for rank in online for ids in rank for row in ids) == rows
    assert len(online[0]) == len(online[1])
