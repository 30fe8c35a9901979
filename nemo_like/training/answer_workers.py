"""Workers that sample and score completions of one model, without a policy that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from nemo_like.config.schema import RunConfig
from nemo_like.environments.environment_workers import load_environment
from nemo_like.environments.reward_worker import load_reward_functions
from nemo_like.run.progress import Progress
from nemo_like.training.rollout_workers import (
    RolloutWorkers,
    start_environment,
    start_generator,
    start_rewards,
)
from nemo_like.training.workers import group_starter


@contextmanager
def start_answer_workers(
    config: RunConfig, progress: Progress, *, end_token_ids: Sequence[int] = ()
) -> Iterator[RolloutWorkers]:
    """Start generator, reward functions and environment; stop them with the block.

    The reward functions may be none: completions are then not scored. `end_token_ids` end a
    completion, in addition to those that the model's files declare. Raises ConfigError for
    functions that cannot be imported, before anything is started, and ClusterError if the cluster
    has too few resources.
    """
    load_reward_functions(config.reward.functions)
    if config.environment.path is not None:
        load_environment(config.environment)
    with ExitStack() as closing:
        with progress.phase("loading the model"):
            start = group_starter(config, closing, progress, logs=None)
            generator = start_generator(config, start, end_token_ids, progress, can_sleep=False)
            closing.callback(generator.shutdown)
            environment = start_environment(config, start, closing, progress)
            rewards = None
            if config.reward.functions:
                rewards = start_rewards(config, start)
        yield RolloutWorkers(generator, rewards, environment)
