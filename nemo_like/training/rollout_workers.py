"""The workers that sample and score completions, and the collector that drives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_like.agents.environment_worker import EnvironmentWorker
from nemo_like.agents.episode_worker import EpisodeWorker
from nemo_like.agents.workers import AgentWorkers
from nemo_like.config.errors import ConfigError
from nemo_like.config.needs import RolloutNeeds
from nemo_like.config.parallel import is_colocated, num_generation_workers, num_policy_workers
from nemo_like.config.rollout import EnvironmentConfig, RewardConfig, RewardModelConfig
from nemo_like.config.schema import (
    ClusterConfig,
    DataConfig,
    PolicyConfig,
    SequencePackingConfig,
    Switch,
)
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed.worker_group import WorkerGroup, call_all
from nemo_like.environments.environment_calls import load_environment
from nemo_like.environments.reward_calls import load_reward_functions
from nemo_like.environments.reward_worker import RewardEnvironment, RewardWorker
from nemo_like.generation.generator import Generator
from nemo_like.generation.requests import GenerationStart
from nemo_like.models.spec import ModelSpec
from nemo_like.parallel_layout import ParallelLayout
from nemo_like.policy.engine_worker import PolicyStart
from nemo_like.policy.policy import Policy
from nemo_like.policy.worker import PolicyWorker
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.episodes import EpisodeDriver
from nemo_like.rollout.rewards import ModelRewards, RewardModel
from nemo_like.run.progress import Progress
from nemo_like.training.generation_backends import generation_backend
from nemo_like.training.groups import GroupPlacement, StartGroup, WorkersStart, shares_gpus
from nemo_like.training.model_files import RewardModelFiles, open_reward_model, recorded_experts

Begin = Callable[[Callable[[], Any]], Future[Any]]
"""Calls a function, or lets a thread call it; the future has the result."""


@dataclass(frozen=True)
class RolloutWorkers:
    """The workers of a run that generates completions."""

    generator: Generator
    rewards: RewardEnvironment | None
    """None without reward functions: an environment or reward models may give rewards."""
    environment: AgentWorkers | None = None
    """None in rollouts of one turn."""
    reward_models: ModelRewards | None = None
    """None without `reward.models`."""


@dataclass(frozen=True, kw_only=True)
class GeneratorStart:
    """What the workers of a generator are started with."""

    policy: PolicyConfig
    seed: int
    end_token_ids: Sequence[int] = ()
    """End a completion, in addition to those that the model's files declare."""
    can_sleep: bool = False
    """The generator moves to host memory while the policy trains."""
    shares_process: bool = False
    """The policy of a training run is in the process of the worker."""
    router_replay: Switch = False
    """Whether completions have the experts that the generator chose."""

    def worker(self) -> tuple[type, dict[str, Any]]:
        """Return the worker class of `policy.generation.backend` and its keyword arguments."""
        policy = self.policy
        worker_class, options = generation_backend(policy).worker(policy)
        start = GenerationStart(
            model_name=policy.model_name,
            tokenizer_name=policy.tokenizer_name,
            precision=policy.precision,
            vision=policy.vision,
            end_token_ids=(*self.end_token_ids, *policy.generation.stop_token_ids),
            router_replay=self.router_replay,
            adapter=policy.adapter if policy.sends_adapters else None,
            seed=self.seed,
            can_sleep=self.can_sleep,
            shares_process=self.shares_process,
        )
        return worker_class, {"start": start, **options}


