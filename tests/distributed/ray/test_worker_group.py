"""Worker groups on a Ray cluster of two nodes: calls, sharding, handles, and every way a worker can
fail.
"""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ray._private import worker as ray_worker
from ray.cluster_utils import Cluster
from ray.exceptions import ActorDiedError

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import WorkerDied, WorkerError, WorkerHung
from nemo_like.distributed.ray import failures
from nemo_like.distributed.ray.failures import Failure, explain
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.parallel_layout import ParallelLayout
from tests.distributed.collective_workers import CollectiveWorker
from tests.distributed.plain_workers import ClosingWorker, Counted, PlainWorker

LAYOUT = ParallelLayout(dp=2, tp=2)


@pytest.fixture(scope="module")
def cluster(two_nodes: Cluster) -> Iterator[RayVirtualCluster]:
    config = ClusterConfig(
        num_nodes=2, workers_per_node=2, cpus_per_worker=0.5, progress_timeout_s=180
    )
    with RayVirtualCluster(config) as cluster:
        yield cluster


def plain_group(
    cluster: RayVirtualCluster, parallel_layout: ParallelLayout = LAYOUT, **kwargs: object
) -> RayWorkerGroup:
    return RayWorkerGroup(
        cluster, PlainWorker, kwargs, name="policy", parallel_layout=parallel_layout
    )


@pytest.fixture(scope="module")
def group(cluster: RayVirtualCluster) -> Iterator[RayWorkerGroup]:
    group = plain_group(cluster)
    yield group
    group.shutdown()


def test_contexts_follow_the_nodes(group: RayWorkerGroup) -> None:
    contexts, threads, _ = zip(*group.run_all_workers("describe"), strict=True)
    assert [context.rank for context in contexts] == [0, 1, 2, 3]
    assert [context.local_rank for context in contexts] == [0, 1, 0, 1]
    nodes = [location.node_id for location in group.locations]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert {context.init_method for context in contexts} == {contexts[0].init_method}
    assert {(context.world_size, context.device, context.num_threads) for context in contexts} == {
        (4, "cpu", 1)
    }
    assert set(threads) == {"1"}
    assert len({location.pid for location in group.locations}) == 4


def test_workers_are_closed_before_they_are_killed(
    cluster: RayVirtualCluster, tmp_path: Path
) -> None:
    group = RayWorkerGroup(
        cluster, ClosingWorker, {"folder": tmp_path}, name="policy", parallel_layout=LAYOUT
    )
    assert list(tmp_path.iterdir()) == []
    group.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]


def test_variables_reach_every_process_and_no_log(cluster: RayVirtualCluster) -> None:
    secret = f"hf_{secrets.token_hex(16)}"
    group = RayWorkerGroup(
        cluster,
        PlainWorker,
        {},
        name="policy",
        parallel_layout=LAYOUT,
        environment={"HF_TOKEN": secret, "NCCL_DEBUG": "WARN"},
    )
    seen = group.run_all_workers("variables", "HF_TOKEN", "NCCL_DEBUG")
    assert seen == [(secret, "WARN")] * 4
    with pytest.raises(WorkerError) as raised:
        group.run_all_workers("fail_while_others_wait", 0)
    assert secret not in str(raised.value)
    group.shutdown()
    session = Path(ray_worker._global_node.get_session_dir_path())  # type: ignore[union-attr]
    logs = [path for path in (session / "logs").rglob("*") if path.is_file()]
    assert logs
    for path in logs:
        assert secret not in path.read_text(errors="replace"), path


def test_results_come_in_rank_order_and_any_argument_name_is_free(group: RayWorkerGroup) -> None:
    assert group.run_all_workers("multiply", 3) == [0, 3, 6, 9]
    assert group.run_all_workers("multiply", method=2) == [0, 2, 4, 6]


def test_a_shard_is_pickled_once_and_shared_by_its_replicas(group: RayWorkerGroup) -> None:
    shards = [Counted(np.full(50_000, dp, dtype=np.float32)) for dp in (1, 2)]
    arrived = group.run_all_workers_sharded_data("look", shards, label="x", options={"a": 1})
    assert [shard.num_pickled for shard in shards] == [1, 1]
    assert [(one.rank, one.total) for one in arrived] == [(0, 50_000.0), (2, 100_000.0)]
    assert all(one.common == {"label": "x", "options": {"a": 1}} for one in arrived)
    assert not any(one.is_writeable for one in arrived), "arrays are views of the object store"


