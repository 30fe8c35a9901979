from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import WorkerDied, WorkerError, WorkerFailure, WorkerHung
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.distributed.worker_group import Handle, WorkerGroup
from nemo_like.metrics import metric_values
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.weight_sync.sync import Replicas, WeightSync
from nemo_like.weight_sync.transfer import TRANSPORTS
from tests.exhaustive import usually
from tests.weight_sync.weight_workers import GeneratorSide, PolicySide

MAX_BYTES = 2000
"""Below the embedding's size: it gets a bucket of its own."""

DEADLINE_S = 8.0
"""Of a call of a replica."""

CPU_TRANSPORTS = ["shared_memory", "gloo"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayVirtualCluster]:
    config = ClusterConfig(workers_per_node=2, cpus_per_worker=0.5)
    with RayVirtualCluster(config) as cluster:
        yield cluster


def start_policy(cluster: RayVirtualCluster, dtype: str = "float32") -> RayWorkerGroup:
    layout = ParallelLayout(dp=2)
    return RayWorkerGroup(
        cluster, PolicySide, {"dtype": dtype}, name="policy", parallel_layout=layout
    )


def start_replica(
    cluster: RayVirtualCluster,
    num_ranks: int = 1,
    dtype: str = "float32",
    progress_timeout_s: float | None = None,
) -> RayWorkerGroup:
    return RayWorkerGroup(
        cluster,
        GeneratorSide,
        {"dtype": dtype},
        name="generation",
        parallel_layout=ParallelLayout(dp=num_ranks),
        bundles="anywhere",
        progress_timeout_s=progress_timeout_s,
    )


@pytest.fixture(scope="module")
def groups(cluster: RayVirtualCluster) -> Iterator[tuple[RayWorkerGroup, list[RayWorkerGroup]]]:
    """A policy of two ranks, a replica of one rank and a replica of two."""
    started = [
        start_policy(cluster),
        start_replica(cluster, progress_timeout_s=DEADLINE_S),
        start_replica(cluster, 2),
    ]
    yield started[0], started[1:]
    for group in started:
        group.shutdown()


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "nemo_like" in path.name}


def check_replicas(
    policy: WorkerGroup, replicas: list[WorkerGroup], version: int, dtype: str
) -> None:
    """All replicas have the policy's weights in `dtype`, bit by bit, and nothing else is left."""
    expected = policy.run_all_workers("digest", dtype)[0]
    for replica in replicas:
        for state in replica.run_all_workers("state", dtype):
            assert state[:2] == (version, expected)
        assert all(replica.run_all_workers("is_tied"))
    for group in [policy, *replicas]:
        assert set(group.run_all_workers("mapped_slots")) == {0}
    assert shared_memory_files() == set()


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_constant_weights_are_sent_in_the_first_update_over_a_channel(
    groups: tuple[RayWorkerGroup, list[RayWorkerGroup]], transport: str
) -> None:
    policy, replicas = groups
    constant = 4 * 70 * 16
    others = 4 * (5 * (16 * 16 + 16) + 1)
    policy.run_all_workers("change_weights", 1)
    policy.run_all_workers("set_constant", ["embedding.weight"])
    sync = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES, transport=transport)
    first = sync.push(replicas, 1)
    for version in (2, 3):
        policy.run_all_workers("change_weights", version, "layers")
        later = sync.push(replicas, version)
        assert (first.num_bytes, later.num_bytes) == (constant + others, others)
        # The embedding has a bucket of its own.
        assert later.num_buckets == first.num_buckets - 1
        check_replicas(policy, list(replicas), version, "float32")
    # Other members: a replica that was started again has none of the weights.
    assert sync.push(replicas[:1], 4).num_bytes == constant + others
    policy.run_all_workers("set_constant", [])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_every_replica_gets_equal_bits(
    groups: tuple[RayWorkerGroup, list[RayWorkerGroup]], transport: str, dtype: str
) -> None:
    policy, replicas = groups
    policy.run_all_workers("change_weights", 3 + len(transport) + len(dtype))
    sync = WeightSync(policy, dtype=dtype, max_bucket_bytes=MAX_BYTES, transport=transport)
    report = sync.push(replicas, 7)
    assert (report.transport, report.failed, report.version) == (transport, {}, 7)
    # A replica of two ranks has two receivers. The generators are float32: the weights were cast
    # to `dtype` once, by the sender.
    check_replicas(policy, list(replicas), 7, dtype)
    assert report.num_buckets >= 3
    itemsize = getattr(torch, dtype).itemsize
    assert report.num_bytes == itemsize * (70 * 16 + 5 * (16 * 16 + 16) + 1)
    values = metric_values(report.metrics())
    assert values["weight_sync/bytes"] == report.num_bytes
    assert values["weight_sync/seconds"] >= values["weight_sync/transfer_s"] > 0
    # The buckets of one later update, which has the default limit.
    report = WeightSync(policy, dtype=dtype, transport=transport).push(replicas, 8)
    assert report.num_buckets == 1
    check_replicas(policy, list(replicas), 8, dtype)