def start_generator(
    settings: GeneratorStart, cluster: ClusterConfig, start: StartGroup, progress: Progress
) -> Generator:
    """Start the replicas of the generator."""
    worker_class, kwargs = settings.worker()
    generation = settings.policy.generation
    workers_per_replica = generation.engine.workers_per_replica
    # A replica with resources of its own has one bundle, a colocated one the bundles of its
    # workers. It is one process, which starts its tensor-parallel ranks itself.
    bundles_per_replica = 1 if cluster.generation_workers else workers_per_replica

    def start_replica(index: int) -> WorkerGroup:
        placement = GroupPlacement(
            kind="generation",
            name=f"generation-{index}",
            bundles="generation",
            first_bundle=index * bundles_per_replica,
            progress_timeout_s=generation.progress_timeout_s,
        )
        return start(placement, worker_class, **kwargs)

    return Generator(
        start_replica,
        # In this process there is one replica, which starts its tensor-parallel ranks itself.
        max(1, num_generation_workers(cluster) // workers_per_replica),
        max_restarts=cluster.max_restarts,
        report=progress.print_line,
    )


def check_environment(config: EnvironmentConfig) -> None:
    """Import the class of the environment, or what programs need. Raises ConfigError.

    The workers import the programs.
    """
    if config.is_program:
        _worker_class(config)
    elif config.is_used:
        load_environment(config)


def start_environment(
    environment: EnvironmentConfig,
    cluster: ClusterConfig,
    start: StartGroup,
    closing: ExitStack,
    progress: Progress,
) -> AgentWorkers | None:
    """Start the workers of the environment or of programs; None in a run without."""
    if not environment.is_used:
        return None
    num_workers = environment.num_workers
    if cluster.backend == "local":
        # The steps share this process in any case.
        num_workers = 1

    worker_class = _worker_class(environment)

    def start_worker(index: int) -> WorkerGroup:
        # Environments and reward functions need no GPU and little CPU, so their workers reserve
        # nothing.
        placement = GroupPlacement(
            kind="environment", name=f"environment-{index}", bundles="anywhere"
        )
        return start(placement, worker_class, config=environment)

    workers = AgentWorkers(
        start_worker,
        num_workers,
        name="agents" if environment.is_program else "the environment",
        max_restarts=cluster.max_restarts,
        report=progress.print_line,
    )
    closing.callback(workers.shutdown)
    return workers


def _worker_class(config: EnvironmentConfig) -> type[EpisodeWorker]:
    """Return the class of the workers of an environment or of programs.

    Raises ConfigError if the packages of an endpoint are not installed.
    """
    if not config.is_program:
        return EnvironmentWorker
    try:
        # Imported on demand: it imports the packages of an extra.
        from nemo_like.agents.worker import AgentWorker
    except ImportError as error:
        raise ConfigError(
            "environment.kind is program, which needs packages that are not installed: pip install"
            f" 'nemo-like[agents]' ({error})"
        ) from error
    return AgentWorker


def start_rewards(config: RewardConfig, start: StartGroup) -> RewardEnvironment:
    """Start the workers of the reward functions. Raises ConfigError if there is none."""
    layout = ParallelLayout(dp=config.num_workers)
    group = start(
        GroupPlacement(kind="reward", name="reward", bundles="anywhere", parallel_layout=layout),
        RewardWorker,
        functions=config.functions,
        timeout_s=config.timeout_s,
        on_error=config.on_error,
    )
    return RewardEnvironment(group, config)


def open_collector(
    rollouts: RolloutNeeds, workers: RolloutWorkers, encoder: ChatEncoder
) -> RolloutCollector:
    """Return the collector on `workers`; its rows are episodes if they have an environment."""
    episodes = None
    if workers.environment is not None:
        workers.environment.set_encoder(encoder)
        episodes = EpisodeDriver(
            workers.environment, workers.generator, rollouts.environment, rollouts.rewards
        )
    return RolloutCollector(workers.generator, workers.rewards, encoder.tokenizer, episodes)


def open_reward_models(models: Mapping[str, RewardModelConfig]) -> dict[str, RewardModelFiles]:
    """Open the files of all reward models. Raises ConfigError; see `open_reward_model`."""
    return {name: open_reward_model(name, model) for name, model in models.items()}


@dataclass(frozen=True, kw_only=True)
class RewardModelStart:
    """What the workers of the reward models of a run are started with."""

    rewards: RewardConfig
    data: DataConfig
    """The prompts that are added to the messages of a row."""
    seed: int
    files: Mapping[str, RewardModelFiles]
    """Of every reward model by its name; see `open_reward_models`."""


def start_reward_models(
    settings: RewardModelStart, cluster: ClusterConfig, start: StartGroup, progress: Progress
) -> ModelRewards | None:
    """Start the workers of all reward models; None in a run without any.

    Models on the GPUs of the policy are in host memory
    when this returns.
    """
    models = []
    first_bundle = 0
    for name, model in settings.rewards.models.items():
        opened = settings.files[name]
        offloads = shares_gpus(cluster, model)
        placement = GroupPlacement(
            kind="reward_model",
            name=f"reward_model-{name}",
            bundles="extra" if model.num_workers else "policy",
            parallel_layout=ParallelLayout(dp=model.num_workers or num_policy_workers(cluster)),
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
                    settings.seed,
                    model,
                    opened.spec,
                    start,
                    placement,
                    offloads=offloads,
                ),
                max_length=opened.max_length,
                offloads=offloads,
                max_restarts=cluster.max_restarts,
                report=progress.print_line,
            )
        )
    return ModelRewards(models, settings.rewards, settings.data) if models else None


