"""The parallel layout of a configuration, and its problems in terms of keys.

Everything follows from the configuration alone, so that a wrong layout is an error before anything
is started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.needs import RolloutNeeds
from nemo_like.config.schema import (
    ClusterConfig,
    ParallelConfig,
    PolicyConfig,
    SequencePackingConfig,
)
from nemo_like.parallel_layout import (
    EngineName,
    LayoutError,
    LayoutProblem,
    ParallelLayout,
    engine_problems,
)


def num_policy_workers(cluster: ClusterConfig) -> int:
    """Return the number of policy workers: one per GPU, or `workers_per_node` on CPU."""
    if cluster.backend == "local":
        return 1
    # One process per GPU is what NCCL and FSDP2 expect.
    workers_per_node = cluster.gpus_per_node or cluster.workers_per_node
    return cluster.num_nodes * workers_per_node


def build_layout(parallel: ParallelConfig, num_workers: int) -> ParallelLayout:
    """Return the layout of `num_workers` policy workers. Raises LayoutError if there is none."""
    return ParallelLayout.from_world_size(
        num_workers,
        pp=parallel.pipeline,
        cp=parallel.context,
        tp=parallel.tensor,
        ep=parallel.expert,
        vpp=parallel.virtual_pipeline,
        sequence_parallel=parallel.sequence,
        num_replicas=parallel.replicas,
        reshard=parallel.reshard,
        dynamic_context=parallel.dynamic_context,
    )


def policy_layout(parallel: ParallelConfig, cluster: ClusterConfig) -> ParallelLayout:
    """Return the layout of the policy's workers. Raises LayoutError if there is none."""
    return build_layout(parallel, num_policy_workers(cluster))


def num_generation_workers(cluster: ClusterConfig) -> int:
    """Return the number of generation workers: with resources of their own, or colocated."""
    return cluster.generation_workers or num_policy_workers(cluster)


def is_colocated(cluster: ClusterConfig, rollouts: RolloutNeeds | None) -> bool:
    """Return True if policy and generator take turns on the same GPUs."""
    return rollouts is not None and cluster.gpus_per_node > 0 and cluster.generation_workers == 0


def workers_shown(cluster: ClusterConfig) -> str:
    """Return the keys behind the number of workers, for messages.

    Example: `cluster.num_nodes 2 x cluster.gpus_per_node 8`.
    """
    if cluster.backend == "local":
        return "cluster.backend local"
    key = "gpus_per_node" if cluster.gpus_per_node else "workers_per_node"
    return f"cluster.num_nodes {cluster.num_nodes} x cluster.{key} {getattr(cluster, key)}"


def parallel_problems(
    parallel: ParallelConfig, cluster: ClusterConfig, engine: EngineName
) -> list[Problem]:
    """Return the problems of `parallel` that do not depend on the model."""
    problems = engine_problems(
        engine,
        pp=parallel.pipeline,
        vpp=parallel.virtual_pipeline,
        num_replicas=parallel.replicas,
        reshard=parallel.reshard,
    )
    if not problems:
        # A size that the engine does not have is not worth making divisible.
        try:
            problems = policy_layout(parallel, cluster).engine_problems(engine)
        except LayoutError as error:
            problems = list(error.problems)
    return located_problems(problems, cluster)


def run_layout_problems(
    parallel: ParallelConfig, cluster: ClusterConfig, policy: PolicyConfig
) -> list[Problem]:
    """Return the problems of `parallel` and of what it needs of the policy, without a model."""
    problems = parallel_problems(parallel, cluster, policy.engine)
    return [*problems, *_context_problems(parallel, policy.sequence_packing)]


def _context_problems(
    parallel: ParallelConfig, packing: SequencePackingConfig
) -> Iterator[Problem]:
    """Yield a problem unless the rows of microbatches can be divided over context ranks."""
    if not parallel.dynamic_context:
        return
    if not packing.enabled:
        yield Problem(
            ("parallel.dynamic_context", "policy.sequence_packing.enabled"),
            "parallel.dynamic_context is true, but it divides packed microbatches: set"
            " policy.sequence_packing.enabled to true, or parallel.dynamic_context to false",
        )
    elif packing.algorithm != "balanced":
        yield Problem(
            ("policy.sequence_packing.algorithm", "parallel.dynamic_context"),
            f"policy.sequence_packing.algorithm is {packing.algorithm}, but with"
            " parallel.dynamic_context rows are packed and assigned to ranks jointly: set it to"
            " balanced, or parallel.dynamic_context to false",
        )


def located_problems(problems: Iterable[LayoutProblem], cluster: ClusterConfig) -> list[Problem]:
    """Return problems of a layout with the keys behind the number of workers."""
    found = []
    for keys, text in problems:
        shown = f" (workers: {workers_shown(cluster)})" if "cluster.num_nodes" in keys else ""
        found.append(Problem(keys, text + shown))
    return found
