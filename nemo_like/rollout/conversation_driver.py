"""Advances conversations by steps of the environment, up to the prompt of their next turn."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_like.data.observations import ObservationEncoder
from nemo_like.environments.environment_workers import EnvironmentWorkers
from nemo_like.rollout.conversations import ConversationLimits, ConversationRow


class ConversationDriver:
    """Steps the environment after turns of the model and appends its observations."""

    def __init__(
        self,
        workers: EnvironmentWorkers,
        observations: ObservationEncoder,
        limits: ConversationLimits,
    ) -> None:
        self._workers = workers
        self._observations = observations
        self.limits = limits
        self._conversations: dict[int, ConversationRow] = {}
        """Conversations whose step is not done, by key."""

    @property
    def num_unfinished(self) -> int:
        """Conversations whose step is not done."""
        return len(self._conversations)

    def submit(self, conversations: Mapping[int, ConversationRow]) -> None:
        """Start the steps that answer the last turn of `conversations`, which are by key."""
        self._conversations |= conversations
        tasks = [each.task(key, self.limits) for key, each in conversations.items()]
        self._workers.submit(tasks)

    def collect(self, timeout_s: float) -> dict[int, ConversationRow]:
        """Return the conversations whose step is done, by key: ended, or ready for the next turn.

        Waits up to `timeout_s` for one, if any is unfinished. Raises WorkerFailure if a step
        failed, and ConfigError for an observation that the chat template cannot render.
        """
        stepped = {}
        for outcome in self._workers.collect(timeout_s):
            conversation = self._conversations.pop(outcome.key)
            conversation.add_outcome(outcome, self.limits)
            if conversation.ended_by is None:
                last_token_id = int(conversation.segments[-1][-1])
                num_left = self.limits.max_tokens - conversation.num_tokens
                token_ids = self._observations.encode(outcome.observation, last_token_id, num_left)
                conversation.add_observation(outcome.observation, token_ids, self.limits)
            stepped[outcome.key] = conversation
        return stepped
