"""The rollout collector of a run: its workers, and with an environment the limits of the config."""

from __future__ import annotations

from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.observations import ObservationEncoder
from nemo_like.rollout.collector import RolloutCollector
from nemo_like.rollout.conversation_driver import ConversationDriver
from nemo_like.rollout.conversations import ConversationLimits
from nemo_like.training.rollout_workers import RolloutWorkers


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
