"""Worker groups: their placement, their environment variables, and how they are started.

They run on a Ray cluster or in this process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import WORKING_DIRECTORY
from nemo_like.config.needs import RolloutNeeds, RunNeeds
from nemo_like.config.parallel import is_colocated, policy_layout
from nemo_like.config.rollout import RewardModelConfig
from nemo_like.config.schema import ClusterConfig, DataConfig, ParallelConfig, PolicyConfig
from nemo_like.distributed.activity import set_variables
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.metrics import start_timers
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.run.progress import Progress
from nemo_like.training.reporting import no_gpu_text

if TYPE_CHECKING:
    from nemo_like.distributed.ray.virtual_cluster import BundleSet

logger = logging.getLogger(__name__)
WorkerKind = Literal["policy", "generation", "reward", "environment", "reward_model"]

_PREFIXES = ("NCCL_", "GLOO_", "HF_")
"""Variables of the driver that every worker needs as well: networks, caches and access tokens."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Two names of the settings of torch's CUDA memory allocator."""
_EXPANDABLE_SEGMENTS = "expandable_segments:True"


@dataclass(frozen=True, kw_only=True)
class GroupPlacement:
    """Name, layout and resources of a worker group; a group in this process needs the kind only."""

    kind: WorkerKind
    name: str
    bundles: BundleSet
    parallel_layout: ParallelLayout = field(default_factory=ParallelLayout)
    first_bundle: int = 0
    progress_timeout_s: float | None = None


StartGroup = Callable[..., WorkerGroup]
"""`start(placement, worker_class, **kwargs)` starts a worker group; see `group_starter`."""


@dataclass(frozen=True, kw_only=True)
class WorkersStart:
    """What the workers of a run are started with."""

    policy: PolicyConfig
    parallel: ParallelConfig
    cluster: ClusterConfig
    data: DataConfig
    needs: RunNeeds
    seed: int

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the policy's workers."""
        return policy_layout(self.parallel, self.cluster)


def group_starter(
    cluster: ClusterConfig,
    closing: ExitStack,
    progress: Progress,
    *,
    rollouts: RolloutNeeds | None = None,
    logs: Path | None = None,
) -> StartGroup:
    """Return `start(placement, worker_class, **kwargs)`, which starts a group.

    `rollouts` are the needs of a run with a generator. Every group is stopped with `closing`. After
    a failure the logs of a Ray started here are copied to `logs`. Raises ClusterError if the
    cluster has too few resources.
    """
    if cluster.backend == "local":
        return _local_starter(cluster, rollouts, closing)
    return _ray_starter(cluster, rollouts, closing, progress, logs)


def _local_starter(
    cluster: ClusterConfig, rollouts: RolloutNeeds | None, closing: ExitStack
) -> StartGroup:
    if cluster.gpus_per_node:
        # Imported here: it takes seconds, and this module is also used without GPUs.
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(no_gpu_text(cluster))
    # All groups share the process, and with it the device and the process group.
    context = local_context(
        device="cuda:0" if cluster.gpus_per_node else "cpu",
        collective_timeout_s=cluster.collective_timeout_s,
    )

    environment = worker_environment(cluster, rollouts, "policy", os.environ)
    closing.enter_context(environment_variables(environment))

    def start(placement: GroupPlacement, worker_class: type, **kwargs: Any) -> WorkerGroup:
        group = LocalGroup(
            worker_class,
            kwargs,
            context,
            name=placement.kind,
            progress_timeout_s=cluster.progress_timeout_s,
        )
        closing.callback(group.shutdown)
        return group

    return start