def test_the_transport_is_selected_and_bounded_by_two_buckets(
    groups: tuple[RayWorkerGroup, list[RayWorkerGroup]],
) -> None:
    policy, replicas = groups
    largest = policy.run_all_workers("largest_weight_bytes")[0]
    sync = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES)
    report = sync.push(replicas, 1)
    assert sync.transport == report.transport == "shared_memory"
    # Two slots, rounded up to pages.
    assert report.buffer_bytes <= 2 * (largest + os.sysconf("SC_PAGE_SIZE"))


@pytest.mark.parametrize("transport", CPU_TRANSPORTS)
def test_a_channel_is_used_until_its_members_change(
    groups: tuple[RayWorkerGroup, list[RayWorkerGroup]], transport: str
) -> None:
    policy, replicas = groups

    def update(sync: WeightSync, members: list[RayWorkerGroup], version: int) -> int:
        """Number of channels that rank 0 opened for one update."""
        before = policy.run_all_workers("num_channels")[0]
        policy.run_all_workers("change_weights", version)
        report = sync.push(members, version)
        assert report.failed == {}
        assert report.buffer_bytes > 0
        check_replicas(policy, list(members), version, "float32")
        return policy.run_all_workers("num_channels")[0] - before

    sync = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES, transport=transport)
    assert [update(sync, replicas, version) for version in (11, 12, 13)] == [1, 0, 0]
    assert [update(sync, replicas[:1], 14), update(sync, replicas[:1], 15)] == [1, 0]
    assert [update(sync, replicas, 16), update(sync, replicas, 17)] == [1, 0]
    # Another channel has replaced this one, which is found out in the update.
    other = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES, transport=transport)
    assert update(other, replicas, 18) == 1
    policy.run_all_workers("close_weight_channel")
    assert update(other, replicas, 19) == 1