def test_a_put_value_is_passed_to_many_calls_without_another_copy(group: RayWorkerGroup) -> None:
    shards = [Counted(np.full(10, dp, dtype=np.float32)) for dp in (1, 2)]
    handles = [group.put(shard) for shard in shards]
    for _ in range(3):
        assert [one.total for one in group.run_all_workers_sharded_data("look", handles)] == [
            10.0,
            20.0,
        ]
    assert [shard.num_pickled for shard in shards] == [1, 1]


def test_stored_shards_reach_their_ranks_in_any_position(group: RayWorkerGroup) -> None:
    shards = [Counted(np.full(10, dp, dtype=np.float32)) for dp in (1, 2)]
    handles = group.put_shards(shards)
    for num_results in (None, 2, 1):
        arrived = group.run_all_workers_sharded_data("look", handles, num_results=num_results)
        expected = [(0, 10.0), (2, 20.0)][:num_results]
        assert [(one.rank, one.total) for one in arrived] == expected
    assert [shard.num_pickled for shard in shards] == [1, 1]
    names = group.put_shards(["first", "second"])
    assert group.get(names) == ["first", "second"]
    assert group.run_all_workers_sharded_data("give_back", ["a", "b"], names) == [
        ("a", "first"),
        ("b", "second"),
    ]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=3000),
        lambda parts: (
            st.dictionaries(st.text(max_size=3), parts, max_size=3)
            | st.tuples(parts, parts)
            | st.integers(1, 2000).map(lambda size: (0.5,) * size)
        ),
        max_leaves=4,
    )
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_values_of_any_size_arrive(group: RayWorkerGroup, value: Any) -> None:
    assert group.run_all_workers("give_back", value, other=value)[::3] == [(value, value)] * 2


def test_only_output_ranks_are_fetched(group: RayWorkerGroup) -> None:
    # Ranks 1 and 3 return a value that fails the test when this process loads it.
    handles = [
        group.submit_all("rank_or_tripwire", rank % 2 == 0, os.getpid())[rank] for rank in range(4)
    ]
    group.wait(handles)
    assert group.get([handles[0], handles[2]]) == [0, 2]


def test_a_handle_goes_from_worker_to_worker_past_the_driver(group: RayWorkerGroup) -> None:
    made = group.submit_all("tripwire", os.getpid())
    assert group.run_all_workers("open", made[3]) == [13, 14, 15, 16]
    assert group.run_all_workers_sharded_data("open", [made[0], made[2]]) == [10, 14]


def test_an_argument_per_dp_rank_is_required(group: RayWorkerGroup) -> None:
    with pytest.raises(
        ValueError, match="argument 1 of add has 3 items; the policy group has dp 2"
    ):
        group.run_all_workers_sharded_data("add", [1, 2], [1, 2, 3])


def test_a_group_takes_no_more_workers_than_there_is_room_for(cluster: RayVirtualCluster) -> None:
    with pytest.raises(
        ValueError, match=r"policy group has 8 workers .*the cluster has bundles for 4"
    ):
        plain_group(cluster, ParallelLayout(dp=8))


def test_rewards_need_no_room_and_a_group_can_be_shut_down_twice(
    cluster: RayVirtualCluster,
) -> None:
    rewards = RayWorkerGroup(
        cluster,
        PlainWorker,
        {},
        name="reward",
        parallel_layout=ParallelLayout(dp=2),
        bundles="anywhere",
    )
    assert rewards.run_all_workers("multiply", 1) == [0, 1]
    rewards.shutdown()
    rewards.shutdown()
    with pytest.raises(RuntimeError, match="the reward group was shut down"):
        rewards.run_all_workers("describe")


def test_each_gpu_has_one_policy_worker_and_the_generator_beside_it(group: RayWorkerGroup) -> None:
    parallel_layout = ParallelLayout(dp=2)
    with RayVirtualCluster(ClusterConfig(gpus_per_node=2, cpus_per_worker=0.25)) as cluster:
        policy = plain_group(cluster, parallel_layout)
        generation = RayWorkerGroup(
            cluster,
            PlainWorker,
            {},
            name="generation",
            parallel_layout=parallel_layout,
            bundles="generation",
        )
        seen = policy.run_all_workers("describe")
        assert [context.device for context, *_ in seen] == ["cuda:0"] * 2
        assert sorted(gpus for *_, gpus in seen) == ["0", "1"]
        assert [gpus for *_, gpus in generation.run_all_workers("describe")] == [
            gpus for *_, gpus in seen
        ]
        assert {location.node_id for location in policy.locations + generation.locations} == {
            policy.locations[0].node_id
        }
        policy.shutdown()
        generation.shutdown()


