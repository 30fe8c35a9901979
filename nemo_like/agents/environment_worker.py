"""Conversations with an environment: an agent that takes turns with a class of the user."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import nullcontext

import numpy as np

from nemo_like.agents.episode_worker import EpisodeWorker
from nemo_like.agents.events import CallAnswer, CallRequest, EpisodeEnd, EpisodeStart, Event
from nemo_like.agents.statuses import Status, turn_seed
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.distributed.worker_group import WorkerContext
from nemo_like.environments.environment import Conversation, State, StepOutcome
from nemo_like.environments.environment_calls import EnvironmentCalls

_POLL_S = 0.1


class EnvironmentWorker(EpisodeWorker):
    """Runs conversations on one instance of the environment."""

    def __init__(
        self,
        context: WorkerContext | None,
        *,
        config: EnvironmentConfig,
        max_threads: int = 256,
        margin_s: float = 60.0,
    ) -> None:
        """Construct the environment; `context` is not needed. See `EnvironmentCalls`."""
        self._config = config
        self._calls = EnvironmentCalls(config, max_threads=max_threads, margin_s=margin_s)
        super().__init__(nullcontext())

    def advance(
        self, starts: Sequence[EpisodeStart], answers: Sequence[CallAnswer], max_seconds: float
    ) -> list[Event]:
        """See `EpisodeWorker`. Raises EnvironmentFailure if steps never end or block the loop."""
        events = super().advance(starts, answers, max_seconds)
        if not events:
            self._calls.check(self._loop, self._thread)
        return events

    def step(self, conversation: Conversation, timeout_s: float | None) -> StepOutcome:
        """Answer a turn outside of an episode. Raises EnvironmentFailure."""
        step = self._calls.step(conversation, timeout_s)
        running = asyncio.run_coroutine_threadsafe(step, self._loop)
        while not wait([running], _POLL_S).done:
            self._calls.check(self._loop, self._thread)
        return running.result()

    async def _episode(self, start: EpisodeStart) -> EpisodeEnd:
        messages, given = list(start.messages), start.prompt_ids
        num_tokens = 0
        state: State = {}
        outcomes: list[StepOutcome] = []
        status = None
        while status is None:
            answer = await self._turn(start, len(outcomes), given)
            num_tokens += len(given) + len(answer.token_ids)
            text = self._codec.text(answer.token_ids)
            messages.append({"role": "assistant", "content": text})
            conversation = Conversation(
                messages=tuple(messages),
                row=start.row,
                state=state,
                turn=len(outcomes) + 1,
                is_truncated=answer.finish_reason == "length",
            )
            outcome = await self._calls.step(conversation, self._seconds_left(outcomes))
            outcomes.append(outcome)
            state = outcome.state
            status = self._status(outcomes)
            if status is None:
                given = self._codec.continuation_ids(
                    outcome.observation,
                    int(answer.token_ids[-1]),
                    {},
                    start.max_total_tokens - num_tokens,
                )
                if num_tokens + len(given) >= start.max_total_tokens:
                    # Without room for another turn the row ends with this one.
                    status = Status.LIMIT_TOKENS
                else:
                    messages += outcome.observation
        numbers = range(len(outcomes))
        # After a failure the rewards of earlier turns are not the reward of the conversation.
        rewarded = [] if status is Status.FAILED_PROGRAM else outcomes
        return EpisodeEnd(
            episode=start.episode,
            status=status,
            failure=outcomes[-1].failure,
            rewards=_sums(each.rewards for each in rewarded),
            call_rewards=[sum(each.rewards.values()) for each in rewarded],
            metrics=_sums(each.metrics for each in outcomes),
            rows=[(numbers, [True] * len(numbers))],
            last_row=0,
            answered=numbers,
            messages=messages,
            seconds=sum(each.seconds for each in outcomes),
        )

    async def _turn(self, start: EpisodeStart, turn: int, given: np.ndarray) -> CallAnswer:
        """Return a turn of the model, counted from 0, after the tokens `given`, int32 [L]."""
        request = CallRequest(
            episode=start.episode,
            number=turn,
            parent=turn - 1 if turn else None,
            given=given,
            seed=turn_seed(start.seed, turn),
            is_blocking=True,
        )
        return await self._answer(request)

    def _seconds_left(self, outcomes: list[StepOutcome]) -> float | None:
        """Return the time limit of the next step; it is for all of a conversation together."""
        if self._config.timeout_s is None:
            return None
        return max(self._config.timeout_s - sum(each.seconds for each in outcomes), 0.0)

    def _status(self, outcomes: list[StepOutcome]) -> Status | None:
        """Return how the last step ended a conversation; None if that goes on."""
        outcome = outcomes[-1]
        if outcome.failure is not None:
            return Status.FAILED_PROGRAM
        if outcome.is_timeout:
            return Status.LIMIT_TIME
        if outcome.done:
            return Status.DONE
        return Status.LIMIT_TURNS if len(outcomes) >= self._config.max_turns else None


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the sums of the values of each name."""
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
