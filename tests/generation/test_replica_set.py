"""Replicas that are lost: their requests and tokens, and the order of restarts and offloading."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.config.schema import ClusterConfig
from nemo_like.data.jagged import Jagged
from nemo_like.demo.task import build_model, build_tokenizer
from nemo_like.distributed.errors import WorkerDied, WorkerError
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.generation import replicas as replica_module
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.generation.replicas import Replica
from nemo_like.generation.requests import GenerationStart, SamplingParams
from nemo_like.parallel_layout import ParallelLayout
from tests.generation.tracked_worker import TrackedWorker

MAX_LENGTH = 64
LOST = WorkerDied("it died", group="generation-0", rank=0, method="poll")


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    build_model(seed=0).save_pretrained(directory)
    return directory


class LocalStarts:
    """Starts replicas in this process; a restart waits until it is allowed."""

    def __init__(self, model_directory: Path) -> None:
        self.indices: list[int] = []
        self.groups: list[Any] = []
        self.allowed = threading.Event()
        self.allowed.set()
        self._model_name = str(model_directory)
        self._lock = threading.Lock()

    def __call__(self, index: int) -> LocalGroup:
        self.allowed.wait(30.0)
        # transformers loads one model at a time per process.
        with self._lock:
            self.indices.append(index)
            kwargs = {"start": GenerationStart(model_name=self._model_name), "batch_size": 4}
            context = local_context(num_threads=1)
            group = LocalGroup(TrackedWorker, kwargs, context, name=f"generation-{index}")
            self.groups.append(group)
            return group


def _worker(replica: Replica) -> Any:
    group: Any = replica.group
    return group.worker


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _submit(generator: Generator, num_rows: int, max_new_tokens: int) -> list[int]:
    prompts = Jagged.from_rows([[5 + row] for row in range(num_rows)], np.int32)
    return generator.submit(
        prompts,
        np.arange(num_rows, dtype=np.uint64),
        SamplingParams(max_new_tokens=max_new_tokens),
        max_total_length=MAX_LENGTH,
    )


def test_tokens_of_a_lost_replica_are_counted_as_discarded(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One decoding step per poll.
    monkeypatch.setattr(replica_module, "POLL_S", 0.0)
    generator = Generator(LocalStarts(model_directory), 1, max_restarts=1)
    ids = _submit(generator, 4, max_new_tokens=60)
    num_finished = 0
    finished: list[int] = []
    for _ in range(3):
        done, completions = generator.collect(0.1)
        finished += done
        num_finished += len(completions.token_ids.values)
    (replica,) = generator.replicas
    num_sampled = replica.num_tokens
    assert num_sampled > num_finished and len(finished) < len(ids)
    generator.replace(replica, LOST)
    metrics = generator.pop_metrics(wall_s=1.0)
    assert metrics["generation/num_discarded_tokens"].value == num_sampled - num_finished
    assert metrics["generation/num_restarts"].value == 1
    _wait_until(lambda: bool(generator.collect(0.0) and generator.replicas_without_weights))
    generator.set_version(generator.live_replicas, 0)
    while generator.num_unfinished:
        finished += generator.collect(0.1)[0]
    assert sorted(finished) == ids
    assert generator.pop_metrics(wall_s=1.0)["generation/num_discarded_tokens"].value == 0


def test_requests_of_a_lost_replica_can_be_cancelled(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after its loss is known, and while they wait for the next one."""
    monkeypatch.setattr(replica_module, "POLL_S", 0.0)
    starts = LocalStarts(model_directory)
    generator = Generator(starts, 1, max_restarts=2)
    ids = _submit(generator, 6, max_new_tokens=30)
    assert generator.collect(0.1)[0] == []
    starts.allowed.clear()
    generator.cancel(ids[:1])
    generator.replace(generator.replicas[0], LOST)
    generator.cancel(ids[1:2])
    assert generator.collect(0.0)[0] == [], "the others wait"
    generator.cancel([*ids[:3], 999])
    starts.allowed.set()
    _wait_until(lambda: bool(generator.collect(0.0) and generator.replicas_without_weights))
    generator.set_version(generator.live_replicas, 0)
    finished: list[int] = []
    while generator.num_unfinished:
        finished += generator.collect(0.1)[0]
    assert sorted(finished) == ids[3:]
    metrics = generator.pop_metrics(wall_s=1.0)
    assert metrics["generation/num_cancelled"].value == 3
    num_discarded = metrics["generation/num_discarded_tokens"].value
    assert num_discarded == 4, "a step of four rows, as of the poll that was read"
    _submit(generator, 6, max_new_tokens=30)
    generator.cancel(range(100))
    assert generator.num_unfinished == generator.num_running == 0


