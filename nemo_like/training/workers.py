"""The worker groups of a run: a policy, and for rollouts a generator and reward workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from nemo_like.config.parallel import is_colocated
from nemo_like.config.schema import ActivationCheckpointing, ClusterConfig, PolicyConfig, Switch
from nemo_like.data.packing.balance import compile_kernels, needs_kernels
from nemo_like.distributed.worker_group import call_all
from nemo_like.metrics import start_timers
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.prediction.memory import CONTEXT_BYTES, GIB, SAFETY_SHARE, fitting_checkpointing
from nemo_like.run.progress import Progress
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.groups import (
    GroupPlacement,
    StartGroup,
    WorkersStart,
    any_shares_gpus,
    group_starter,
)
from nemo_like.training.model_files import open_model_spec, policy_memory
from nemo_like.training.policy_backends import policy_backend

if TYPE_CHECKING:
    from nemo_like.training.rollout_workers import RolloutWorkers

ValueT = TypeVar("ValueT")


@dataclass(frozen=True)
class GpuSharing:
    """What shares the GPUs of the policy."""

    offloads: bool
    """Policy and generator share GPUs on which they do not fit together, so each is offloaded while
    the other runs."""
    reason: str = ""
    """Of `offloads`."""
    has_reward_models: bool = False
    """Reward models run on the GPUs of the policy."""

    @property
    def line(self) -> str:
        """The decision of `cluster.offload` with its reason, for the log."""
        state = "stay on their GPUs"
        if self.offloads:
            state = "move to host memory while the other runs"
        return f"offload: policy and generator {state} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class RunWorkers:
    """The workers of one run."""

    policy: Policy
    rollout_workers: RolloutWorkers | None
    """None in a run that generates no completions."""
    sharing: GpuSharing = GpuSharing(offloads=False)

    @property
    def rollout(self) -> RolloutWorkers:
        """The rollout workers. Raises RuntimeError in a run that generates no completions."""
        if self.rollout_workers is None:
            raise RuntimeError("this run was started without a generator and reward workers")
        return self.rollout_workers

    def policy_onloaded(self) -> AbstractContextManager[None]:
        """Return a context in which the policy is on its devices."""
        return self.policy.onloaded() if self.sharing.offloads else nullcontext()

    def generator_onloaded(self, *, discards_weights: bool = False) -> AbstractContextManager[None]:
        """Return a context in which the generator is on its devices; see `Generator.onloaded`."""
        if not self.sharing.offloads:
            return nullcontext()
        return self.rollout.generator.onloaded(discards_weights=discards_weights)

    @contextmanager
    def reward_models_alone(self) -> Iterator[None]:
        """Move what shares GPUs with reward models to host memory inside the block.

        Call where the generator is on its devices and the policy does not compute.
        """
        if not self.sharing.has_reward_models:
            yield
        elif self.sharing.offloads:
            # The policy is in host memory already.
            with self.generator_offloaded():
                yield
        else:
            call_all(self.policy.group, PolicyWorker.offload)
            yield
            call_all(self.policy.group, PolicyWorker.onload)

    def generator_offloaded(self) -> AbstractContextManager[None]:
        """Return a context in which the generator is in host memory, if the run offloads it."""
        return self.rollout.generator.offloaded() if self.sharing.offloads else nullcontext()


@contextmanager
def start_workers(
    settings: WorkersStart,
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
    cluster, rollouts = settings.cluster, settings.needs.rollouts
    starter = None
    if rollouts is not None:
        # Imported on demand: a run without rollouts needs neither generation nor environments.
        from nemo_like.training.rollout_workers import RolloutStarter

        starter = RolloutStarter(settings, rollouts, end_token_ids, progress)
    rows_per_example = settings.needs.batch.rows_per_example
    if needs_kernels(settings.policy.train_global_batch_size * rows_per_example):
        _start_in_thread(_compile_planner)
    with ExitStack() as closing:
        with (
            start_timers("start_workers"),
            progress.phase(
                "starting workers", 3 if rollouts else 1, unit="groups", has_eta=False
            ) as phase,
        ):
            start = group_starter(cluster, closing, progress, rollouts=rollouts, logs=logs)
            begin = _starts_now if cluster.backend == "local" else _start_in_thread
            policy_start = begin(partial(_start_policy, settings, start))
            if starter is not None:
                starter.begin(begin, start, closing)
            policy, choice = policy_start.result()
            if choice is not None:
                progress.print_line(choice)
            sharing = gpu_sharing(settings, policy)
            if is_colocated(cluster, rollouts):
                progress.print_line(sharing.line)
            if sharing.offloads:
                # The generator is loaded onto the same device next.
                call_all(policy.group, PolicyWorker.offload)
            phase.advance()
            rollout_workers = None
            if starter is not None:
                rollout_workers = starter.finish(offloads=sharing.offloads, advance=phase.advance)
        yield RunWorkers(policy=policy, rollout_workers=rollout_workers, sharing=sharing)


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


def _compile_planner() -> None:
    with start_timers("start_compile"):
        compile_kernels()


@contextmanager
def local_policy(
    policy: PolicyConfig, cluster: ClusterConfig, *, seed: int, needs_reference: bool = False
) -> Iterator[Policy]:
    """Start the policy alone, as one rank in this process, whatever layout the run has.

    It is on a GPU if `cluster` has GPUs and this machine has one. It stops with the block.
    """
    has_gpu = cluster.gpus_per_node > 0 and torch.cuda.is_available()
    local = ClusterConfig(backend="local", gpus_per_node=int(has_gpu), env=cluster.env)
    placement = GroupPlacement(kind="policy", name="policy", bundles="policy")
    with ExitStack() as closing:
        start = group_starter(local, closing, Progress())
        group = start(
            placement,
            policy_backend(policy).worker(),
            config=policy,
            start=PolicyStart(seed=seed, needs_reference=needs_reference),
        )
        yield Policy(group, policy, open_model_spec(policy), seed=seed)


def _start_policy(settings: WorkersStart, start: StartGroup) -> tuple[Policy, str | None]:
    """Return the policy, and the line about `policy.activation_checkpointing=auto`."""
    policy, needs = settings.policy, settings.needs
    spec = open_model_spec(policy, needs.head)
    peaks: dict[ActivationCheckpointing, float] = {}
    if policy.activation_checkpointing == "auto" and settings.cluster.gpus_per_node:
        max_tokens, memory = policy_memory(policy, settings.layout, needs, spec, "cuda")
        peaks = memory.checkpointing_peaks(max_tokens)
    group = start(
        GroupPlacement(
            kind="policy", name="policy", bundles="policy", parallel_layout=settings.layout
        ),
        policy_backend(policy).worker(),
        config=policy,
        start=PolicyStart(
            parallel=settings.parallel,
            seed=settings.seed,
            needs_reference=needs.reference,
            teachers=tuple(needs.teachers.values()),
            head=needs.head,
            checkpointing_peaks=peaks,
        ),
    )
    in_rows = policy.in_rows(needs.batch.rows_per_example)
    started = Policy(group, in_rows, spec, seed=settings.seed)
    if policy.activation_checkpointing != "auto":
        return started, None
    # As each worker has, on GPUs of the same size.
    mode = fitting_checkpointing(peaks, started.device_info.memory_bytes)
    started.config = replace(in_rows, activation_checkpointing=mode)
    shown = ", ".join(f"{name} {peak / GIB:.1f}" for name, peak in peaks.items())
    reason = f"predicted peaks in GiB: {shown}" if peaks else "the workers have no GPU"
    return started, f"activation checkpointing: {mode} ({reason})"


def gpu_sharing(settings: WorkersStart, policy: Policy) -> GpuSharing:
    """Return what shares the devices of the policy in a run, and whether they take turns.

    Policy and generator do not if they share no device: the memory of a CPU holds both.
    """
    cluster, needs = settings.cluster, settings.needs
    has_reward_models = any_shares_gpus(cluster, needs.rollouts)
    if not is_colocated(cluster, needs.rollouts):
        return GpuSharing(False, "policy and generator share no GPU", has_reward_models)
    device_bytes = policy.device_info.memory_bytes
    if device_bytes is None:
        return GpuSharing(False, "the workers have no GPU", has_reward_models)
    if has_reward_models and cluster.offload == "auto":
        return GpuSharing(True, "a reward model shares their GPUs", has_reward_models)
    chosen = policy.config.activation_checkpointing
    config, layout = replace(settings.policy, activation_checkpointing=chosen), settings.layout
    max_tokens, memory = policy_memory(config, layout, needs, policy.model, "cuda")
    decision = decide_offload(
        cluster.offload,
        policy_bytes=memory.peak(max_tokens),
        generator_bytes=generation_backend(config).peak_bytes(config, policy.model, device_bytes),
        device_bytes=device_bytes,
    )
    return replace(decision, has_reward_models=has_reward_models)


def decide_offload(
    mode: Switch, *, policy_bytes: float, generator_bytes: float, device_bytes: float
) -> GpuSharing:
    """Return the decision of `cluster.offload` for one GPU.

    With `auto` nothing is offloaded if the predicted peaks of policy and generator together fit in
    `device_bytes`, less a CUDA context per process and the safety margin of `prediction.memory`.
    The peaks add up although only one of the two computes at a time, because torch's allocator
    keeps the memory of activations.
    """
    if mode != "auto":
        return GpuSharing(mode, f"cluster.offload is {str(mode).lower()}")
    usable = max(0.0, (device_bytes - 2 * CONTEXT_BYTES) * (1.0 - SAFETY_SHARE))
    needed = policy_bytes + generator_bytes
    text = (
        f"predicted peaks of policy {policy_bytes / GIB:.1f} GiB and generator"
        f" {generator_bytes / GIB:.1f} GiB; {usable / GIB:.1f} GiB of a GPU's"
        f" {device_bytes / GIB:.1f} GiB are usable"
    )
    return GpuSharing(needed > usable, text)
