"""Reward workers on Ray that hang or are stopped while their results are awaited."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

from nemo_like.config.rollout import RewardConfig, RewardFunctionConfig
from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import WorkerHung
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker
from nemo_like.parallel_layout import ParallelLayout

_TIMEOUT_S = 3.0
_FUNCTIONS = {"mine": RewardFunctionConfig(path="tests.distributed.plain_workers.sleeping_reward")}


@pytest.fixture(scope="module")
def cluster(two_nodes: Cluster) -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster(ClusterConfig(num_nodes=1, cpus_per_worker=0.5)) as cluster:
        yield cluster


def _environment(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> tuple[RewardEnvironment, RayWorkerGroup]:
    timeouts = dataclasses.replace(cluster.config, progress_timeout_s=_TIMEOUT_S)
    monkeypatch.setattr(cluster, "config", timeouts)
    group = RayWorkerGroup(
        cluster,
        RewardWorker,
        {"functions": _FUNCTIONS},
        name="reward",
        bundles="anywhere",
        parallel_layout=ParallelLayout(dp=2),
    )
    return RewardEnvironment(group, RewardConfig(functions=_FUNCTIONS, num_workers=2)), group


def _collect(environment: RewardEnvironment, num_samples: int) -> None:
    """Ask for results as a rollout does, for at most ten times the limit."""
    end_s = time.monotonic() + 10 * _TIMEOUT_S
    num_scored = 0
    while num_scored < num_samples:
        assert time.monotonic() < end_s, "the worker that hangs was not found"
        num_scored += sum(len(scored.keys) for scored in environment.collect(0.05))


def _sample(seconds: str) -> RewardSample:
    return RewardSample(prompt="p", completion=seconds)


def test_a_reward_function_that_hangs_is_found(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, _ = _environment(cluster, monkeypatch)
    environment.submit([0, 1], [_sample("0"), _sample("1000")])
    with pytest.raises(WorkerHung, match=r"worker 1 of the reward group .* hangs in `score`"):
        _collect(environment, 2)


def test_a_stopped_reward_worker_is_found(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, group = _environment(cluster, monkeypatch)
    environment.submit([0, 1], [_sample("0"), _sample("0")])
    _collect(environment, 2)
    os.kill(group.locations[0].pid, signal.SIGSTOP)
    environment.submit([2, 3], [_sample("0"), _sample("0")])
    with pytest.raises(WorkerHung, match=r"worker 0 .* it is stopped"):
        _collect(environment, 2)