def test_an_episode_of_a_lost_replica_goes_on_at_another(model_directory: Path) -> None:
    generator = Generator(LocalStarts(model_directory), 2, max_restarts=1)

    def submit(episode: int) -> int:
        (request_id,) = generator.submit(
            Jagged.from_rows([[5] * 20], np.int32),
            np.zeros(1, np.uint64),
            SamplingParams(max_new_tokens=3),
            max_total_length=MAX_LENGTH,
            affinity=[episode],
        )
        return request_id

    requests = [submit(0), submit(1)]
    assert [list(replica.costs) for replica in generator.replicas] == [requests[:1], requests[1:]]
    generator.replace(generator.replicas[0], LOST)
    requests.append(submit(0))
    finished: list[int] = []
    while generator.num_unfinished:
        finished += generator.collect(0.1)[0]
    assert sorted(finished) == requests
    _wait_until(lambda: bool(generator.collect(0.0) and generator.replicas_without_weights))
    generator.set_version(generator.live_replicas, 0)
    assert submit(0) in generator.replicas[1].costs, "the cache of the new process is empty"


def test_an_exception_of_a_request_is_raised_when_it_is_known(model_directory: Path) -> None:
    generator = Generator(LocalStarts(model_directory), 1, max_restarts=5)
    (replica,) = generator.replicas
    failure = WorkerError(
        group="generation-0", rank=0, method="submit", cause=ValueError("no"), traceback_text=""
    )
    with pytest.raises(WorkerError):
        generator.replace(replica, failure)


def test_a_replica_that_fails_while_offloaded_starts_when_the_others_are_back(
    model_directory: Path,
) -> None:
    """The policy is on the devices until then."""
    starts = LocalStarts(model_directory)
    generator = Generator(starts, 2, max_restarts=3)
    generator.offload()
    generator.replace(generator.replicas[0], LOST)
    generator.replace(generator.replicas[0], LOST)
    time.sleep(0.1)
    assert sorted(starts.indices) == [0, 1]
    assert [replica.index for replica in generator.live_replicas] == [1]
    with generator.onloaded():
        _wait_until(lambda: bool(generator.collect(0.0) and generator.replicas_without_weights))
        assert sorted(starts.indices) == [0, 0, 1]
        assert not any(_worker(replica).is_offloaded for replica in generator.replicas)
    assert all(_worker(replica).is_offloaded for replica in generator.replicas)


def test_offloading_waits_for_replicas_that_are_starting(model_directory: Path) -> None:
    """They load their model onto the device, which the policy is about to use."""
    starts = LocalStarts(model_directory)
    generator = Generator(starts, 2, max_restarts=3)
    starts.allowed.clear()
    generator.replace(generator.replicas[1], LOST)
    threading.Timer(0.3, starts.allowed.set).start()
    with generator.offloaded():
        assert len(generator.live_replicas) == 2
        assert all(_worker(replica).is_offloaded for replica in generator.replicas)
        assert [replica.index for replica in generator.replicas_without_weights] == [1]
    assert not any(_worker(replica).is_offloaded for replica in generator.replicas)


