"""Worker processes of which each is started again after it died or hung."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from nemo_like.distributed.errors import Restarts, WorkerDied, WorkerFailure, WorkerHung
from nemo_like.distributed.worker_group import Handle, WorkerGroup

logger = logging.getLogger(__name__)

_POLL_S = 0.02
"""Max seconds that a worker waits for a result in one call; calls behind it wait too."""

StartWorker = Callable[[int], WorkerGroup]
"""Starts a group of one worker, given its index."""


@dataclass(eq=False)
class PooledWorker:
    """One process, as the driver sees it."""

    index: int
    group: WorkerGroup
    call: Handle | None = None
    """The running call that waits for results."""


PooledWorkerT = TypeVar("PooledWorkerT", bound=PooledWorker)


class WorkerPool(Generic[PooledWorkerT]):
    """A number of processes that run tasks of the user. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        name: str,
        worker_class: type[PooledWorkerT],
        start_worker: StartWorker,
        num_workers: int,
        *,
        max_restarts: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Start all workers, in parallel; `report` gets a line about each restart.

        `name` is what they run, for example `the environment`.
        """
        self._name = name
        self._start_worker = start_worker
        self._restarts = Restarts(max_restarts, report)
        if num_workers == 1:
            # In this thread, which a group in this process needs.
            groups = [start_worker(0)]
        else:
            with ThreadPoolExecutor(num_workers) as pool:
                groups = list(pool.map(start_worker, range(num_workers)))
        self._workers = [worker_class(index, group) for index, group in enumerate(groups)]

    def start_calls(self, *, is_idle: bool) -> list[Handle]:
        """Ask workers with tasks for results; return the calls that run.

        A call ends with the first result, or after a short time. A worker in this process waits for
        results only if the driver `is_idle`: nothing is decoded meanwhile.
        """
        for worker in self._workers:
            with self._replacing(worker):
                if worker.call is None:
                    waits = is_idle or not worker.group.is_local
                    worker.call = self._advance(worker, _POLL_S if waits else 0.0)
        return [worker.call for worker in self._workers if worker.call is not None]

    def shutdown(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.group.shutdown()

    def _advance(self, worker: PooledWorkerT, max_seconds: float) -> Handle | None:
        """Give a worker its new tasks and ask it for results; None if it has no tasks."""
        raise NotImplementedError

    def _restarted(self, worker: PooledWorkerT, failure: WorkerFailure) -> None:
        """Decide what becomes of the tasks of a process that failed; `worker` has another one."""
        raise NotImplementedError

    def _results(self) -> Iterator[tuple[PooledWorkerT, list[Any]]]:
        """Yield the results of the calls that are done."""
        for worker in self._workers:
            results: list[Any] = []
            with self._replacing(worker):
                if worker.call is not None and worker.group.is_done([worker.call]):
                    results = worker.group.get([worker.call])[0]
                    worker.call = None
            yield worker, results

    @contextmanager
    def _replacing(self, worker: PooledWorkerT) -> Iterator[None]:
        """Restart a worker whose process turns out to have failed in the block.

        Raises WorkerFailure beyond the limit.
        """
        try:
            yield
        except (WorkerDied, WorkerHung) as failure:
            self._restart(worker, failure)

    def _restart(self, worker: PooledWorkerT, failure: WorkerFailure) -> None:
        """Start another process for a worker, and yet another if that one ends as it starts."""
        name = f"worker {worker.index} of {self._name}"
        while True:
            self._restarts.add(name, failure, group=failure.group)
            worker.call = None
            try:
                worker.group = self._start_worker(worker.index)
                self._restarted(worker, failure)
            except (WorkerDied, WorkerHung) as again:
                failure = again
            else:
                return
