"""Driver side of the processes that run programs of agents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nemo_like.agents.events import CallAnswer, EpisodeEnd, EpisodeStart, Event
from nemo_like.agents.statuses import Status
from nemo_like.agents.worker import AgentWorker
from nemo_like.config.errors import error_text
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed.errors import WorkerFailure
from nemo_like.distributed.worker_group import Handle, call_all, submit_one
from nemo_like.distributed.worker_pool import PooledWorker, StartWorker, WorkerPool

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Worker(PooledWorker):
    """One process."""

    episodes: set[int] = field(default_factory=set)
    """Episodes that have not ended."""
    starts: list[EpisodeStart] = field(default_factory=list)
    """Those that the process does not have yet."""
    answers: list[CallAnswer] = field(default_factory=list)


class AgentWorkers(WorkerPool[_Worker]):
    """Runs episodes on a number of worker processes.

    An episode stays in one process. The episodes of a process that died or hung have failed.
    """

    def __init__(
        self,
        start_worker: StartWorker,
        num_workers: int,
        *,
        max_restarts: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Start all workers; `start_worker` starts a group of one `AgentWorker`."""
        super().__init__(
            "agents", _Worker, start_worker, num_workers, max_restarts=max_restarts, report=report
        )
        self._encoder: ChatEncoder | None = None
        self._lost: list[Event] = []
        """The ends of episodes whose process was lost."""
        self._worker_of: dict[int, _Worker] = {}
        """By episode."""

    def set_encoder(self, encoder: ChatEncoder) -> None:
        """Set the encoder of requests. Call it before `start`."""
        self._encoder = encoder
        for worker in self._workers:
            with self._replacing(worker):
                call_all(worker.group, AgentWorker.set_encoder, encoder)

    def start(self, starts: Sequence[EpisodeStart]) -> None:
        """Start episodes, each on the worker with the fewest. Returns at once."""
        for start in starts:
            worker = min(self._workers, key=lambda each: len(each.episodes))
            worker.episodes.add(start.episode)
            worker.starts.append(start)
            self._worker_of[start.episode] = worker

    def answer(self, answers: Sequence[CallAnswer]) -> None:
        """Answer calls; those of ended episodes are ignored. Returns at once."""
        for answer in answers:
            worker = self._worker_of.get(answer.episode)
            if worker is not None:
                worker.answers.append(answer)

    def collect(self) -> list[Event]:
        """Return the events since the last call, without waiting.

        Raises WorkerFailure for a process that failed and may not be restarted any more.
        """
        events: list[Event] = []
        for _, results in self._results():
            events += results
        events += self._lost
        self._lost = []
        for event in events:
            if isinstance(event, EpisodeEnd):
                self._worker_of.pop(event.episode).episodes.discard(event.episode)
        return events

    def _advance(self, worker: _Worker, max_seconds: float) -> Handle | None:
        if not worker.episodes:
            return None
        starts, worker.starts = worker.starts, []
        answers, worker.answers = worker.answers, []
        return submit_one(worker.group, 0, AgentWorker.advance, starts, answers, max_seconds)

    def _restarted(self, worker: _Worker, failure: WorkerFailure) -> None:
        if self._encoder is not None:
            call_all(worker.group, AgentWorker.set_encoder, self._encoder)
        problem = error_text(failure)
        for episode in sorted(worker.episodes):
            self._lost.append(
                EpisodeEnd(episode=episode, status=Status.FAILED_INFRA, problem=problem)
            )
        worker.starts, worker.answers = [], []