def test_a_replica_that_is_starting_at_the_end_of_the_run_is_stopped(model_directory: Path) -> None:
    starts = LocalStarts(model_directory)
    generator = Generator(starts, 2, max_restarts=3)
    starts.allowed.clear()
    generator.replace(generator.replicas[1], LOST)
    threading.Timer(0.3, starts.allowed.set).start()
    generator.shutdown()
    assert sorted(starts.indices) == [0, 1, 1]
    # The group that was replaced is still open here; the process of a lost replica is gone.
    assert [group.worker is None for group in starts.groups].count(True) == 2


def test_requests_go_on_after_the_generator_was_offloaded(model_directory: Path) -> None:
    generator = Generator(LocalStarts(model_directory), 2)
    ids = _submit(generator, 6, max_new_tokens=20)
    finished = generator.collect(0.1)[0]
    with generator.offloaded():
        pass
    while generator.num_unfinished:
        finished += generator.collect(0.1)[0]
    assert sorted(finished) == ids


@pytest.fixture(scope="module")
def cluster(joined_ray: None) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster(ClusterConfig(workers_per_node=1, cpus_per_worker=0.5)) as cluster:
        yield cluster


def test_a_replica_that_hangs_does_not_block_requests_for_others(
    cluster: RayVirtualCluster, model_directory: Path
) -> None:
    """Half of the requests are sent to a stopped replica, which continues before its deadline."""

    def start(index: int) -> RayWorkerGroup:
        return RayWorkerGroup(
            cluster,
            HFGenerationWorker,
            {"start": GenerationStart(model_name=str(model_directory)), "batch_size": 4},
            name=f"generation-{index}",
            parallel_layout=ParallelLayout(),
            bundles="anywhere",
            progress_timeout_s=45.0,
        )

    generator = Generator(start, 2, max_restarts=2)
    group: Any = generator.replicas[0].group
    os.kill(group.locations[0].pid, signal.SIGSTOP)
    generator.start_rollout()
    ids = _submit(generator, 8, max_new_tokens=8)
    finished: list[int] = []
    while generator.replicas[1].costs:
        finished += generator.collect(0.1)[0]
    assert 0 < len(finished) < len(ids)
    waiting = list(generator.replicas[0].costs)
    assert waiting
    # None of these calls waits for the stopped replica.
    generator.cancel(waiting[:1])
    call = generator.replicas[1].group.submit_one(0, "partial_tokens")
    started_s = time.monotonic()
    assert generator.collect(30.0, [call])[0] == []
    assert time.monotonic() - started_s < 30.0
    os.kill(group.locations[0].pid, signal.SIGCONT)
    while generator.num_unfinished:
        finished += generator.collect(0.1)[0]
    assert sorted([*finished, waiting[0]]) == ids
    metrics = generator.pop_metrics(wall_s=1.0)
    assert metrics["generation/num_restarts"].value == 0
    assert metrics["generation/num_cancelled"].value == 1
    _end_with_a_killed_replica(generator)
    generator.shutdown()


def _end_with_a_killed_replica(generator: Generator) -> None:
    """A replica is killed; what it had is cancelled or sampled by the other."""
    prompts = Jagged.from_rows([[5 + row] for row in range(8)], np.int32)
    ids = generator.submit(
        prompts,
        np.arange(8, dtype=np.uint64),
        SamplingParams(max_new_tokens=40),
        max_total_length=MAX_LENGTH,
        affinity=range(8),
    )
    lost = list(generator.replicas[0].costs)
    group: Any = generator.replicas[0].group
    os.kill(group.locations[0].pid, signal.SIGKILL)
    generator.cancel(lost[:2])
    finished: list[int] = []
    while generator.num_unfinished:
        finished += generator.collect(0.1)[0]
        # It has no effect on those that were returned.
        generator.cancel(finished)
    assert sorted(set(finished)) == sorted(finished)
    assert set(ids) - set(finished) == set(lost[:2]), "a poll may not have them any more"
    metrics = generator.pop_metrics(wall_s=1.0)
    assert metrics["generation/num_restarts"].value == 1
    assert metrics["generation/num_cancelled"].value == 2
