"""The workers that sample and score completions, and the collector that drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from nemo_like.config.parallel import (
    num_generation_workers,
    num_policy_workers,
    workers_per_replica,
)
from nemo_like.config.rollout import RewardModelConfig
from nemo_like.config.schema import PolicyConfig, RunConfig, SequencePackingConfig, Switch
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.observations import ObservationEncoder
from nemo_like.distributed.worker_group import WorkerGroup, call_all
from nemo_like.environments.environment_workers import EnvironmentWorker, EnvironmentWorkers
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import GenerationStart
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import ConversationDriver
from nemo_like.rollout.rewards import ModelRewards, RewardModel
from nemo_like.run.progress import Progress
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.model_files import RewardModelFiles, open_reward_model

if TYPE_CHECKING:
    from nemo_like.distributed.ray.virtual_cluster import BundleSet

WorkerKind = Literal["policy", "generation", "reward", "environment", "reward_model"]


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
"""`start(placement, worker_class, **kwargs)` starts a worker group; see `workers.group_starter`."""


@dataclass(frozen=True)
class RolloutWorkers:
    """The workers of a run that generates completions."""

    generator: Generator
    rewards: RewardEnvironment | None
    """None without reward functions: an environment or reward models may give rewards."""
    environment: EnvironmentWorkers | None = None
    """None in rollouts of one turn."""
    reward_models: ModelRewards | None = None
    """None without `reward.models`."""


def generation_worker(
    config: RunConfig,
    end_token_ids: Sequence[int],
    *,
    can_sleep: bool = False,
    shares_process: bool = False,
    router_replay: Switch = False,
) -> tuple[type, dict[str, Any]]:
    """Return the worker class of `policy.generation.backend` and its keyword arguments.

    `end_token_ids` end a completion, in addition to those that the model's files declare.
    `router_replay` is that of a training run; with `shares_process` its policy is in the process of
    the worker.
    """
    generation = config.policy.generation
    kwargs: dict[str, Any] = {
        "model_name": config.policy.model_name,
        "tokenizer_name": config.policy.tokenizer_name,
        "precision": config.policy.precision,
        "end_token_ids": (*end_token_ids, *generation.stop_token_ids),
        "router_replay": router_replay,
    }
    if config.policy.sends_adapters:
        kwargs["adapter"] = config.policy.adapter
    worker_class, options = generation_backend(config.policy).worker(config.policy)
    common = GenerationStart(
        **kwargs, seed=config.seed, can_sleep=can_sleep, shares_process=shares_process
    )
    return worker_class, {"start": common, **options}


def start_generator(
    config: RunConfig,
    start: StartGroup,
    end_token_ids: Sequence[int],
    progress: Progress,
    *,
    can_sleep: bool,
    shares_process: bool = False,
    router_replay: Switch = False,
) -> Generator:
    """Start the replicas of the generator; see `generation_worker`."""
    worker_class, kwargs = generation_worker(
        config,
        end_token_ids,
        can_sleep=can_sleep,
        shares_process=shares_process,
        router_replay=router_replay,
    )

    # A replica with resources of its own has one bundle, a colocated one those of several workers.
    # It is one process, which starts its tensor-parallel ranks itself.
    bundles_per_replica = 1
    if config.cluster.generation_workers == 0:
        bundles_per_replica = workers_per_replica(config)

    def start_replica(index: int) -> WorkerGroup:
        placement = GroupPlacement(
            kind="generation",
            name=f"generation-{index}",
            bundles="generation",
            first_bundle=index * bundles_per_replica,
            progress_timeout_s=config.policy.generation.progress_timeout_s,
        )
        return start(placement, worker_class, **kwargs)

    return Generator(
        start_replica,
        # In this process there is one replica, which starts its tensor-parallel ranks itself.
        max(1, num_generation_workers(config.cluster) // workers_per_replica(config)),
        max_restarts=config.cluster.max_restarts,
        report=progress.print_line,
    )


def start_environment(
    config: RunConfig, start: StartGroup, closing: ExitStack, progress: Progress
) -> EnvironmentWorkers | None:
    """Start the workers of the environment; None in a run without one."""
    environment = config.environment
    if environment.path is None:
        return None
    num_workers = environment.num_workers
    if config.cluster.backend == "local":
        # The steps share this process in any case.
        num_workers = 1

    def start_worker(index: int) -> WorkerGroup:
        # Environments and reward functions need no GPU and little CPU, so their workers reserve
        # nothing.
        placement = GroupPlacement(
            kind="environment", name=f"environment-{index}", bundles="anywhere"
        )
        return start(placement, EnvironmentWorker, config=environment)

    workers = EnvironmentWorkers(
        start_worker,
        num_workers,
        max_restarts=config.cluster.max_restarts,
        report=progress.print_line,
    )
    closing.callback(workers.shutdown)
    return workers


def start_rewards(config: RunConfig, start: StartGroup) -> RewardEnvironment:
    """Start the workers of the reward functions. Raises ConfigError if there is none."""
    layout = ParallelLayout(dp=config.reward.num_workers)
    group = start(
        GroupPlacement(kind="reward", name="reward", bundles="anywhere", parallel_layout=layout),
        RewardWorker,
        functions=config.reward.functions,
        timeout_s=config.reward.timeout_s,
        on_error=config.reward.on_error,
    )
    return RewardEnvironment(group, config.reward)


def open_collector(
    config: RunConfig, workers: RolloutWorkers, encoder: ChatEncoder
) -> RolloutCollector:
    """Return the collector on `workers`; its rows are conversations if they have an environment."""
    conversations = None
    if workers.environment is not None:
        conversations = ConversationDriver(
            workers.environment, ObservationEncoder(encoder), config.environment, config.reward
        )
    return RolloutCollector(workers.generator, workers.rewards, encoder.tokenizer, conversations)


def open_reward_models(config: RunConfig) -> dict[str, RewardModelFiles]:
    """Open the files of all reward models. Raises ConfigError; see `open_reward_model`."""
    models = config.reward.models
    return {name: open_reward_model(name, model) for name, model in models.items()}


def start_reward_models(
    config: RunConfig, files: dict[str, RewardModelFiles], start: StartGroup, progress: Progress
) -> ModelRewards | None:
    """Start the workers of all reward models; None in a run without any.

    Models on the GPUs of the policy are in host memory
    when this returns.
    """
    models = []
    first_bundle = 0
    for name, model in config.reward.models.items():
        opened = files[name]
        offloads = shares_gpus(config, model)
        placement = GroupPlacement(
            kind="reward_model",
            name=f"reward_model-{name}",
            bundles="extra" if model.num_workers else "policy",
            parallel_layout=ParallelLayout(
                dp=model.num_workers or num_policy_workers(config.cluster)
            ),
            first_bundle=first_bundle,
        )
        first_bundle += model.num_workers
        models.append(
            RewardModel(
                name,
                model,
                opened.encoder,
                partial(
                    _start_model,
                    config.seed,
                    model,
                    opened.spec,
                    start,
                    placement,
                    offloads=offloads,
                ),
                max_length=opened.max_length,
                offloads=offloads,
                max_restarts=config.cluster.max_restarts,
                report=progress.print_line,
            )
        )
    return ModelRewards(models, config.reward, config.data) if models else None


def num_own_workers(config: RunConfig) -> int:
    """Return the number of workers of reward models with resources of their own."""
    if not config.generates:
        return 0
    return sum(model.num_workers for model in config.reward.models.values())


def shares_gpus(config: RunConfig, model: RewardModelConfig) -> bool:
    """Return True if a reward model runs on the GPUs of the policy."""
    return config.cluster.gpus_per_node > 0 and model.num_workers == 0


def any_shares_gpus(config: RunConfig) -> bool:
    """Return True if a reward model of the run is on the GPUs of the policy."""
    models = config.reward.models.values()
    return config.generates and any(shares_gpus(config, model) for model in models)


def serving_config(model: RewardModelConfig) -> PolicyConfig:
    """Return the settings with which the policy's worker and planner serve a reward model."""
    packing = SequencePackingConfig(
        enabled=True, train_mb_tokens=model.mb_tokens, logprob_mb_tokens=model.mb_tokens
    )
    return PolicyConfig(
        model_name=model.model_name,
        tokenizer_name=model.tokenizer_name,
        precision=model.precision,
        oversize_rows="singleton",
        sequence_packing=packing,
    )


def _start_model(
    seed: int,
    model: RewardModelConfig,
    spec: ModelSpec,
    start: StartGroup,
    placement: GroupPlacement,
    *,
    offloads: bool,
) -> Policy:
    """Start the workers of one reward model."""
    # Imported on demand, as the worker of the policy is: it imports the libraries of its engine.
    from nemo_like.policy.dtensor.worker import DTensorPolicyWorker

    serving = serving_config(model)
    group = start(
        placement,
        DTensorPolicyWorker,
        config=serving,
        start=PolicyStart(seed=seed, head="scores", trainable=False),
    )
    if offloads:
        # Policy, generator or another reward model is loaded onto the same devices next.
        call_all(group, PolicyWorker.offload)
    return Policy(group, serving, spec, seed=seed)
