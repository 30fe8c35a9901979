"""Driver side of environments: distributes steps over worker processes and collects outcomes.

The state of a conversation travels with each step, so the steps of a process that died or hung are
given to its successor, and nothing else is lost.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from nemo_like.config.text import counted
from nemo_like.distributed.errors import WorkerDied, WorkerFailure, WorkerHung
from nemo_like.distributed.worker_calls import submit_one
from nemo_like.distributed.worker_group import Handle, WorkerGroup
from nemo_like.environments.environment_worker import EnvironmentWorkerProtocol
from nemo_like.environments.steps import StepOutcome, StepTask

logger = logging.getLogger(__name__)

_POLL_S = 0.02
"""Max seconds that a worker waits for the end of a step in one call; calls behind it wait too."""

StartWorker = Callable[[int], WorkerGroup]
"""Starts a group of one `EnvironmentWorker`, given its index."""


@dataclass(eq=False)
class _Worker:
    """One process, as the driver sees it."""

    index: int
    group: WorkerGroup
    tasks: dict[int, StepTask] = field(default_factory=dict)
    """Unfinished tasks by key."""
    submits: deque[Handle] = field(default_factory=deque)
    """Calls of `submit` that are not known to have ended, oldest first."""
    poll: Handle | None = None
    """The running call of `poll`."""


class EnvironmentWorkers:
    """Runs steps on a number of worker processes. Not thread-safe: one thread at a time."""

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
        self._max_restarts = max_restarts
        self._report = report
        self.num_restarts = 0
        if num_workers == 1:
            # In this thread, which a group in this process needs.
            groups = [start_worker(0)]
        else:
            with ThreadPoolExecutor(num_workers) as pool:
                groups = list(pool.map(start_worker, range(num_workers)))
        self._workers = [_Worker(index, group) for index, group in enumerate(groups)]

    @property
    def num_unfinished(self) -> int:
        """Tasks whose outcomes were not returned yet."""
        return sum(len(worker.tasks) for worker in self._workers)

    def submit(self, tasks: Sequence[StepTask]) -> None:
        """Start steps, each on the worker with the fewest unfinished ones. Returns at once."""
        assigned: dict[int, list[StepTask]] = {}
        for task in tasks:
            worker = min(self._workers, key=lambda each: len(each.tasks))
            worker.tasks[task.key] = task
            assigned.setdefault(worker.index, []).append(task)
        for index, chunk in assigned.items():
            worker = self._workers[index]
            with self._replacing(worker):
                self._send(worker, chunk)

    def collect(self, timeout_s: float) -> list[StepOutcome]:
        """Return the outcomes of the steps that ended since the last call.

        Waits up to `timeout_s` for one, if any is unfinished. Raises WorkerFailure if a step
        failed, or a process that may not be restarted any more.
        """
        polls = []
        for worker in self._workers:
            if worker.tasks and worker.poll is None:
                with self._replacing(worker):
                    wait_s = min(timeout_s, _POLL_S)
                    worker.poll = submit_one(
                        worker.group, 0, EnvironmentWorkerProtocol.poll, wait_s
                    )
            if worker.poll is not None:
                polls.append(worker.poll)
        if not polls:
            return []
        self._workers[0].group.wait_any(polls, timeout_s)
        outcomes: list[StepOutcome] = []
        for worker in self._workers:
            with self._replacing(worker):
                outcomes += self._read(worker)
        return outcomes

    def shutdown(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.group.shutdown()

    def _send(self, worker: _Worker, tasks: Sequence[StepTask]) -> None:
        handle = submit_one(worker.group, 0, EnvironmentWorkerProtocol.submit, tasks)
        worker.submits.append(handle)

    def _read(self, worker: _Worker) -> list[StepOutcome]:
        """Return the outcomes of the worker's poll if it is done."""
        group = worker.group
        while worker.submits and group.is_done([worker.submits[0]]):
            group.get([worker.submits.popleft()])
        if worker.poll is None or not group.is_done([worker.poll]):
            return []
        outcomes: list[StepOutcome] = group.get([worker.poll])[0]
        worker.poll = None
        for outcome in outcomes:
            del worker.tasks[outcome.key]
        return outcomes

    @contextmanager
    def _replacing(self, worker: _Worker) -> Iterator[None]:
        """Restart a worker whose process turns out to have failed in the block."""
        try:
            yield
        except (WorkerDied, WorkerHung) as failure:
            self._restart(worker, failure)

    def _restart(self, worker: _Worker, failure: WorkerFailure) -> None:
        """Start another process with the worker's tasks. Raises WorkerFailure beyond the limit."""
        if self.num_restarts >= self._max_restarts:
            raise WorkerFailure(
                f"a worker of the environment failed after {counted(self.num_restarts, 'restart')},"
                f" the limit of environment.max_restarts={self._max_restarts}:"
                f" {failure}",
                group=failure.group,
                rank=0,
                method="restart",
            ) from failure
        self.num_restarts += 1
        self._report(
            f"worker {worker.index} of the environment failed and is restarted with its"
            f" {counted(len(worker.tasks), 'conversation')} (restart {self.num_restarts} of at most"
            f" {self._max_restarts}): {failure}"
        )
        worker.submits.clear()
        worker.poll = None
        worker.group = self._start_worker(worker.index)
        if worker.tasks:
            self._send(worker, list(worker.tasks.values()))
