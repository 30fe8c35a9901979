"""Rows encoded by Ray Data on two nodes: the same rows and runs as with processes, bounded rows and
bytes in flight, and one clear error for each failure.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ClusterConfig
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import AlignedPlanner
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.distributed.errors import ClusterError
from nemo_like.torch_data.online import OnlineBatchLoader
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.data.echo_encoding import encode
from tests.data.test_encoded_rows import rows_of
from tests.recipe import Recipe

pytest.importorskip("pandas", reason="needs the extra ray-data")
ray = pytest.importorskip("ray")

from nemo_like.distributed.ray.data_source import RayDataSource, split_over_ranks  # noqa: E402
from nemo_like.distributed.ray.ray_data import FlowLimits, RayDataPool, check_ray_data  # noqa: E402
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster  # noqa: E402
from tests.distributed.ray_cluster import cluster_of  # noqa: E402

MODULE = "tests.distributed.ray.row_encoding"
LIMITS = FlowLimits(rows_per_block=8, rows_per_actor=16, bytes_per_actor=2000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes of two CPUs, to which this process is connected."""
    node = {"num_cpus": 2}
    with cluster_of(node, node, modules=("pandas", "pyarrow.dataset")) as nodes:
        ray.init(address=nodes.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
        ray.shutdown()


def num_free_cpus() -> float:
    return ray.available_resources().get("CPU", 0.0)


def wait_for_free_cpus(count: float) -> None:
    deadline = time.monotonic() + 30
    while num_free_cpus() < count:
        assert time.monotonic() < deadline, "actors of the pipeline are left"
        time.sleep(0.1)


def opened(folder: Path, texts: Sequence[str], **options: Any) -> tuple[EncodedRows, list[Any]]:
    """The encoded rows, and the list of their pool once they are started."""
    pools: list[RayDataPool] = []

    def start_pool(rows: Any, receive: Any) -> RayDataPool:
        setup = options.pop("setup", {})
        pools.append(RayDataPool(MODULE, setup, rows, receive, limits=LIMITS, **options))
        return pools[0]

    return EncodedRows(rows_of(folder, texts), encode, start_pool=start_pool), pools


def test_rows_are_those_of_one_process_and_the_flow_is_bounded(
    cluster: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    texts = [f"row {index} ä€" * (1 + index % 5) if index % 7 else "drop" for index in range(300)]
    encoded, pools = opened(tmp_path, texts)
    encoded.start(np.arange(300)[::-1])
    # Rows at the end of the order are moved to the front.
    first = encoded.fetch([5, 0, 299, 5])
    assert [row is None for row in first] == [False, True, False, False]
    advanced: list[int] = []
    assert encoded.finish(advanced.append)
    assert sum(advanced) == encoded.num_encoded == 300
    assert np.array_equal(encoded.is_kept, [text != "drop" for text in texts])
    for index, row in enumerate(encoded.fetch(range(300))):
        expected = encode({"prompt": texts[index]})
        if expected is None:
            assert row is None
            continue
        assert row is not None
        assert np.array_equal(row.input_ids, expected.input_ids)
        assert np.array_equal(row.token_mask, expected.token_mask)
    (pool,) = pools
    assert pool.num_actors == 4
    assert 8 <= pool.max_rows_in_flight <= 4 * 16
    assert pool.max_bytes_in_flight <= 4 * 2000
    assert sum(pool.rows_of_node.values()) == 300
    assert len(pool.rows_of_node) == 2, "both nodes encode"
    wait_for_free_cpus(4)
    assert "row" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bad", r"^rows\.jsonl:41: this row is bad$|/rows\.jsonl:41: this row is bad$"),
        ("crash", r"Ray Data pipeline .* failed: .*an actor that encodes rows ended"),
    ],
)
def test_a_bad_row_is_named_and_an_actor_that_ends_is_one_error(
    cluster: None, tmp_path: Path, text: str, message: str
) -> None:
    encoded, _ = opened(tmp_path, ["fine"] * 40 + [text] + ["fine"] * 40, num_actors=1)
    encoded.start(np.arange(81))
    with pytest.raises(ConfigError, match=message):
        encoded.finish()
    wait_for_free_cpus(4)


