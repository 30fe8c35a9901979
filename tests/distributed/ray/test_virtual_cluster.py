"""Reserving room: on a cluster of two nodes, on a Ray started here, and when there is none."""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import ClusterError
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("http://127.0.0.1:8265", "not the address of a cluster's head"),
        ("ray://127.0.0.1:10001", "not the address of a cluster's head"),
        ("127.0.0.1:9", "Connection refused. The head must run"),
        ("somewhere", "it is not of the form host:port"),
    ],
)
def test_a_wrong_ray_address_is_reported_at_once(
    address: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not ray.is_initialized()
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(
        ClusterError, match=rf"RAY_ADDRESS.*{re.escape(address)}.*{re.escape(problem)}"
    ):
        RayVirtualCluster(ClusterConfig())
    assert not ray.is_initialized()


def test_bundles_fill_one_node_after_another(two_nodes: Cluster) -> None:
    with RayVirtualCluster(ClusterConfig(num_nodes=2, workers_per_node=2)) as cluster:
        nodes = [bundle.node_id for bundle in cluster.policy_bundles]
        assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
        assert [bundle.index for bundle in cluster.policy_bundles] == [0, 1, 2, 3]
        assert cluster.generation_bundles == cluster.policy_bundles
    assert ray.is_initialized(), "a Ray that was there before is left as it was"


def test_one_worker_per_node_means_different_nodes(two_nodes: Cluster) -> None:
    with RayVirtualCluster(ClusterConfig(num_nodes=2, workers_per_node=1)) as cluster:
        assert len({bundle.node_id for bundle in cluster.policy_bundles}) == 2


def test_split_generation_has_bundles_of_its_own(two_nodes: Cluster) -> None:
    with RayVirtualCluster(ClusterConfig(workers_per_node=2, generation_workers=2)) as cluster:
        assert (len(cluster.policy_bundles), len(cluster.generation_bundles)) == (2, 2)
        assert {bundle.index for bundle in cluster.policy_bundles + cluster.generation_bundles} == {
            0,
            1,
            2,
            3,
        }
    with RayVirtualCluster(ClusterConfig(generation_workers=2), generates=False) as cluster:
        assert cluster.generation_bundles == cluster.policy_bundles


def test_more_workers_than_the_cluster_has_are_waited_for_and_given_up(two_nodes: Cluster) -> None:
    reports: list[str] = []
    start = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        RayVirtualCluster(
            ClusterConfig(num_nodes=2, workers_per_node=3, placement_timeout_s=3),
            report=reports.append,
        )
    assert time.monotonic() - start >= 3
    message = str(caught.value)
    assert "timed out after 3 s (cluster.placement_timeout_s)" in message
    assert (
        "6 policy workers = cluster.num_nodes 2 x cluster.workers_per_node 3"
        " (cluster.cpus_per_worker 1)" in message
    )
    assert message.count("has 2 CPU + 2 GPU free of 2 CPU + 2 GPU") == 2
    assert message.endswith("To continue, add nodes, or lower cluster.workers_per_node to 2.")
    assert reports
    assert "waiting for resources on the Ray cluster, to which nodes must be added" in reports[0]


def test_excluded_nodes_get_no_workers_and_an_unknown_address_is_named(two_nodes: Cluster) -> None:
    reports: list[str] = []
    unknown = ClusterConfig(num_nodes=2, exclude_nodes=("192.0.2.99",))
    with RayVirtualCluster(unknown, report=reports.append) as cluster:
        assert len(cluster.policy_bundles) == 2
    assert reports[0].startswith("cluster.exclude_nodes: no node has the address 192.0.2.99; the")
    # Both nodes of this machine have its address.
    address = ray.nodes()[0]["NodeManagerAddress"]
    excluded = ClusterConfig(exclude_nodes=(address,), placement_timeout_s=1)
    with pytest.raises(ClusterError, match="Available: no node") as caught:
        RayVirtualCluster(excluded, report=reports.append)
    assert caught.value.num_nodes == 0


def test_room_that_others_give_back_is_taken(two_nodes: Cluster) -> None:
    first = RayVirtualCluster(ClusterConfig(num_nodes=2, workers_per_node=2))
    reports: list[str] = []
    timer = threading.Timer(3.0, first.shutdown)
    timer.start()
    with RayVirtualCluster(
        ClusterConfig(workers_per_node=2, placement_timeout_s=30), report=reports.append
    ) as second:
        assert len(second.policy_bundles) == 2
    timer.join()
    assert "has 0 CPU + 2 GPU free of 2 CPU + 2 GPU" in reports[0]
    assert "must be added" not in reports[0]


def run_python(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env=kept | environment,
        cwd=Path(__file__).parents[3],
    )


def test_ray_address_names_the_cluster_and_it_outlives_the_run(two_nodes: Cluster) -> None:
    script = """
        from nemo_like.config.schema import ClusterConfig
        from nemo_like.parallel_layout import ParallelLayout
        from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
        from nemo_like.distributed.ray.worker_group import RayWorkerGroup
        from tests.distributed.plain_workers import PlainWorker

        with RayVirtualCluster(ClusterConfig(num_nodes=2, workers_per_node=1)) as cluster:
            layout = ParallelLayout(dp=2)
            group = RayWorkerGroup(cluster, PlainWorker, {}, name="policy", parallel_layout=layout)
            print(group.run_all_workers("multiply", 5))
            print(*sorted(location.node_id for location in group.locations))
    """
    done = run_python(script, RAY_ADDRESS=str(two_nodes.address))
    assert done.returncode == 0, done.stderr
    results, nodes = done.stdout.strip().splitlines()
    assert results == "[0, 5]"
    assert nodes.split() == sorted(node["NodeID"] for node in ray.nodes())
    assert len([node for node in ray.nodes() if node["Alive"]]) == 2


def test_a_node_that_joins_is_taken(two_nodes: Cluster) -> None:
    reports: queue.Queue[str] = queue.Queue()
    config = ClusterConfig(num_nodes=1, workers_per_node=3, placement_timeout_s=60)
    with ThreadPoolExecutor() as waiting:
        future = waiting.submit(RayVirtualCluster, config, report=reports.put)
        assert "to which nodes must be added" in reports.get(timeout=30)
        joined = two_nodes.add_node(num_cpus=3)
        with future.result(timeout=60) as cluster:
            assert len(cluster.policy_bundles) == 3
    two_nodes.remove_node(joined)


def test_a_ray_started_here_is_on_loopback_and_refuses_at_once_what_it_can_never_hold() -> None:
    """Without RAY_ADDRESS. Nothing can be added to such a Ray, so there is nothing to wait for; it
    ends with the attempt.
    """
    script = """
        import os, time
        import ray
        from nemo_like.config.schema import ClusterConfig
        from nemo_like.distributed.errors import ClusterError
        from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster

        try:
            RayVirtualCluster(ClusterConfig(workers_per_node=100_000, placement_timeout_s=600))
        except ClusterError as error:
            print(error)
        print(ray.is_initialized(), os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"))
    """
    done = run_python(script)
    assert done.returncode == 0, done.stderr
    error, after = done.stdout.strip().splitlines()
    assert error.startswith(
        "not enough resources for the workers: this machine is the only node of the cluster"
    )
    assert "needed: 100000 policy workers" in error
    assert "Available: 127.0.0.1 has " in error
    assert "lower cluster.workers_per_node to " in error
    assert after == "False None"
