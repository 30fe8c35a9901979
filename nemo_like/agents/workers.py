"""Driver side of the processes that run episodes of programs, or conversations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nemo_like.agents.episode_worker import EpisodeWorker
from nemo_like.agents.events import CallAnswer, CallRequest, EpisodeEnd, EpisodeStart, Event
from nemo_like.agents.statuses import Status
from nemo_like.config.errors import error_text
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed.errors import WorkerFailure
from nemo_like.distributed.worker_group import Handle, call_all, submit_one
from nemo_like.distributed.worker_pool import PooledWorker, StartWorker, WorkerPool
from nemo_like.environments.environment import EnvironmentFailure

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Worker(PooledWorker):
    """One process."""

    episodes: set[int] = field(default_factory=set)
    """Episodes that have not ended."""
    starts: list[EpisodeStart] = field(default_factory=list)
    """Those that the process does not have yet."""
    answers: list[CallAnswer] = field(default_factory=list)
    blocked: set[int] = field(default_factory=set)
    """Episodes that do nothing before they are answered."""


class AgentWorkers(WorkerPool[_Worker]):
    """Runs episodes on a number of worker processes.

    An episode stays in one process. The episodes of a process that died or hung have failed.
    """

    def __init__(
        self,
        start_worker: StartWorker,
        num_workers: int,
        *,
        name: str = "agents",
        max_restarts: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Start all workers; `start_worker` starts a group of one `EpisodeWorker`.

        `name` is what they run. `report` also gets the first failure of each kind of an environment
        that does not stop the run.
        """
        super().__init__(
            name, _Worker, start_worker, num_workers, max_restarts=max_restarts, report=report
        )
        self._report = report
        self._reported: set[str] = set()
        """Kinds of failures that were reported."""
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
                call_all(worker.group, EpisodeWorker.set_encoder, encoder)

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
                worker.blocked.discard(answer.episode)

    def collect(self) -> list[Event]:
        """Return the events since the last call, without waiting.

        Raises WorkerFailure for a process that failed and may not be restarted any more.
        """
        events: list[Event] = []
        for worker, results in self._results():
            events += results
            calls = [each for each in results if isinstance(each, CallRequest)]
            worker.blocked |= {call.episode for call in calls if call.is_blocking}
        events += self._lost
        self._lost = []
        for event in events:
            if isinstance(event, EpisodeEnd):
                self._worker_of.pop(event.episode).episodes.discard(event.episode)
                if event.failure is not None:
                    self._report_failure(event.failure)
        return events

    def _advance(self, worker: _Worker, max_seconds: float) -> Handle | None:
        if len(worker.blocked) == len(worker.episodes):
            return None
        starts, worker.starts = worker.starts, []
        answers, worker.answers = worker.answers, []
        return submit_one(worker.group, 0, EpisodeWorker.advance, starts, answers, max_seconds)

    def _restarted(self, worker: _Worker, failure: WorkerFailure) -> None:
        if self._encoder is not None:
            call_all(worker.group, EpisodeWorker.set_encoder, self._encoder)
        problem = error_text(failure)
        for episode in sorted(worker.episodes):
            self._lost.append(
                EpisodeEnd(episode=episode, status=Status.FAILED_INFRA, problem=problem)
            )
        worker.starts, worker.answers, worker.blocked = [], [], set()

    def _report_failure(self, failure: EnvironmentFailure) -> None:
        # Example: `step raised KeyError`.
        kind = str(failure.problem).partition(":")[0]
        if kind not in self._reported:
            self._reported.add(kind)
            self._report(f"warning: {failure}\n  Further failures of this kind are only counted.")