@pytest.mark.parametrize("transport", usually(CPU_TRANSPORTS, "gloo"))
def test_a_killed_and_a_stopped_receiver_do_not_fail_the_others(
    cluster: RayVirtualCluster,
    groups: tuple[RayWorkerGroup, list[RayWorkerGroup]],
    transport: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A stopped receiver is detected at its own deadline, and not when the broadcast times out, for
    which the others would have to wait.
    """
    policy, (healthy, _) = groups
    killed = start_replica(cluster)
    killed.run_all_workers("die_in_bucket", 2)
    sync = WeightSync(
        policy, dtype="float32", max_bucket_bytes=MAX_BYTES, transport=transport, timeout_s=30.0
    )
    report = sync.push([killed, healthy], 4)
    assert list(report.failed) == [0]
    assert isinstance(report.failed[0], WorkerDied)
    assert "died in `load_weights`" in str(report.failed[0])
    check_replicas(policy, [healthy], 4, "float32")
    # It stays dead for the next update, and a new process takes part.
    replacement = start_replica(cluster, progress_timeout_s=DEADLINE_S)
    policy.run_all_workers("change_weights", 9 + len(transport))
    report = sync.push([killed, healthy, replacement], 5)
    assert list(report.failed) == [0]
    check_replicas(policy, [healthy, replacement], 5, "float32")
    replacement.run_all_workers("stop_in_bucket", 1)
    policy.run_all_workers("change_weights", 29 + len(transport))
    with caplog.at_level("INFO", logger="nemo_like.weight_sync"):
        report = sync.push([replacement, healthy], 6)
    assert list(report.failed) == [0]
    assert report.total_s < 3 * DEADLINE_S
    assert isinstance(report.failed[0], WorkerHung)
    assert "(policy.generation.progress_timeout_s)" in str(report.failed[0])
    assert "took more than" not in caplog.text
    check_replicas(policy, [healthy], 6, "float32")


def check_replica_after_failure(replica: WorkerGroup, version: int) -> None:
    """It has its old `version`, and neither a slot nor a file is left."""
    assert replica.run_all_workers("state", "float32")[0][0] == version
    assert set(replica.run_all_workers("mapped_slots")) == {0}
    assert shared_memory_files() == set()


@pytest.mark.parametrize("transport", usually(CPU_TRANSPORTS, "shared_memory"))
def test_a_failed_policy_is_named_and_leaves_nothing(
    cluster: RayVirtualCluster, groups: tuple[RayWorkerGroup, list[RayWorkerGroup]], transport: str
) -> None:
    healthy, (replica, _) = groups
    version = replica.run_all_workers("state", "float32")[0][0]
    policy = start_policy(cluster)
    policy.run_all_workers("fail_in_last_rank", "layers.3.weight")
    sync = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES, transport=transport)
    with pytest.raises(WorkerError, match=r"worker 1 of the policy group failed in .* a shard is"):
        sync.push([replica], 101)
    # The generator has a part of the weights and its old version; the next update completes it.
    check_replica_after_failure(replica, version)
    policy = start_policy(cluster)
    policy.run_all_workers("die_in_bucket", 3)
    sync = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES, transport=transport)
    with pytest.raises(WorkerDied, match=r"policy group .* died in `send_weights`"):
        sync.push([replica], 102)
    check_replica_after_failure(replica, version)
    WeightSync(healthy, dtype="float32", transport=transport).push([replica], 103)
    check_replicas(healthy, [replica], 103, "float32")


def worker_of(group: LocalGroup) -> Any:
    return group.worker


def test_in_one_process_weights_are_passed_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    context = local_context(num_threads=1)
    policy = LocalGroup(PolicySide, {}, context)
    replicas = [LocalGroup(GeneratorSide, {}, context) for _ in range(2)]
    received: list[int] = []
    add = torch.Tensor.copy_

    def record(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        received.append(source.data_ptr())
        return add(target, source)

    sync = WeightSync(policy, dtype="float32", max_bucket_bytes=MAX_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", record)
        report = sync.push(replicas, 2)
    weights = {each.data_ptr() for each in worker_of(policy).model.parameters()}
    assert set(received) == weights
    assert (report.transport, report.buffer_bytes) == ("in_process", 0)
    assert metric_values(report.metrics())["weight_sync/transfer_gb_per_s"] == 0
    check_replicas(policy, list(replicas), 2, "float32")
    WeightSync(policy, dtype="bfloat16").push(replicas, 3)
    check_replicas(policy, list(replicas), 3, "bfloat16")


class InterruptedPolicy:
    """A policy whose rank 1 ends while both ranks wait for each other.

    As in a group of Ray, a check of rank 0 alone finds its aborted collective only.
    """

    def __init__(self) -> None:
        self.waited: list[list[int]] = []

    def is_done(self, handles: list[Handle]) -> bool:
        ranks = [handle.rank for handle in handles]
        if len(self.waited) < 2:
            return ranks == [2]
        rank = 1 if 1 in ranks else 0
        raise WorkerFailure("", group="policy", rank=rank, method="send_weights")

    def wait_any(self, handles: list[Handle], timeout_s: float) -> list[Handle]:
        self.waited.append(sorted(handle.rank for handle in handles))
        return [handle for handle in handles if handle.rank == 2]


def test_the_calls_of_all_policy_ranks_are_checked_together() -> None:
    policy: Any = InterruptedPolicy()
    sync = WeightSync(policy, dtype="float32")
    calls = [Handle(None, rank=rank) for rank in range(3)]
    with pytest.raises(WorkerFailure) as caught:
        sync.policy_results(calls, Replicas([]), [])
    assert caught.value.rank == 1, "the cause, not the rank whose collective was aborted"
    assert policy.waited == [[0, 1, 2], [0, 1]], "a call that has ended would end the wait at once"


def test_a_model_that_differs_fails_before_a_weight_changes() -> None:
    context = local_context(num_threads=1)
    policy = LocalGroup(PolicySide, {}, context)
    replica = LocalGroup(GeneratorSide, {}, context)
    before = replica.run_all_workers("state", "float32")
    model = worker_of(replica).model
    model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    report = WeightSync(policy, dtype="float32").push([replica], 1)
    assert isinstance(report.failed[0], WorkerError)
    assert re.search(r"the policy does not send 1 weights .* extra", str(report.failed[0]))
    del model.extra
    assert replica.run_all_workers("state", "float32") == before


def test_errors_of_configuration() -> None:
    context = local_context(num_threads=1)
    policy = LocalGroup(PolicySide, {}, context)
    replica = LocalGroup(GeneratorSide, {}, context)
    with pytest.raises(WorkerError, match="dtype 'fp32' is not a dtype of torch"):
        WeightSync(policy, dtype="fp32").push([replica], 1)
    for name in [name for name, transport in TRANSPORTS.items() if transport.needs_gpu]:
        with pytest.raises(WorkerError, match=f"{name} needs a GPU; the policy is on cpu"):
            WeightSync(policy, dtype="float32", transport=name).push([replica], 1)
