"""The workers of a run: a Ray cluster or this process, a policy, and for rollouts a generator and a
reward environment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_like.config.schema import RunConfig
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.parallel_layout import Topology
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.environments.reward import RewardEnvironment
from nemo_like.environments.rewards import RewardWorker, load_reward_functions
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.policy.batching import policy_topology
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.progress import Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunWorkers:
    """`generator` and `rewards` are there when the run generates."""

    policy: Policy
    generator: Generator | None
    rewards: RewardEnvironment | None
    is_colocated: bool
    """Policy and generator take turns on the same accelerators; on CPU, and on devices of their
    own, both just stay.
    """

    def policy_onloaded(self) -> AbstractContextManager[None]:
        """The policy is on its devices inside."""
        return self.policy.onloaded() if self.is_colocated else nullcontext()

    def generator_onloaded(self) -> AbstractContextManager[None]:
        """The generator is on its devices inside."""
        return (
            self.generator.onloaded()
            if self.generator is not None and self.is_colocated
            else nullcontext()
        )


@contextmanager
def start_workers(
    config: RunConfig,
    progress: Progress,
    *,
    generates: bool,
    needs_reference: bool,
    logs: Path | None = None,
    end_token_ids: Sequence[int] = (),
) -> Iterator[RunWorkers]:
    """Start every worker the run needs; stop them, and a Ray started here, when the block ends.

    After a failure the logs of a Ray started here are copied to `logs`. `end_token_ids` end a
    completion, in addition to those that the model's files declare. Raises ConfigError for
    reward functions that cannot be imported, before anything is started, and ClusterError when the
    cluster has no room.
    """
    if generates:
        load_reward_functions(config.reward.functions)
    is_colocated = (
        generates and config.cluster.gpus_per_node > 0 and config.cluster.generation_workers == 0
    )
    worker_class = {"hf": HFGenerationWorker}[config.policy.generation.backend]
    with ExitStack() as closing:
        with progress.phase("starting workers", 3 if generates else 1, unit="groups") as phase:
            start = _starter(config, closing, progress, generates=generates, logs=logs)
            policy_group = start(
                "policy",
                policy_worker_class(config),
                config=config.policy,
                parallel=config.parallel,
                seed=config.seed,
                needs_reference=needs_reference,
            )
            policy = Policy(
                policy_group,
                config.policy,
                sequence_parallel=config.parallel.sequence,
                seed=config.seed,
            )
            if is_colocated:
                policy_group.run_all_workers(
                    "sleep"
                )  # the generator is loaded onto the same device next
            phase.advance()
            if not generates:
                generator = rewards = None
            else:
                generator = Generator(
                    start(
                        "generation", worker_class, **_generation_arguments(config, end_token_ids)
                    )
                )
                if is_colocated:
                    generator.group.run_all_workers("offload")
                phase.advance()
                functions = config.reward.functions
                rewards = RewardEnvironment(
                    start("reward", RewardWorker, functions=functions), functions
                )
                phase.advance()
        yield RunWorkers(policy, generator, rewards, is_colocated)


def policy_worker_class(config: RunConfig) -> type[PolicyWorker]:
    """The worker of `policy.engine`, imported only if it is the one."""
    if config.policy.engine == "dtensor":
        from nemo_like.policy.dtensor.worker import DTensorPolicyWorker

        return DTensorPolicyWorker
    from nemo_like.policy.megatron.worker import MegatronPolicyWorker

    return MegatronPolicyWorker


def _generation_arguments(config: RunConfig, end_token_ids: Sequence[int]) -> dict[str, Any]:
    return {
        "model_name": config.policy.model_name,
        "tokenizer_name": config.policy.tokenizer_name,
        "precision": config.policy.precision,
        "batch_size": config.policy.generation.batch_size,
        "end_token_ids": tuple(end_token_ids),
    }


def _starter(
    config: RunConfig, closing: ExitStack, progress: Progress, *, generates: bool, logs: Path | None
) -> Callable[..., WorkerGroup]:
    """`start(name, worker_class, **kwargs)` on Ray or in this process; whatever it starts is
    stopped with `closing`.
    """
    if config.cluster.backend == "local":
        context = local_context(
            device="cuda:0" if config.cluster.gpus_per_node else "cpu",
            collective_timeout_s=config.cluster.collective_timeout_s,
        )

        def start_here(name: str, worker_class: type, **kwargs: Any) -> WorkerGroup:
            timeout_s = config.cluster.progress_timeout_s
            group = LocalGroup(
                worker_class, kwargs, context, name=name, progress_timeout_s=timeout_s
            )
            closing.callback(group.shutdown)
            return group

        return start_here

    # Only here, so that a run without Ray does not need it to be installed.
    from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
    from nemo_like.distributed.ray.worker_group import RayWorkerGroup

    cluster = closing.enter_context(
        RayVirtualCluster(config.cluster, generates=generates, report=progress.say, logs=logs)
    )
    placements: dict[str, tuple[Literal["policy", "generation", "anywhere"], Topology]] = {
        "policy": ("policy", policy_topology(config)),
        "generation": ("generation", Topology(dp=cluster.num_generation_workers)),
        "reward": ("anywhere", Topology(dp=config.reward.num_workers)),
    }

    def start_on_ray(name: str, worker_class: type, **kwargs: Any) -> WorkerGroup:
        placement, topology = placements[name]
        group = RayWorkerGroup(
            cluster, worker_class, kwargs, name=name, topology=topology, placement=placement
        )
        closing.callback(group.shutdown)
        for rank, location in enumerate(group.locations):
            logger.info(
                "worker %d of the %s group: pid %d on node %s",
                rank,
                name,
                location.pid,
                location.ip,
            )
        return group

    return start_on_ray