class RolloutStarter:
    """Starts the workers that sample completions, while the policy's workers start."""

    def __init__(
        self,
        settings: WorkersStart,
        rollouts: RolloutNeeds,
        end_token_ids: Sequence[int],
        progress: Progress,
    ) -> None:
        """Check reward functions, reward models and environment. Raises ConfigError.

        Only the check: the workers import the functions themselves.
        """
        self._settings = settings
        self._rollouts = rollouts
        self._end_token_ids = end_token_ids
        self._progress = progress
        load_reward_functions(rollouts.rewards.functions)
        self._files = open_reward_models(rollouts.rewards.models)
        check_environment(rollouts.environment)

    def begin(self, begin: Begin, start: StartGroup, closing: ExitStack) -> None:
        """Start what shares no GPU with the policy. `begin` calls a function, or lets a thread."""
        self._begin, self._start, self._closing = begin, start, closing
        # Their processes use no GPU.
        self._services = begin(self._start_services)
        cluster = self._settings.cluster
        self._generator: Future[Generator] | None = None
        if not is_colocated(cluster, self._rollouts):
            self._generator = begin(partial(self._start_generator, can_sleep=False))

    def finish(self, *, offloads: bool, advance: Callable[[], None]) -> RolloutWorkers:
        """Wait for the workers, the generator first; `advance` is called twice.

        With `offloads` the generator, which is then in host memory, takes turns with the policy.
        """
        if self._generator is None:
            self._generator = self._begin(partial(self._start_generator, can_sleep=offloads))
        generator = self._generator.result()
        self._closing.callback(generator.shutdown)
        if offloads:
            generator.offload()
        advance()
        environment, rewards = self._services.result()
        settings = self._settings
        start = RewardModelStart(
            rewards=self._rollouts.rewards,
            data=settings.data,
            seed=settings.seed,
            files=self._files,
        )
        reward_models = start_reward_models(start, settings.cluster, self._start, self._progress)
        advance()
        return RolloutWorkers(generator, rewards, environment, reward_models)

    def _start_generator(self, *, can_sleep: bool) -> Generator:
        settings = self._settings
        start = GeneratorStart(
            policy=settings.policy,
            seed=settings.seed,
            end_token_ids=self._end_token_ids,
            can_sleep=can_sleep,
            shares_process=settings.cluster.backend == "local",
            router_replay=recorded_experts(settings.policy, settings.needs),
        )
        return start_generator(start, settings.cluster, self._start, self._progress)

    def _start_services(self) -> tuple[AgentWorkers | None, RewardEnvironment | None]:
        """Start the workers of the environment and of the reward functions."""
        rollouts = self._rollouts
        environment = start_environment(
            rollouts.environment, self._settings.cluster, self._start, self._closing, self._progress
        )
        has_other_rewards = environment is not None or bool(rollouts.rewards.models)
        if rollouts.rewards.functions or (rollouts.requires_rewards and not has_other_rewards):
            return environment, start_rewards(rollouts.rewards, self._start)
        return environment, None


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
