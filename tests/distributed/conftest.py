"""A Ray cluster of two nodes on this machine, one per test module that uses it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from tests.distributed.ray_cluster import cluster_of

NODE: dict[str, Any] = {"num_cpus": 2, "num_gpus": 2}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    """Two raylets with two CPUs and two GPUs each, as far as Ray knows, and this process connected
    to them.
    """
    with cluster_of(NODE, NODE) as cluster:
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        yield cluster
        ray.shutdown()
