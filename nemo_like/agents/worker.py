"""Episodes of programs: endpoint, recorder and launcher, in one event loop."""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np

from nemo_like.agents.calls import Call, Episode, Sampled
from nemo_like.agents.codec import ChatCodec
from nemo_like.agents.endpoint import AgentEndpoint, EndpointLimits, Session
from nemo_like.agents.episode_worker import EpisodeWorker
from nemo_like.agents.events import CallRequest, EpisodeEnd, EpisodeStart
from nemo_like.agents.launcher import Launcher, Program, ProgramEnd, run_episode
from nemo_like.agents.statuses import Status
from nemo_like.agents.vllm_parser import turn_parser
from nemo_like.config.errors import error_text, shortened
from nemo_like.config.rollout import EnvironmentConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed.worker_group import WorkerContext

_GRACE_S = 10.0
"""Max seconds in which a program may end itself after its time limit."""
_NO_NUMBERS = np.zeros(0, dtype=np.float32)


class AgentWorker(EpisodeWorker):
    """Runs the program of the section `environment` any number of times, also at the same time."""

    def __init__(self, context: WorkerContext | None, *, config: EnvironmentConfig) -> None:
        """Import the program and start the endpoint; `context` is not needed.

        Raises ConfigError for a program that cannot be imported.
        """
        self._config = config
        self._program = program_of(config)
        self._launcher = Launcher(self._program)
        self._numbers: dict[int, dict[Call, int]] = {}
        """Calls of running episodes, with their numbers."""
        self._launching = asyncio.Lock()
        self._endpoint = AgentEndpoint(
            self._sample, limits=EndpointLimits(max_turns=config.max_turns)
        )
        super().__init__(self._endpoint.serving())

    def set_encoder(self, encoder: ChatEncoder) -> None:
        """Set the encoder of the requests. It must be called before episodes are started.

        Raises ConfigError for parsers that cannot be used with it.
        """
        super().set_encoder(encoder.without_prompts())
        if self._config.has_parser:
            encoder = self._codec.encoder
            self._codec = ChatCodec(encoder, turn_parser(encoder.tokenizer, self._config))

    def close(self) -> None:
        """End all programs, the endpoint and the thread."""
        super().close()
        self._launcher.close()

    async def _sample(self, call: Call) -> Sampled:
        """Let the driver sample the answer to a call."""
        numbers = self._numbers[call.episode]
        number = numbers[call] = len(numbers)
        request = CallRequest(
            episode=call.episode,
            number=number,
            parent=None if call.parent is None else numbers[call.parent],
            given=call.given,
            seed=call.seed,
            max_tokens=call.options.max_tokens,
            stop=call.options.stop,
        )
        answer = await self._answer(request)
        # The driver keeps log-probs and versions.
        return Sampled(answer.token_ids, _NO_NUMBERS, _NO_NUMBERS, answer.finish_reason)

    async def _episode(self, start: EpisodeStart) -> EpisodeEnd:
        """Run one episode. It ends with one event, whatever happens."""
        started_s = time.monotonic()
        self._numbers[start.episode] = {}
        try:
            return await self._program_episode(start, started_s)
        except Exception as error:  # noqa: BLE001 (one episode does not end the others)
            problem = error_text(error)
            return EpisodeEnd(episode=start.episode, status=Status.FAILED_INFRA, problem=problem)
        finally:
            del self._numbers[start.episode]

    async def _program_episode(self, start: EpisodeStart, started_s: float) -> EpisodeEnd:
        episode = Episode(
            self._codec,
            start.seed,
            max_total_tokens=start.max_total_tokens,
            history=self._config.history,
            number=start.episode,
        )
        launcher = await self._live_launcher()
        session = self._endpoint.start(episode)
        status, program_end = await run_episode(
            self._endpoint,
            launcher,
            session,
            start.row,
            timeout_s=self._config.timeout_s,
            grace_s=min(_GRACE_S, self._config.timeout_s or _GRACE_S),
        )
        # Without the answers that nobody has received.
        await asyncio.sleep(0)
        numbers = self._numbers[start.episode]
        found = episode.rows()
        order = [episode.calls.index(row.calls[-1]) for row in found]
        rows = [([numbers[call] for call in row.calls], row.is_trained) for row in found]
        return EpisodeEnd(
            episode=start.episode,
            status=status,
            problem=_problem(session, program_end) if status.is_failure else "",
            rewards=_rewards(session, program_end),
            rows=rows,
            last_row=order.index(max(order)) if order else -1,
            answered=[numbers[call] for call in episode.calls],
            call_rewards=session.call_rewards(),
            messages=episode.messages,
            reasons=dict(episode.reasons),
            seconds=time.monotonic() - started_s,
        )

    async def _live_launcher(self) -> Launcher:
        """Return the launcher, after a restart if its process has ended."""
        async with self._launching:
            if not self._launcher.is_alive:
                await asyncio.to_thread(self._launcher.restart)
            return self._launcher


def program_of(config: EnvironmentConfig) -> Program:
    """Return the program of a section `environment`."""
    return Program(
        path=config.path,
        options=config.options,
        command=config.command,
        python=config.python or sys.executable,
    )


def _rewards(session: Session, end: ProgramEnd) -> dict[str, float] | None:
    """Return the sums of what requests and program gave, by name; None if that is nothing."""
    if end.rewards is None and not session.rewards:
        return None
    rewards = dict(end.rewards or {})
    for event in session.rewards:
        for name, value in event.values.items():
            rewards[name] = rewards.get(name, 0.0) + value
    return rewards


def _problem(session: Session, end: ProgramEnd) -> str:
    """Return why an episode failed."""
    if session.failure is not None:
        return session.problem
    if end.problem:
        return end.problem
    if end.reason != "ended":
        return {"lost": "its supervisor was lost", "output": "its output is too long"}[end.reason]
    # Tracebacks of exception groups are in boxes.
    lines = list(filter(None, (line.strip(" |+-") for line in end.output.splitlines())))
    return shortened(f"exit status {end.status}: {lines[-1] if lines else 'no output'}", 500)
