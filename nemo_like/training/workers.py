"""The worker groups of a run: a policy, and for rollouts a generator and reward workers.

They run on a Ray cluster or in this process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch

from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import is_colocated, policy_layout, workers_per_replica
from nemo_like.config.schema import ClusterConfig, ParallelConfig, RunConfig, Switch
from nemo_like.data.packing.balance import compile_kernels, needs_kernels
from nemo_like.distributed.activity import set_variables
from nemo_like.distributed.local_group import LocalGroup, local_context
from nemo_like.distributed.worker_group import WorkerGroup, call_all
from nemo_like.environments.environment_workers import EnvironmentWorkers, load_environment
from nemo_like.environments.reward_calls import load_reward_functions
from nemo_like.environments.reward_worker import RewardEnvironment
from nemo_like.metrics import start_timers
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.prediction.memory import CONTEXT_BYTES, GIB, SAFETY_SHARE
from nemo_like.run.progress import Progress
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.model_files import open_model_spec, policy_memory, recorded_experts
from nemo_like.training.policy_backends import policy_backend
from nemo_like.training.rollout_workers import (
    GroupPlacement,
    RewardModelFiles,
    RolloutWorkers,
    StartGroup,
    WorkerKind,
    any_shares_gpus,
    num_own_workers,
    open_reward_models,
    start_environment,
    start_generator,
    start_reward_models,
    start_rewards,
)

logger = logging.getLogger(__name__)
ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True)
class RunWorkers:
    """The workers of one run."""

    policy: Policy
    rollout_workers: RolloutWorkers | None
    """None in a run that generates no completions."""
    offloads: bool
    """Policy and generator share GPUs on which they do not fit together, so each is offloaded while
    the other runs."""
    shares_reward_models: bool = False
    """Reward models run on the GPUs of the policy."""

    @property
    def rollout(self) -> RolloutWorkers:
        """The rollout workers. Raises RuntimeError in a run that generates no completions."""
        if self.rollout_workers is None:
            raise RuntimeError("this run was started without a generator and reward workers")
        return self.rollout_workers

    def policy_onloaded(self) -> AbstractContextManager[None]:
        """Return a context in which the policy is on its devices."""
        return self.policy.onloaded() if self.offloads else nullcontext()

    def generator_onloaded(self, *, discards_weights: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the generator is on its devices; see `Generator.onloaded`."""
        if not self.offloads:
            return nullcontext()
        return self.rollout.generator.onloaded(discards_weights=discards_weights)

    @contextmanager
    def reward_models_alone(self) -> Iterator[None]:
        """Move what shares GPUs with reward models to host memory inside the block.

        Call where the generator is on its devices and the policy does not compute.
        """
        if not self.shares_reward_models:
            yield
        elif self.offloads:
            # The policy is in host memory already.
            with self.generator_offloaded():
                yield
        else:
            call_all(self.policy.group, PolicyWorker.offload)
            yield
            call_all(self.policy.group, PolicyWorker.onload)

    def generator_offloaded(self) -> AbstractContextManager[None]:
        """Return a context in which the generator is in host memory, if the run offloads it."""
        return self.rollout.generator.offloaded() if self.offloads else nullcontext()


@contextmanager
def start_workers(
    config: RunConfig,
    progress: Progress,
    *,
    logs: Path | None = None,
    end_token_ids: Sequence[int] = (),
) -> Iterator[RunWorkers]:
    """Start the workers of a run; stop them, and a Ray that was started, with the block.

    After a failure the logs of a Ray started here are copied to `logs`. `end_token_ids` end a
    completion, in addition to those that the model's files declare. Raises ConfigError for
    reward functions that cannot be imported and reward models that cannot be opened, before
    anything is started, and ClusterError if the cluster has too few resources.
    """
    reward_model_files: dict[str, RewardModelFiles] = {}
    if config.generates:
        # Only the check: the workers import the functions themselves.
        load_reward_functions(config.reward.functions)
        reward_model_files = open_reward_models(config)
        if config.environment.path is not None:
            load_environment(config.environment)
    if needs_kernels(config.policy_in_rows.train_global_batch_size):
        _start_in_thread(_compile_planner)
    with ExitStack() as closing:
        with (
            start_timers("start_workers"),
            progress.phase(
                "starting workers", 3 if config.generates else 1, unit="groups", has_eta=False
            ) as phase,
        ):
            start = group_starter(config, closing, progress, logs=logs)
            begin = _starts_now if config.cluster.backend == "local" else _start_in_thread
            policy_start = begin(
                partial(_start_policy, config, start, needs_reference=config.needs_reference)
            )
            # Their processes use no GPU.
            services = begin(partial(_start_services, config, start, closing, progress))
            start_replicas = partial(
                start_generator,
                config,
                start,
                end_token_ids,
                progress,
                shares_process=config.cluster.backend == "local",
                router_replay=recorded_experts(config),
            )
            generator_start = None
            if config.generates and not (is_colocated(config) and config.cluster.gpus_per_node):
                generator_start = begin(partial(start_replicas, can_sleep=False))
            policy = policy_start.result()
            offload = run_offload_decision(config, policy)
            if is_colocated(config):
                _report_offload(offload, progress)
            if offload.offloads:
                # The generator is loaded onto the same device next.
                call_all(policy.group, PolicyWorker.offload)
            phase.advance()
            rollout_workers = None
            if config.generates:
                if generator_start is None:
                    generator_start = begin(partial(start_replicas, can_sleep=offload.offloads))
                generator = generator_start.result()
                closing.callback(generator.shutdown)
                if offload.offloads:
                    generator.offload()
                phase.advance()
                environment, rewards = services.result()
                reward_models = start_reward_models(config, reward_model_files, start, progress)
                rollout_workers = RolloutWorkers(generator, rewards, environment, reward_models)
                phase.advance()
        yield RunWorkers(
            policy=policy,
            rollout_workers=rollout_workers,
            offloads=offload.offloads,
            shares_reward_models=any_shares_gpus(config),
        )


