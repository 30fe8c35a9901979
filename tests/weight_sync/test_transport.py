from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

from nemo_like.config.schema import ClusterConfig
from nemo_like.distributed.errors import WorkerError
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
from nemo_like.distributed.ray.worker_group import RayWorkerGroup
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.weight_sync.stream import Bucket
from nemo_like.weight_sync.transport import push
from tests.weight_sync.weight_workers import GeneratorSide, NotForTheDriver, PolicySide

MAX_BYTES = 700


def check_push(policy: WorkerGroup, generator: WorkerGroup) -> None:
    """All generators end with the policy's weights, whatever the bucket size, and the version of
    the last push.
    """
    before = policy.run_all_workers("checksum")[0]
    assert {state[1] for state in generator.run_all_workers("state")} != {before}
    num_buckets = push(policy, generator, 7, max_bytes=MAX_BYTES)
    assert num_buckets > 2
    states = generator.run_all_workers("state")
    assert len(states) == generator.world_size
    for version, checksum, loaded in states:
        assert (version, checksum, len(loaded)) == (7, before, num_buckets)
    assert push(policy, generator, 8) == 1
    assert [state[0] for state in generator.run_all_workers("state")] == [8] * generator.world_size


def test_push_in_one_process() -> None:
    context = local_context(num_threads=1)
    check_push(LocalGroup(PolicySide, {}, context), LocalGroup(GeneratorSide, {}, context))


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayVirtualCluster]:
    with RayVirtualCluster(ClusterConfig(workers_per_node=2, cpus_per_worker=0.5)) as cluster:
        yield cluster


def test_push_between_processes_passes_the_driver_by(
    cluster: RayVirtualCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel_layout = ParallelLayout(dp=2)
    policy = RayWorkerGroup(
        cluster, PolicySide, {"fail_at": 4}, name="policy", parallel_layout=parallel_layout
    )
    generator = RayWorkerGroup(
        cluster,
        GeneratorSide,
        {},
        name="generation",
        parallel_layout=parallel_layout,
        bundles="generation",
    )
    # From here on this process fails to load a bucket; the workers were started before and do not.
    monkeypatch.setenv("NEMO_LIKE_TEST_DRIVER", "1")
    bucket = Bucket.encode([("w", torch.ones(1))])
    tripwire = pickle.dumps(
        NotForTheDriver(bucket.names, bucket.shapes, bucket.dtypes, bucket.data)
    )
    with pytest.raises(AssertionError, match="the driver fetched a bucket"):
        pickle.loads(tripwire)
    check_push(policy, generator)

    # A policy worker that fails half-way is named itself, not the generator that waited for its
    # bucket.
    with pytest.raises(
        WorkerError,
        match="worker 1 of the policy group failed in `weight_bucket`: ValueError: a shard",
    ):
        push(policy, generator, 9, max_bytes=1)
    policy.shutdown()
    generator.shutdown()