def test_an_exception_of_a_constructor_surfaces(cluster: RayVirtualCluster) -> None:
    with pytest.raises(WorkerError) as caught:
        plain_group(cluster, ParallelLayout(dp=2), fail_rank=1)
    assert (caught.value.rank, caught.value.method, caught.value.group) == (1, "__init__", "policy")
    assert isinstance(caught.value.cause, KeyError)
    assert "raise KeyError" in caught.value.traceback_text
    assert (
        str(caught.value)
        == "worker 1 of the policy group failed in `__init__`: KeyError: 'no such weight'"
    )


def test_exceptions_and_results_that_cannot_be_pickled_are_reported(
    cluster: RayVirtualCluster,
) -> None:
    with pytest.raises(WorkerError, match=r"worker 0 .* RuntimeError: Unpicklable: no \(really\)"):
        plain_group(cluster, ParallelLayout()).run_all_workers("fail_unpicklable")
    with pytest.raises(WorkerError, match=r"cannot pickle 'frame' object"):
        plain_group(cluster, ParallelLayout()).run_all_workers("return_unpicklable")


def test_a_crash_is_named_with_the_last_lines_of_the_log(cluster: RayVirtualCluster) -> None:
    group = plain_group(cluster, ParallelLayout(dp=2))
    with pytest.raises(WorkerDied, match="it crashed") as caught:
        group.run_all_workers("crash", 1)
    assert caught.value.rank == 1
    assert f"pid {group.locations[1].pid} " in str(caught.value)
    (log,) = caught.value.__notes__
    assert "last words before the end" in log
    assert "Segmentation fault" in log
    assert "\n" not in str(caught.value)


def test_a_worker_that_ends_itself_is_lost_and_its_reason_reported(
    cluster: RayVirtualCluster,
) -> None:
    """Not an exception: a new process can do the work."""
    group = plain_group(cluster, ParallelLayout())
    with pytest.raises(WorkerDied, match=r"itself because Worker_TP1 of vLLM \(pid 7\) ended with"):
        group.run_all_workers("lose_child")


def test_an_exception_of_one_rank_stops_those_that_wait_for_it(cluster: RayVirtualCluster) -> None:
    group = plain_group(cluster, ParallelLayout(dp=2))
    start = time.monotonic()
    with pytest.raises(
        WorkerError,
        match=r"worker 1 .*`fail_while_others_wait`: ValueError: row 7 is bad on rank 1",
    ):
        group.run_all_workers("fail_while_others_wait", 1)
    assert time.monotonic() - start < 500, "the other rank sleeps for 1000 seconds"
    for location in group.locations:
        wait_for_end(location.pid)


