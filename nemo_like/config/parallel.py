"""How a run's workers divide into copies of the model, and whether a model can be divided that way.

Pure arithmetic on the configuration, spelled out in every message, so that nothing starts that
could not have worked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.schema import ClusterConfig, ParallelConfig, RunConfig


def num_policy_workers(cluster: ClusterConfig) -> int:
    """One per GPU, or `workers_per_node` on CPU."""
    return (
        1
        if cluster.backend == "local"
        else cluster.num_nodes * (cluster.gpus_per_node or cluster.workers_per_node)
    )


def replica_size(parallel: ParallelConfig) -> int:
    """Workers that share one copy of the model."""
    return parallel.tensor * parallel.context * parallel.pipeline


def num_replicas(config: RunConfig) -> int:
    """The degree of data parallelism: copies of the model, each with rows of its own."""
    return num_policy_workers(config.cluster) // replica_size(config.parallel)


def workers_shown(cluster: ClusterConfig) -> str:
    """Where the number of workers comes from. Example: `cluster.num_nodes 2 x cluster.gpus_per_node
    8`.
    """
    if cluster.backend == "local":
        return "cluster.backend local"
    key = "gpus_per_node" if cluster.gpus_per_node else "workers_per_node"
    return f"cluster.num_nodes {cluster.num_nodes} x cluster.{key} {getattr(cluster, key)}"


def parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """What is wrong with `parallel` whatever the model is."""
    parallel, workers, size = (
        config.parallel,
        num_policy_workers(config.cluster),
        replica_size(config.parallel),
    )
    if workers % size:
        legal = [count for count in (workers // size * size, (workers // size + 1) * size) if count]
        yield Problem(
            (
                "parallel.tensor",
                "parallel.context",
                "parallel.pipeline",
                "cluster.num_nodes",
                "cluster.workers_per_node",
            ),
            f"parallel.tensor {parallel.tensor} x parallel.context {parallel.context} x"
            f" parallel.pipeline {parallel.pipeline}"
            f" = {size} workers share one copy of the model, and {workers} workers"
            f" ({workers_shown(config.cluster)}) / {size}"
            f" = {workers / size:.4g} copies, not a whole number: use"
            f" {' or '.join(map(str, legal))} workers",
        )
    if parallel.sequence and parallel.tensor == 1:
        yield Problem(
            ("parallel.sequence", "parallel.tensor"),
            "parallel.sequence is true, but it shares what tensor parallelism leaves whole and"
            " parallel.tensor is 1:"
            " set it to false, or parallel.tensor to 2 or more",
        )
    if parallel.pipeline > 1 and config.policy.engine == "dtensor":
        yield Problem(
            ("parallel.pipeline", "policy.engine"),
            f"parallel.pipeline is {parallel.pipeline}, but policy.engine dtensor has no pipeline:"
            f" set it to 1, or"
            " policy.engine to megatron",
        )
    stage = workers // parallel.pipeline
    if parallel.expert > 1 and config.policy.engine == "dtensor":
        yield Problem(
            ("parallel.expert", "policy.engine"),
            f"parallel.expert is {parallel.expert}, but policy.engine dtensor has every expert on"
            f" every worker: set it to 1,"
            " or policy.engine to megatron",
        )
    elif workers % size == 0 and stage % parallel.expert:
        yield Problem(
            (
                "parallel.expert",
                "parallel.pipeline",
                "cluster.num_nodes",
                "cluster.workers_per_node",
            ),
            f"parallel.expert {parallel.expert} workers share the experts of a pipeline stage,"
            f" which has {workers} workers"
            f" ({workers_shown(config.cluster)}) / parallel.pipeline {parallel.pipeline} = {stage},"
            f" and {stage} /"
            f" {parallel.expert} = {stage / parallel.expert:.4g}, not a whole number: set"
            f" parallel.expert to"
            f" {legal_divisors(stage, parallel.expert)}",
        )


def legal_divisors(count: int, degree: int) -> str:
    """The divisors of `count` around `degree`. Example: 6, 4 -> `3 or 6`."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below, above = (
        max(number for number in divisors if number < degree),
        [number for number in divisors if number > degree],
    )
    return " or ".join(map(str, [below, *above[:1]]))


def length_multiple(parallel: ParallelConfig) -> int:
    """Positions a row or a microbatch may be rounded up to, at most: what context and sequence
    parallelism need.
    """
    chunks = 2 * parallel.context if parallel.context > 1 else 1
    return math.lcm(chunks, parallel.context * parallel.tensor if parallel.sequence else 1)