def _start_in_thread(call: Callable[[], ValueT]) -> Future[ValueT]:
    """Call in a thread, which ends with the cluster if another start fails first."""
    future: Future[ValueT] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (raised where the result is needed)
            future.set_exception(error)

    threading.Thread(target=run, name="start", daemon=True).start()
    return future


def _starts_now(call: Callable[[], ValueT]) -> Future[ValueT]:
    """Call in this thread."""
    future: Future[ValueT] = Future()
    future.set_result(call())
    return future


def _start_services(
    config: RunConfig, start: StartGroup, closing: ExitStack, progress: Progress
) -> tuple[EnvironmentWorkers | None, RewardEnvironment | None]:
    """Start the workers of the environment and of the reward functions of a run with rollouts."""
    if not config.generates:
        return None, None
    environment = start_environment(config, start, closing, progress)
    has_other_rewards = environment is not None or bool(config.reward.models)
    if config.reward.functions or (config.needs_rewards and not has_other_rewards):
        return environment, start_rewards(config, start)
    return environment, None


def _compile_planner() -> None:
    with start_timers("start_compile"):
        compile_kernels()


@contextmanager
def local_policy(config: RunConfig, *, needs_reference: bool) -> Iterator[Policy]:
    """Start the policy alone, as one rank in this process, whatever layout `config` has.

    It is on a GPU if `config` has GPUs and this machine has one. It stops with the block.
    """
    has_gpu = config.cluster.gpus_per_node > 0 and torch.cuda.is_available()
    cluster = ClusterConfig(backend="local", gpus_per_node=int(has_gpu), env=config.cluster.env)
    local = replace(config, cluster=cluster, parallel=ParallelConfig())
    with ExitStack() as closing:
        start = _local_starter(local, closing)
        yield _start_policy(local, start, needs_reference=needs_reference)


def _report_offload(offload: OffloadDecision, progress: Progress) -> None:
    """Print the decision of `cluster.offload` with its reason."""
    state = "stay on their GPUs"
    if offload.offloads:
        state = "move to host memory while the other runs"
    progress.print_line(f"offload: policy and generator {state} ({offload.reason})")


def _start_policy(config: RunConfig, start: StartGroup, *, needs_reference: bool) -> Policy:
    group = start(
        GroupPlacement(
            kind="policy", name="policy", bundles="policy", parallel_layout=policy_layout(config)
        ),
        policy_backend(config.policy).worker(),
        config=config.policy,
        start=PolicyStart(
            parallel=config.parallel,
            seed=config.seed,
            needs_reference=needs_reference,
            teachers=config.teacher_names,
            head=config.output_head,
        ),
    )
    return Policy(group, config.policy_in_rows, open_model_spec(config), seed=config.seed)


def group_starter(
    config: RunConfig, closing: ExitStack, progress: Progress, *, logs: Path | None
) -> StartGroup:
    """Return `start(placement, worker_class, **kwargs)`, which starts a group.

    Every group is stopped with `closing`.
    """
    if config.cluster.backend == "local":
        return _local_starter(config, closing)
    return _ray_starter(config, closing, progress, logs=logs)


def _local_starter(config: RunConfig, closing: ExitStack) -> StartGroup:
    # All groups share the process, and with it the device and the process group.
    context = local_context(
        device="cuda:0" if config.cluster.gpus_per_node else "cpu",
        collective_timeout_s=config.cluster.collective_timeout_s,
    )

    environment = worker_environment(config, "policy", os.environ)
    closing.enter_context(environment_variables(environment))

    def start(placement: GroupPlacement, worker_class: type, **kwargs: Any) -> WorkerGroup:
        group = LocalGroup(
            worker_class,
            kwargs,
            context,
            name=placement.kind,
            progress_timeout_s=config.cluster.progress_timeout_s,
        )
        closing.callback(group.shutdown)
        return group

    return start