def test_a_missing_tokenizer_is_one_error_with_the_node(cluster: None, tmp_path: Path) -> None:
    setup = {"missing": "tokenizer.json"}
    encoded, _ = opened(tmp_path, ["fine"] * 40, num_actors=1, setup=setup)
    encoded.start(np.arange(40))
    with pytest.raises(ConfigError, match=r"on node \w+: OSError: there is no tokenizer\.json"):
        encoded.finish()


def test_closing_stops_the_actors_at_once(cluster: None, tmp_path: Path) -> None:
    encoded, _ = opened(tmp_path, ["fine"] * 16 + ["slow"] * 64, num_actors=2)
    encoded.start(np.arange(80))
    assert encoded.finish(timeout_s=0) is False
    encoded.fetch([3])
    start = time.monotonic()
    encoded.close()
    assert time.monotonic() - start < 25, "it waited for the slow rows"
    wait_for_free_cpus(4)
    assert encoded.fetch([15])[0] is not None, "missing rows are encoded in this process"


def test_no_free_cpu_is_an_error_before_training(cluster: None) -> None:
    start = partial(RayDataPool, MODULE, {}, [], lambda *values: None)
    with (
        RayVirtualCluster(ClusterConfig(num_nodes=2, cpus_per_worker=2)),
        pytest.raises(ClusterError, match=r"0 are free on 2 nodes\. Lower cluster\.cpus_per_work"),
    ):
        start()
    wait_for_free_cpus(4)
    with pytest.raises(ClusterError, match=r"data\.num_encoding_workers 9.*4 are free"):
        start(num_actors=9)


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many threads in this process as a worker with one CPU has, for equal results."""
    num_threads = torch.get_num_threads()
    # A worker in this process has a thread per core.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.exhaustive
def test_a_run_encoded_on_two_nodes_equals_the_run_with_processes(
    cluster: None, one_thread: None, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    options = (
        "sft.val_at_start=false",
        "sft.val_period=0",
        "checkpointing.export_hf=false",
        "checkpointing.keep_latest=9",
        "data.batching.kind=online",
        "data.batching.window_rows=24",
        "data.max_train_rows=300",
    )
    processes = run_sft(recipe.sft(*options, "run_name=processes", "data.num_encoding_workers=1"))
    expected = read_metrics(processes.directory.path)
    assert [line["step"] for line in expected] == [1, 2, 3, 4]
    # Ray Data distributes its actors over the nodes.
    with_ray_data = (
        *options,
        "cluster.backend=ray",
        "data.encoding_backend=ray_data",
        "data.num_encoding_workers=2",
    )
    with caplog.at_level(logging.INFO, "nemo_like.distributed.ray.ray_data"):
        run = run_sft(recipe.sft(*with_ray_data)).directory
    assert read_metrics(run.path) == expected
    (record,) = [line for line in caplog.records if "per node" in line.message]
    assert isinstance(record.args, dict)
    assert len(record.args) == 2 and sum(record.args.values()) == 300  # pyright: ignore[reportArgumentType, reportCallIssue]
    interrupt_at(run.path, 2)
    resumed = run_sft(recipe.sft(*with_ray_data, "resume=true")).directory
    assert read_metrics(resumed.path) == expected
    wait_for_free_cpus(4)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("data.batching.kind=online",), "cluster.backend is local"),
        (("cluster.backend=ray",), "data.batching.kind is fixed"),
        (
            ("cluster.backend=ray", "data.batching.kind=online", "data.num_encoding_workers=0"),
            "null for all free CPUs",
        ),
        (
            ("cluster.backend=ray", "data.batching.kind=online", "data.curriculum=length"),
            "before the run joins the cluster",
        ),
    ],
)
def test_keys_that_do_not_fit_are_named(
    recipe: Recipe, changes: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.sft("data.encoding_backend=ray_data", *changes)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in `sys.modules` is a module that cannot be found.
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        ConfigError, match=r"install the extra ray-data: pip install 'nemo-like\[ray-data\]'"
    ):
        check_ray_data("data.encoding_backend=ray_data")
