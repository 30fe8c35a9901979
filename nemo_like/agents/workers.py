"""Driver side of the processes that run programs of agents."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_like.agents.events import CallAnswer, EpisodeEnd, EpisodeStart, Event
from nemo_like.agents.statuses import Status
from nemo_like.agents.worker import AgentWorker
from nemo_like.config.errors import error_text
from nemo_like.data.chat import ChatEncoder
from nemo_like.distributed.errors import Restarts, WorkerDied, WorkerFailure, WorkerHung
from nemo_like.distributed.worker_group import Handle, WorkerGroup, call_all, submit_one

logger = logging.getLogger(__name__)

_POLL_S = 0.02
"""Max seconds that a worker waits for an event in one call; calls behind it wait too."""

StartWorker = Callable[[int], WorkerGroup]
"""Starts a group of one `AgentWorker`, given its index."""


@dataclass(eq=False)
class _Worker:
    """One process, as the driver sees it."""

    index: int
    group: WorkerGroup
    episodes: set[int] = field(default_factory=set)
    """Episodes that have not ended."""
    starts: list[EpisodeStart] = field(default_factory=list)
    """Those that the process does not have yet."""
    answers: list[CallAnswer] = field(default_factory=list)
    call: Handle | None = None
    """The running call of `advance`."""


class AgentWorkers:
    """Runs episodes on a number of worker processes. Not thread-safe: one thread at a time.

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
        """Start all workers, in parallel; `report` gets a line about each restart."""
        self._start_worker = start_worker
        self._restarts = Restarts(max_restarts, report)
        self._encoder: ChatEncoder | None = None
        self._lost: list[Event] = []
        """The ends of episodes whose process was lost."""
        if num_workers == 1:
            # In this thread, which a group in this process needs.
            groups = [start_worker(0)]
        else:
            with ThreadPoolExecutor(num_workers) as pool:
                groups = list(pool.map(start_worker, range(num_workers)))
        self._workers = [_Worker(index, group) for index, group in enumerate(groups)]
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

    def start_calls(self, *, is_idle: bool) -> list[Handle]:
        """Ask workers with episodes for events; return the calls that run.

        A worker in this process waits for events only if the driver `is_idle`: nothing is decoded
        meanwhile.
        """
        for worker in self._workers:
            with self._replacing(worker):
                waits = is_idle or not worker.group.is_local
                if worker.call is None and worker.episodes:
                    starts, worker.starts = worker.starts, []
                    answers, worker.answers = worker.answers, []
                    seconds = _POLL_S if waits else 0.0
                    worker.call = submit_one(
                        worker.group, 0, AgentWorker.advance, starts, answers, seconds
                    )
        return [worker.call for worker in self._workers if worker.call is not None]

    def collect(self) -> list[Event]:
        """Return the events since the last call, without waiting.

        Raises WorkerFailure for a process that failed and may not be restarted any more.
        """
        events: list[Event] = []
        for worker in self._workers:
            with self._replacing(worker):
                if worker.call is not None and worker.group.is_done([worker.call]):
                    events += worker.group.get([worker.call])[0]
                    worker.call = None
        events += self._lost
        self._lost = []
        for event in events:
            if isinstance(event, EpisodeEnd):
                self._worker_of.pop(event.episode).episodes.discard(event.episode)
        return events

    def shutdown(self) -> None:
        """Stop the workers, and with them all programs."""
        for worker in self._workers:
            worker.group.shutdown()

    @contextmanager
    def _replacing(self, worker: _Worker) -> Iterator[None]:
        """Restart a worker whose process turns out to have failed in the block."""
        try:
            yield
        except (WorkerDied, WorkerHung) as failure:
            self._restart(worker, failure)

    def _restart(self, worker: _Worker, failure: WorkerFailure) -> None:
        """Start another process. Raises WorkerFailure beyond the limit."""
        self._restarts.add(f"worker {worker.index} of agents", failure, group=failure.group)
        worker.group = self._start_worker(worker.index)
        worker.call = None
        problem = error_text(failure)
        for episode in sorted(worker.episodes):
            self._lost.append(
                EpisodeEnd(episode=episode, status=Status.FAILED_INFRA, problem=problem)
            )
        worker.starts, worker.answers = [], []
        if self._encoder is not None:
            call_all(worker.group, AgentWorker.set_encoder, self._encoder)