def _ray_starter(
    config: RunConfig, closing: ExitStack, progress: Progress, *, logs: Path | None
) -> StartGroup:
    # Before Ray is started: a variable may be missing.
    environments: dict[str, dict[str, str | None]] = {}
    for kind in get_args(WorkerKind):
        environments[kind] = worker_environment(config, kind, os.environ)
    # Imported on demand: a run on the local backend does not need Ray.
    from nemo_like.distributed.ray.virtual_cluster import RayVirtualCluster
    from nemo_like.distributed.ray.worker_group import RayWorkerGroup

    with start_timers("start_ray"):
        cluster = closing.enter_context(
            RayVirtualCluster(
                config.cluster,
                generates=config.generates,
                workers_per_replica=workers_per_replica(config),
                num_extra_workers=num_own_workers(config),
                report=progress.print_line,
                logs=logs,
            )
        )

    def start(placement: GroupPlacement, worker_class: type, **kwargs: Any) -> WorkerGroup:
        group = RayWorkerGroup(
            cluster,
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


_PREFIXES = ("NCCL_", "GLOO_", "HF_")
"""Variables of the driver that every worker needs as well: networks, caches and access tokens."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Two names of the settings of torch's CUDA memory allocator."""
_EXPANDABLE_SEGMENTS = "expandable_segments:True"


def worker_environment(
    config: RunConfig, kind: WorkerKind, driver: Mapping[str, str]
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
    own = _own_variables(config, driver)
    environment |= own
    # Not one name of each: torch reads only one of them where both are set.
    allocator = {name: own[name] for name in _ALLOCATOR if name in own}
    allocator = allocator or {name: driver[name] for name in _ALLOCATOR if name in driver}
    if kind != "policy":
        # The generator's memory pool for sleeping and the IPC handles of its all-reduce do not
        # support expandable segments.
        return environment | dict.fromkeys(_ALLOCATOR)
    if not allocator and _benefits_from_expandable_segments(config):
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


def _own_variables(config: RunConfig, driver: Mapping[str, str]) -> dict[str, str]:
    """Return `cluster.env` with the driver's values in place of nulls."""
    variables = {}
    for name, value in config.cluster.env.items():
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


def _benefits_from_expandable_segments(config: RunConfig) -> bool:
    """Return True if the policy runs on GPUs and exports no memory to another process.

    Microbatches differ in length, so a fixed segment size leaves memory unused. A colocated
    generator reads new weights through CUDA IPC, which for expandable segments needs the system
    call pidfd_getfd; most containers do not permit it.
    """
    return config.cluster.gpus_per_node > 0 and not is_colocated(config)


@dataclass(frozen=True)
class OffloadDecision:
    """Whether policy and generator move to host memory while the other runs, and why."""

    offloads: bool
    reason: str


def run_offload_decision(config: RunConfig, policy: Policy) -> OffloadDecision:
    """Return whether policy and generator of a run take turns on their devices.

    They do not if they share no device: the memory of a CPU holds both.
    """
    if not is_colocated(config):
        return OffloadDecision(False, "policy and generator share no GPU")
    device_bytes = policy.device_info.memory_bytes
    if device_bytes is None:
        return OffloadDecision(False, "the workers have no GPU")
    if any_shares_gpus(config) and config.cluster.offload == "auto":
        return OffloadDecision(True, "a reward model shares their GPUs")
    return decide_offload(
        config.cluster.offload,
        policy_bytes=sum(policy_memory(config, policy.model)[1].values()),
        generator_bytes=generation_backend(config.policy).peak_bytes(
            config.policy, policy.model, device_bytes
        ),
        device_bytes=device_bytes,
    )


def decide_offload(
    mode: Switch, *, policy_bytes: float, generator_bytes: float, device_bytes: float
) -> OffloadDecision:
    """Return the decision of `cluster.offload` for one GPU.

    With `auto` nothing is offloaded if the predicted peaks of policy and generator together fit in
    `device_bytes`, less a CUDA context per process and the safety margin of `prediction.memory`.
    The peaks add up although only one of the two computes at a time, because torch's allocator
    keeps the memory of activations.
    """
    if mode != "auto":
        return OffloadDecision(mode, f"cluster.offload is {str(mode).lower()}")
    usable = max(0.0, (device_bytes - 2 * CONTEXT_BYTES) * (1.0 - SAFETY_SHARE))
    needed = policy_bytes + generator_bytes
    text = (
        f"predicted peaks of policy {policy_bytes / GIB:.1f} GiB and generator"
        f" {generator_bytes / GIB:.1f} GiB; {usable / GIB:.1f} GiB of a GPU's"
        f" {device_bytes / GIB:.1f} GiB are usable"
    )
    return OffloadDecision(needed > usable, text)
