"""The workers that sample and score completions, and the collector that drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from nemo_like.config.parallel import num_generation_workers, workers_per_replica
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.observations import ObservationEncoder
from nemo_like.distributed.worker_group import WorkerGroup
from nemo_like.environments.environment_workers import EnvironmentWorker, EnvironmentWorkers
from nemo_like.environments.reward import RewardEnvironment
from nemo_like.environments.reward_worker import RewardWorker
from nemo_like.generation.generator import Generator
from nemo_like.generation.hf_worker import HFGenerationWorker
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversations import ConversationDriver, ConversationLimits
from nemo_like.rollout.rewards import ModelRewards
from nemo_like.run.progress import Progress

StartGroup = Callable[..., WorkerGroup]
"""`start(name, worker_class, index=0, **kwargs)` starts a worker group; see
`workers.group_starter`."""


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
    config: RunConfig, end_token_ids: Sequence[int], *, can_sleep: bool = False
) -> tuple[type, dict[str, Any]]:
    """Return the worker class of `policy.generation.backend` and its keyword arguments.

    `end_token_ids` end a completion, in addition to those that the model's files declare.
    """
    generation = config.policy.generation
    kwargs: dict[str, Any] = {
        "model_name": config.policy.model_name,
        "tokenizer_name": config.policy.tokenizer_name,
        "precision": config.policy.precision,
        "end_token_ids": (*end_token_ids, *generation.stop_token_ids),
    }
    if config.policy.lora.sends_adapters(config.policy.precision):
        kwargs["lora"] = config.policy.lora
    if generation.backend == "hf":
        kwargs["batch_size"] = generation.hf.batch_size
        return HFGenerationWorker, kwargs
    # Imported on demand: vLLM is an optional dependency.
    from nemo_like.generation.vllm_worker import VLLMGenerationWorker

    kwargs["config"] = generation.vllm
    kwargs["max_total_length"] = config.policy.max_total_sequence_length
    kwargs["can_sleep"] = can_sleep
    kwargs["seed"] = config.seed
    return VLLMGenerationWorker, kwargs


def start_generator(
    config: RunConfig,
    start: StartGroup,
    end_token_ids: Sequence[int],
    progress: Progress,
    *,
    can_sleep: bool,
) -> Generator:
    """Start the replicas of the generator; see `generation_worker`."""
    worker_class, kwargs = generation_worker(config, end_token_ids, can_sleep=can_sleep)

    def start_replica(index: int) -> WorkerGroup:
        return start("generation", worker_class, index, **kwargs)

    return Generator(
        start_replica,
        # In this process there is one replica, which starts its tensor-parallel ranks itself.
        max(1, num_generation_workers(config.cluster) // workers_per_replica(config)),
        max_restarts=config.policy.generation.max_restarts,
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
        return start("environment", EnvironmentWorker, index, config=environment)

    workers = EnvironmentWorkers(
        start_worker, num_workers, max_restarts=environment.max_restarts, report=progress.print_line
    )
    closing.callback(workers.shutdown)
    return workers


def start_rewards(config: RunConfig, start: StartGroup) -> RewardEnvironment:
    """Start the workers of the reward functions. Raises ConfigError if there is none."""
    group = start(
        "reward",
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
            workers.environment,
            ObservationEncoder(encoder),
            ConversationLimits.from_config(
                config.environment, config.policy.max_total_sequence_length
            ),
        )
    return RolloutCollector(workers.generator, workers.rewards, encoder.tokenizer, conversations)
