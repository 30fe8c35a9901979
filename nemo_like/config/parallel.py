"""Arithmetic of the parallel layout: policy workers, model replicas, and their checks.

Everything follows from the configuration alone, so that a wrong layout is an error before anything
is started. Every message contains the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.schema import ClusterConfig, ParallelConfig, RunConfig


def num_policy_workers(cluster: ClusterConfig) -> int:
    """Return the number of policy workers: one per GPU, or `workers_per_node` on CPU."""
    if cluster.backend == "local":
        return 1
    return cluster.num_nodes * (cluster.gpus_per_node or cluster.workers_per_node)


def replica_size(parallel: ParallelConfig) -> int:
    """Return the number of workers of one model replica."""
    return parallel.tensor * parallel.context * parallel.pipeline


def num_replicas(config: RunConfig) -> int:
    """Return the data-parallel size: the number of model replicas, each with its own rows."""
    return num_policy_workers(config.cluster) // replica_size(config.parallel)


def workers_shown(cluster: ClusterConfig) -> str:
    """Return the keys behind the number of workers, for messages.

    Example: `cluster.num_nodes 2 x cluster.gpus_per_node 8`.
    """
    if cluster.backend == "local":
        return "cluster.backend local"
    key = "gpus_per_node" if cluster.gpus_per_node else "workers_per_node"
    return f"cluster.num_nodes {cluster.num_nodes} x cluster.{key} {getattr(cluster, key)}"


def parallel_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `parallel` that do not depend on the model."""
    parallel = config.parallel
    workers = num_policy_workers(config.cluster)
    size = replica_size(parallel)
    if workers % size:
        below = workers // size * size
        legal = [str(count) for count in (below, below + size) if count > 0]
        yield Problem(
            (
                "parallel.tensor",
                "parallel.context",
                "parallel.pipeline",
                "cluster.num_nodes",
                "cluster.workers_per_node",
            ),
            f"parallel.tensor {parallel.tensor} x parallel.context {parallel.context} x"
            f" parallel.pipeline {parallel.pipeline} = {size} workers per model replica, and"
            f" {workers} workers ({workers_shown(config.cluster)}) / {size} ="
            f" {workers / size:.4g} replicas, not a whole number: use {' or '.join(legal)} workers",
        )
    yield from _sequence_problems(config)
    yield from _pipeline_problems(config)
    yield from _expert_problems(config, workers, size)


def _sequence_problems(config: RunConfig) -> Iterator[Problem]:
    if config.parallel.sequence and config.parallel.tensor == 1:
        yield Problem(
            ("parallel.sequence", "parallel.tensor"),
            "parallel.sequence is true, but it shards activations over the tensor-parallel group"
            " and parallel.tensor is 1: set it to false, or parallel.tensor to 2 or more",
        )


def _pipeline_problems(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if parallel.pipeline > 1 and config.policy.engine == "dtensor":
        yield Problem(
            ("parallel.pipeline", "policy.engine"),
            f"parallel.pipeline is {parallel.pipeline}, but policy.engine dtensor has no pipeline:"
            " set it to 1, or policy.engine to megatron",
        )


def _expert_problems(
    config: RunConfig,
    workers: int,
    size: int,
) -> Iterator[Problem]:
    """The expert-parallel size must divide the workers of a pipeline stage."""
    parallel = config.parallel
    stage = workers // parallel.pipeline
    if parallel.expert > 1 and config.policy.engine == "dtensor":
        yield Problem(
            ("parallel.expert", "policy.engine"),
            f"parallel.expert is {parallel.expert}, but policy.engine dtensor has no expert"
            " parallelism: set it to 1, or policy.engine to megatron",
        )
    elif workers % size == 0 and stage % parallel.expert:
        yield Problem(
            (
                "parallel.expert",
                "parallel.pipeline",
                "cluster.num_nodes",
                "cluster.workers_per_node",
            ),
            f"parallel.expert {parallel.expert} must divide the workers of a pipeline stage,"
            f" {workers} workers ({workers_shown(config.cluster)}) / parallel.pipeline"
            f" {parallel.pipeline} = {stage}, and {stage} / {parallel.expert} ="
            f" {stage / parallel.expert:.4g}, not a whole number: set parallel.expert to"
            f" {legal_divisors(stage, parallel.expert)}",
        )


def legal_divisors(count: int, degree: int) -> str:
    """Return the divisors of `count` around `degree`. Example: 6, 4 -> `3 or 6`."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below = [number for number in divisors if number < degree]
    above = [number for number in divisors if number > degree]
    return " or ".join(map(str, below[-1:] + above[:1]))


def length_multiple(parallel: ParallelConfig) -> int:
    """Return the multiple of tokens to which context and sequence parallelism pad microbatches.

    Context parallelism splits each row into 2 x context chunks (zig-zag); sequence parallelism
    splits the tokens of each context rank over the tensor-parallel group.
    """
    chunks = 2 * parallel.context if parallel.context > 1 else 1
    shards = parallel.context * parallel.tensor if parallel.sequence else 1
    return math.lcm(chunks, shards)