def _ray_starter(
    cluster: ClusterConfig,
    rollouts: RolloutNeeds | None,
    closing: ExitStack,
    progress: Progress,
    logs: Path | None,
) -> StartGroup:
    # Before Ray is started: a variable may be missing.
    environments: dict[str, dict[str, str | None]] = {}
    for kind in get_args(WorkerKind):
        environments[kind] = worker_environment(cluster, rollouts, kind, os.environ)
        environments[kind][WORKING_DIRECTORY] = os.getcwd()
    # Imported on demand: a run on the local backend does not need Ray.
    from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
    from nemo_like.distributed.ray.worker_group import RayWorkerGroup

    workers_per_replica = 1
    if rollouts is not None:
        workers_per_replica = rollouts.generation.engine.workers_per_replica
    with start_timers("start_ray"):
        resources = closing.enter_context(
            RayVirtualCluster(
                cluster,
                generates=rollouts is not None,
                workers_per_replica=workers_per_replica,
                num_extra_workers=num_own_workers(rollouts),
                report=progress.print_line,
                logs=logs,
            )
        )

    def start(placement: GroupPlacement, worker_class: type, **kwargs: Any) -> WorkerGroup:
        group = RayWorkerGroup(
            resources,
            worker_class,
            kwargs,
            name=placement.name,
            parallel_layout=placement.parallel_layout,
            bundles=placement.bundles,
            first_bundle=placement.first_bundle,
            progress_timeout_s=placement.progress_timeout_s,
            environment=environments[placement.kind],
        )
        closing.callback(group.shutdown)
        # In driver.log, so that the processes of a run can be found on their nodes.
        for rank, location in enumerate(group.locations):
            logger.info(
                "worker %d of the %s group: pid %d on node %s",
                rank,
                placement.name,
                location.pid,
                location.ip,
            )
        return group

    return start


def worker_environment(
    cluster: ClusterConfig,
    rollouts: RolloutNeeds | None,
    kind: WorkerKind,
    driver: Mapping[str, str],
) -> dict[str, str | None]:
    """Return the variables that are set in workers of `kind`; `driver` is the driver's environment.

    None removes a variable that a worker inherits: a Ray that the run starts inherits the
    driver's environment, and torch reads only one of two names of the allocator's settings.

    Variables of `cluster.env` replace the driver's, and these replace what a worker inherits
    from its node. Raises ConfigError for a variable that is null in `cluster.env` and not set in
    the driver's environment.
    """
    environment: dict[str, str | None] = {
        name: value for name, value in driver.items() if name.startswith(_PREFIXES)
    }
    own = _own_variables(cluster, driver)
    environment |= own
    # Not one name of each: torch reads only one of them where both are set.
    allocator = {name: own[name] for name in _ALLOCATOR if name in own}
    allocator = allocator or {name: driver[name] for name in _ALLOCATOR if name in driver}
    if kind != "policy":
        # The generator's memory pool for sleeping and the IPC handles of its all-reduce do not
        # support expandable segments.
        return environment | dict.fromkeys(_ALLOCATOR)
    if not allocator and _benefits_from_expandable_segments(cluster, rollouts):
        allocator[_ALLOCATOR[0]] = _EXPANDABLE_SEGMENTS
    if allocator:
        environment |= dict.fromkeys(_ALLOCATOR)
    return environment | allocator


@contextmanager
def environment_variables(environment: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables of this process inside the block, and restore the previous ones after it.

    None removes a variable.
    """
    before = {name: os.environ.get(name) for name in environment}
    set_variables(environment)
    try:
        yield
    finally:
        set_variables(before)


def _own_variables(cluster: ClusterConfig, driver: Mapping[str, str]) -> dict[str, str]:
    """Return `cluster.env` with the driver's values in place of nulls."""
    variables = {}
    for name, value in cluster.env.items():
        if value is not None:
            variables[name] = value
        elif name in driver:
            variables[name] = driver[name]
        else:
            raise ConfigError(
                f"cluster.env.{name} is null, which takes the value of the driver's"
                f" environment, where {name} is not set; export it, or write its value"
            )
    return variables


def _benefits_from_expandable_segments(
    cluster: ClusterConfig, rollouts: RolloutNeeds | None
) -> bool:
    """Return True if the policy runs on GPUs and exports no memory to another process.

    Microbatches differ in length, so a fixed segment size leaves memory unused. A colocated
    generator reads new weights through CUDA IPC, which for expandable segments needs the system
    call pidfd_getfd; most containers do not permit it.
    """
    return cluster.gpus_per_node > 0 and not is_colocated(cluster, rollouts)


def num_own_workers(rollouts: RolloutNeeds | None) -> int:
    """Return the number of workers of reward models with resources of their own."""
    if rollouts is None:
        return 0
    return sum(model.num_workers for model in rollouts.rewards.models.values())


def shares_gpus(cluster: ClusterConfig, model: RewardModelConfig) -> bool:
    """Return True if a reward model runs on the GPUs of the policy."""
    return cluster.gpus_per_node > 0 and model.num_workers == 0


def any_shares_gpus(cluster: ClusterConfig, rollouts: RolloutNeeds | None) -> bool:
    """Return True if a reward model of the run is on the GPUs of the policy."""
    if rollouts is None:
        return False
    return any(shares_gpus(cluster, model) for model in rollouts.rewards.models.values())
