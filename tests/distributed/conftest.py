"""A Ray cluster of two nodes on this machine, one per test module that asks for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import ray
from ray.cluster_utils import Cluster

CPUS_PER_NODE = 2


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Two raylets with two (logical) CPUs each, and this process connected to them."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS_PER_NODE, "include_dashboard": False})
    cluster.add_node(num_cpus=CPUS_PER_NODE)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