def test_a_cause_of_death_is_reported_only_when_it_is_known(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = plain_group(cluster, ParallelLayout(dp=2))
    location = group.locations[1]
    kill_in(0.5, location.pid)
    with pytest.raises(WorkerDied) as caught:
        group.run_all_workers("sleep", 100)
    assert caught.value.rank == 1
    assert "as after SIGKILL" in str(caught.value)

    failure = Failure(1, "sleep", ActorDiedError())
    elsewhere = dataclasses.replace(location, machine="another machine")
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", 0.0)
    slow = str(explain(failure, "policy", elsewhere))
    assert "cause unknown, its node did not answer within 0 s" in slow
    assert location.log_path in slow
    assert "left the cluster" not in slow
    gone = explain(failure, "policy", dataclasses.replace(elsewhere, node_id="f" * 56))
    assert "its node left the cluster" in str(gone)


def test_a_hung_worker_is_found_beside_calls_that_are_done(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated checks of an ended call do not restart the deadline."""
    timeouts = dataclasses.replace(cluster.config, progress_timeout_s=3.0)
    monkeypatch.setattr(cluster, "config", timeouts)
    group = plain_group(cluster, ParallelLayout())
    done = group.submit_all("multiply", 1)
    group.wait(done)
    hanging = group.submit_all("sleep", 1000.0)
    with pytest.raises(WorkerHung, match="hangs in `sleep`"):
        for _ in range(200):
            assert group.is_done(done)
            assert not group.is_done(hanging)
            time.sleep(0.1)


def test_a_wait_for_any_call_returns_those_that_are_done(
    cluster: RayVirtualCluster, tmp_path: Path
) -> None:
    groups = [plain_group(cluster, ParallelLayout()) for _ in range(2)]
    (slow,) = groups[0].submit_all("wait_for_file", str(tmp_path / "go"))
    (quick,) = groups[1].submit_all("multiply", 1)
    assert groups[0].wait_any([], 1.0) == []
    assert groups[0].wait_any([slow, quick], 60.0) == [quick]
    assert groups[0].wait_any([slow], 0.0) == []
    (tmp_path / "go").touch()
    assert groups[0].wait_any([slow], 60.0) == [slow]
    for group in groups:
        group.shutdown()


def test_a_hung_worker_is_distinguished_from_a_slow_one(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank loops, later one is stopped; both end the call with the rank and its last
    activity.
    """
    timeouts = dataclasses.replace(cluster.config, progress_timeout_s=5.0)
    monkeypatch.setattr(cluster, "config", timeouts)
    group = plain_group(cluster, ParallelLayout(dp=2))
    assert group.run_all_workers("work", 6.0) == [0, 1], "a slow worker is not taken for a hung one"
    pid = group.locations[1].pid
    with pytest.raises(WorkerHung) as caught:
        group.run_all_workers("work", 0.5, hanging_rank=1)
    assert caught.value.rank == 1
    message = str(caught.value)
    assert message.startswith(f"worker 1 of the policy group (pid {pid} on node ")
    assert "hangs in `work`: no progress for " in message
    assert "(cluster.progress_timeout_s); last activity: sample 1 of 8" in message
    assert "Its process still answers" in message
    assert "in work" in caught.value.__notes__[0]
    for location in group.locations:
        wait_for_end(location.pid)


@pytest.mark.parametrize("has_py_spy", [True, False])
def test_a_rank_that_is_stopped_in_a_collective_is_named_with_its_stack(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch, has_py_spy: bool
) -> None:
    """The other rank waits for it; without py-spy its own fault handler writes the stack."""
    timeouts = dataclasses.replace(cluster.config, progress_timeout_s=6.0)
    monkeypatch.setattr(cluster, "config", timeouts)
    if not has_py_spy:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    group = collective_group(cluster, ParallelLayout(dp=2))
    stopped = group.locations[1].pid
    threading.Timer(0.5, os.kill, (stopped, signal.SIGSTOP)).start()
    with pytest.raises(WorkerHung, match=r"it is stopped \(SIGSTOP or a debugger\)") as caught:
        group.run_all_workers("all_reduce_forever")
    assert caught.value.rank == 1
    message = str(caught.value)
    assert f"worker 1 of the policy group (pid {stopped} " in message
    assert re.search(
        r"Worker 0 waited for it in gloo:all_reduce of \[\[1\]\] \(collective \d+ of", message
    )
    # It was stopped in the collective, or in the sleep after it.
    assert re.search(r"Its innermost call is [\w.]+ \([\w.]+\.py:\d+\)\. ", message)
    assert "all_reduce_forever" in caught.value.__notes__[0]
    wait_for_end(stopped)


def collective_group(cluster: RayVirtualCluster, parallel_layout: ParallelLayout) -> RayWorkerGroup:
    return RayWorkerGroup(
        cluster,
        CollectiveWorker,
        {"parallel_layout": parallel_layout},
        name="policy",
        parallel_layout=parallel_layout,
    )


def kill_in(seconds: float, pid: int) -> None:
    threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)).start()


def test_collectives_cross_nodes_until_a_worker_is_killed(cluster: RayVirtualCluster) -> None:
    """One process group over both nodes; then rank 2 is killed in the middle of a collective."""
    group = collective_group(cluster, LAYOUT)
    assert {(threads, device) for threads, device, _ in group.run_all_workers("describe")} == {
        (1, "cpu")
    }
    assert all(interface for *_, interface in group.run_all_workers("describe"))
    assert group.run_all_workers("sum_along", "dp", 10.0) == [22.0, 24.0, 22.0, 24.0]
    assert group.run_all_workers("sum_along", "tp", 10.0) == [21.0, 21.0, 25.0, 25.0]

    location = group.locations[2]
    kill_in(0.5, location.pid)
    start = time.monotonic()
    with pytest.raises(WorkerDied) as caught:
        group.run_all_workers("all_reduce_forever")
    assert time.monotonic() - start < 50, "a collective times out after 60 seconds"
    message = str(caught.value)
    assert message.startswith(
        f"worker 2 of the policy group (pid {location.pid} on node {location.ip}) died in `all_"
    )
    assert "policy.sequence_packing.train_mb_tokens" in message
    for other in group.locations:
        wait_for_end(other.pid)
    with pytest.raises(WorkerDied):
        group.run_all_workers("describe")


def wait_for_end(pid: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} is still there")


def test_a_broken_collective_waits_for_what_broke_it(cluster: RayVirtualCluster) -> None:
    with pytest.raises(
        WorkerError, match=r"worker 1 .*: ValueError: row 7 is bad on rank 1"
    ) as caught:
        collective_group(cluster, ParallelLayout(dp=2)).run_all_workers("fail_after_leaving", 1)
    assert isinstance(caught.value.cause, ValueError)
    assert "raise ValueError" in caught.value.traceback_text
