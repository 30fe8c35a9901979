from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.ray.virtual_cluster import Node, ResourceRequest, Resources


def node(name: str, cpus: float, gpus: float = 0, free: float | None = None) -> Node:
    total = Resources(cpus, gpus)
    return Node(name, name, total, total if free is None else Resources(free, gpus))


def request(**cluster: float) -> ResourceRequest:
    return ResourceRequest.from_config(ClusterConfig(**cluster), generates=True)  # type: ignore[arg-type]


def test_the_request_of_a_config() -> None:
    requested = request(num_nodes=2, workers_per_node=4, cpus_per_worker=2, generation_workers=3)
    assert (requested.num_workers, requested.per_node, requested.num_unpinned) == (
        8,
        Resources(8, 0),
        3,
    )
    assert (
        ResourceRequest.from_config(
            ClusterConfig(generation_workers=3), generates=False
        ).num_unpinned
        == 0
    )
    with_gpus = request(gpus_per_node=8, workers_per_node=1, cpus_per_worker=4)
    assert (with_gpus.num_workers, with_gpus.per_node) == (8, Resources(32, 8))


def test_workers_of_reward_models_need_room_beside_the_generator() -> None:
    config = ClusterConfig(workers_per_node=2, generation_workers=2)
    requested = ResourceRequest.from_config(
        config, generates=True, workers_per_replica=2, num_extra_workers=3
    )
    assert requested.num_extra == 3 and requested.bundle == Resources(1, 0)
    assert requested.fits([node("a", 2), node("b", 2), node("c", 3)])
    assert requested.fits([node("a", 7)])
    # The last core of a node of three is none for a replica of two, but for a single worker.
    assert requested.fits([node("a", 3), node("b", 3), node("c", 1)])
    assert not requested.fits([node("a", 3), node("b", 1), node("c", 3)][:2])
    assert not requested.fits([node("a", 6)])
    assert "3 CPU for reward.models.NAME.num_workers 3 in all" in requested.describe([])


@pytest.mark.parametrize("key", ["num_nodes", "workers_per_node", "cpus_per_worker"])
def test_counts_that_are_not_positive_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=f"cluster.{key} is 0; it must be above 0"):
        request(**{key: 0})


@pytest.mark.parametrize(
    ("requested", "nodes", "fits"),
    [
        (request(workers_per_node=2), [node("a", 2)], True),
        (request(workers_per_node=3), [node("a", 2), node("b", 2)], False),
        (request(num_nodes=2, workers_per_node=2), [node("a", 4)], False),
        (request(num_nodes=2, workers_per_node=2), [node("a", 2), node("b", 2)], True),
        (
            request(workers_per_node=2, generation_workers=2),
            [node("a", 2), node("b", 1), node("c", 1)],
            True,
        ),
        (
            request(workers_per_node=2, generation_workers=3),
            [node("a", 2), node("b", 1), node("c", 1)],
            False,
        ),
        (request(workers_per_node=10, cpus_per_worker=0.1), [node("a", 1)], True),
        (request(gpus_per_node=2), [node("a", 8, 1), node("b", 8, 2)], True),
        (request(gpus_per_node=2), [node("a", 8)], False),
    ],
)
def test_whether_it_fits(requested: ResourceRequest, nodes: Sequence[Node], fits: bool) -> None:
    assert requested.fits(nodes) is fits


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([0.5, 1.0, 2.0]),
)
@settings(max_examples=100)
def test_the_advice_fits_or_names_what_to_add(
    cpus: list[int], num_nodes: int, workers_per_node: int, cpus_per_worker: float
) -> None:
    nodes = [node(str(index), count) for index, count in enumerate(cpus)]
    requested = request(
        num_nodes=num_nodes, workers_per_node=workers_per_node, cpus_per_worker=cpus_per_worker
    )
    advice = requested.advise(nodes)
    if requested.fits(nodes):
        assert "Other runs use" in advice
    elif "lower cluster.cpus_per_worker" in advice:
        assert max(cpus) < cpus_per_worker
    else:
        assert "add nodes" in advice
    for key, requested_value in (("num_nodes", num_nodes), ("workers_per_node", workers_per_node)):
        for largest in map(int, re.findall(rf"lower cluster.{key} to (\d+)", advice)):
            kept = {
                "num_nodes": num_nodes,
                "workers_per_node": workers_per_node,
                "cpus_per_worker": cpus_per_worker,
            }
            assert 0 < largest < requested_value
            assert request(**kept | {key: largest}).fits(nodes)
            assert not request(**kept | {key: largest + 1}).fits(nodes)


def test_a_cluster_without_gpus_is_named() -> None:
    requested = request(gpus_per_node=1)
    assert requested.advise([node("a", 8)]) == (
        "No node has a GPU: add nodes with GPUs, or set cluster.gpus_per_node to 0 to run on CPU."
    )


def test_needed_and_available_are_spelled_out() -> None:
    requested = request(num_nodes=2, workers_per_node=4, generation_workers=1)
    assert requested.describe([node("10.0.0.1", 4, free=1.5), node("10.0.0.2", 2)]) == (
        "needed: 8 policy workers = cluster.num_nodes 2 x cluster.workers_per_node 4"
        " (cluster.cpus_per_worker 1), that is"
        " 4 CPU on each of 2 nodes, and 1 CPU for cluster.generation_workers 1. Available: 10.0.0.1"
        " has 1.5 CPU free of"
        " 4 CPU; 10.0.0.2 has 2 CPU free of 2 CPU"
    )
    with_gpus = request(gpus_per_node=2, cpus_per_worker=4)
    assert with_gpus.describe([node("10.0.0.1", 8)]) == (
        "needed: 2 policy workers = cluster.num_nodes 1 x cluster.gpus_per_node 2"
        " (cluster.cpus_per_worker 4), that is"
        " 8 CPU + 2 GPU on each of 1 node. Available: 10.0.0.1 has 8 CPU free of 8 CPU"
    )
    assert requested.advise([node("10.0.0.1", 4), node("10.0.0.2", 2)]) == (
        "To continue, add nodes, or lower cluster.num_nodes to 1, or lower"
        " cluster.workers_per_node to 2."
    )
    assert request(workers_per_node=2, generation_workers=1).advise([node("a", 2)]) == (
        "To continue, add nodes, or lower cluster.generation_workers or cluster.workers_per_node."
    )
    assert "cluster.gpus_per_node to 0 to run on CPU" in with_gpus.advise([node("10.0.0.1", 8)])
