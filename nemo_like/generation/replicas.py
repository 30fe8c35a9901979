"""The replicas of a generator as the driver sees them: starts, restarts, requests and polls.

Every replica is a worker group of its own, so that the failure of one does not stop the others. A
replica whose process died or hung is restarted. An exception that a replica raises is not retried:
a new process would raise it again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from nemo_like.distributed.errors import (
    ClusterError,
    Restarts,
    WorkerDied,
    WorkerFailure,
    WorkerHung,
)
from nemo_like.distributed.worker_group import Handle, WorkerGroup, call_all, submit_all
from nemo_like.generation.requests import (
    GenerationProgress,
    GenerationRequests,
    GenerationWorkerProtocol,
)

POLL_S = 0.1
"""Seconds that a replica decodes per poll; the completions that end in it arrive at its end."""
_TURN_POLL_SHARE = 0.2
"""Share of this time for turns of conversations. The next turn of one waits for the polls that were
started for the others."""
_REPLICAS_PER_POLL_S = 50
"""With more replicas a poll is longer in proportion, so that the driver reads at most 500 polls per
second; up to `_MAX_POLL_FACTOR`, since a weight update waits for the polls that were started.
"""
_MAX_POLL_FACTOR = 10.0
_CHECK_S = 1.0
"""Time without the result of a poll after which a replica is checked for failures."""
_POLLS_AHEAD = 2
"""Polls that are queued at a replica, so that it need not wait for the driver between two."""

ResultT = TypeVar("ResultT")
_START_ENDS_S = 60.0
"""Max wait for a replica that is starting when the run ends."""

StartReplica = Callable[[int], WorkerGroup]
"""Starts the worker group of a replica, given its index; blocks until the model is loaded."""


@dataclass(eq=False)
class Replica:
    """A worker group that decodes requests. Rank 0 is its leader, whose results count.

    A replica runs its calls in the order in which they were started. Only `abort` and `wait` wait
    for it: a replica that hangs must not hold up the driver.
    """

    index: int
    group: WorkerGroup
    has_weights: bool
    """True if its weights have the generator's version; requests are sent to it then."""
    costs: dict[int, int] = field(default_factory=dict)
    """Unfinished requests: id to the number of tokens that it was expected to need."""
    busy_s: float = 0.0
    """Seconds of decoding since the last `Generator.pop_metrics`."""
    num_tokens: int = 0
    """Tokens sampled since then."""
    num_unfinished_tokens: int = 0
    """Tokens sampled for unfinished requests, as of the last poll that was read."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that finished since the last `Generator.pop_metrics`."""
    num_cached_tokens: int = 0
    """Those of them that were read from the prefix cache."""
    polls: deque[list[Handle]] = field(default_factory=deque)
    """Polls that were started and whose result has not been read, oldest first."""
    started: deque[list[Handle]] = field(default_factory=deque)
    """Calls without a result that were started and are not known to have ended, oldest first."""
    checked_s: float = field(default_factory=time.monotonic)
    """When its calls were last looked at."""

    @property
    def cost(self) -> int:
        """Expected tokens of all unfinished requests."""
        return sum(self.costs.values())

    def start(self, method: Callable[..., None], *args: Any) -> None:
        """Start a call without a result; `read_poll` and `check` raise its failure."""
        self.started.append(submit_all(self.group, method, *args))

    def submit(self, requests: GenerationRequests, costs: Sequence[int]) -> None:
        """Add requests with the tokens that each may need. Returns at once."""
        self.start(GenerationWorkerProtocol.submit, requests)
        self.costs |= dict(zip(requests.request_ids.tolist(), costs, strict=True))

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Discard those of the requests that it has. Returns at once."""
        ids = [each for each in request_ids if self.costs.pop(each, None) is not None]
        if ids:
            self.start(GenerationWorkerProtocol.cancel, ids)

    def start_polls(self, max_seconds: float, min_seconds: float | None) -> None:
        """Queue polls while requests are unfinished; see `poll_seconds`."""
        while self.costs and len(self.polls) < _POLLS_AHEAD:
            poll = GenerationWorkerProtocol.poll
            self.polls.append(submit_all(self.group, poll, max_seconds, min_seconds))

    @property
    def is_due(self) -> bool:
        """True if nothing arrived from it for so long that `check` should be called."""
        return time.monotonic() - self.checked_s >= _CHECK_S

    def check(self) -> None:
        """Raise WorkerFailure if a call without a result failed, or the replica hangs."""
        self.checked_s = time.monotonic()
        while self.started and self.group.is_done(self.started[0]):
            self.group.get(self.started.popleft())
        if self.polls:
            self.group.is_done(self.polls[0])

    def read_poll(self, results: list[GenerationProgress]) -> None:
        """Append the result of the oldest poll; waits until it is done.

        It may have requests that were cancelled after they finished. Raises WorkerFailure if it
        failed, or a call without a result before it.
        """
        self.checked_s = time.monotonic()
        while self.started and self.group.is_done(self.started[0]):
            self.group.get(self.started.popleft())
        progress: GenerationProgress = self.group.get(self.polls.popleft())[0]
        self.busy_s += progress.busy_s
        self.num_tokens += progress.num_tokens
        num_finished = len(progress.completions.token_ids.values)
        self.num_unfinished_tokens += progress.num_tokens - num_finished
        self.num_unfinished_tokens -= progress.num_cancelled_tokens
        self.num_prompt_tokens += progress.num_prompt_tokens
        self.num_cached_tokens += progress.num_cached_tokens
        for request_id in progress.request_ids.tolist():
            self.costs.pop(request_id, None)
        results.append(progress)

    def wait(self, results: list[GenerationProgress]) -> None:
        """Wait for all calls and append the results of the polls. Raises WorkerFailure."""
        while self.polls:
            self.read_poll(results)
        while self.started:
            self.group.get(self.started.popleft())

    def abort(self) -> tuple[list[int], int]:
        """Discard unfinished requests; return their ids and the number of tokens discarded.

        Call after `wait`.
        """
        num_tokens = call_all(self.group, GenerationWorkerProtocol.abort)[0]
        return self.forget(), num_tokens

    def forget(self) -> list[int]:
        """Drop all unfinished requests and running calls; return the ids of the requests."""
        request_ids = list(self.costs)
        self.costs = {}
        self.num_unfinished_tokens = 0
        self.polls.clear()
        self.started.clear()
        return request_ids


def poll_seconds(num_replicas: int, *, has_turns: bool) -> tuple[float, float | None]:
    """Return the arguments of `GenerationWorkerProtocol.poll` with so many replicas.

    With `has_turns` a completion is returned as soon as it has ended: the environment waits for it.
    """
    min_seconds = POLL_S * min(num_replicas / _REPLICAS_PER_POLL_S, _MAX_POLL_FACTOR)
    if has_turns:
        return max(_TURN_POLL_SHARE * POLL_S, min_seconds), min_seconds
    return max(POLL_S, min_seconds), None


class ReplicaSet:
    """A fixed number of replicas, of which some may be starting again."""

    def __init__(
        self,
        start_replica: StartReplica,
        num_replicas: int,
        *,
        max_restarts: int,
        report: Callable[[str], None],
    ) -> None:
        """Start all replicas, in parallel; `report` gets a line about each restart.

        Raises what `start_replica` raises.
        """
        self._start_replica = start_replica
        self._restarts = Restarts(max_restarts, report)
        self._starting: dict[int, Future[WorkerGroup] | None] = {}
        """Replicas without a process, by index; None for a start that waits for `onload`."""
        self._is_offloaded = False
        self._lost_ids: list[int] = []
        self._num_lost_tokens = 0
        if num_replicas == 1:
            # In this thread, which a group in this process needs.
            groups = [start_replica(0)]
        else:
            starts = [self._start_in_thread(index) for index in range(num_replicas)]
            # All of them, so that no replica is starting when the failure of another is raised.
            wait(starts)
            groups = [start.result() for start in starts]
        self.replicas = [
            Replica(index, group, has_weights=True) for index, group in enumerate(groups)
        ]

    @property
    def num_restarts(self) -> int:
        """Restarts so far."""
        return self._restarts.num

    @property
    def live(self) -> list[Replica]:
        """Replicas whose process runs."""
        return [replica for replica in self.replicas if replica.index not in self._starting]

    @property
    def is_starting(self) -> bool:
        """True if a replica is being restarted."""
        return bool(self._starting)

    def call(
        self, replicas: Sequence[Replica], method: Callable[..., ResultT], *args: Any
    ) -> dict[int, ResultT]:
        """Call `method` on replicas at the same time; return the results by replica index.

        A replica that fails is replaced and has no result.
        """
        return self.start_call(replicas, method, *args)()

    def start_call(
        self, replicas: Sequence[Replica], method: Callable[..., ResultT], *args: Any
    ) -> Callable[[], dict[int, ResultT]]:
        """Start `method` on replicas; the returned function waits and returns what `call` does."""
        running: list[tuple[Replica, list[Handle]]] = []
        for replica in replicas:
            with self.replacing(replica):
                running.append((replica, submit_all(replica.group, method, *args)))

        def finish() -> dict[int, ResultT]:
            results: dict[int, ResultT] = {}
            for replica, handles in running:
                with self.replacing(replica):
                    results[replica.index] = replica.group.get(handles)[0]
            return results

        return finish

    @contextmanager
    def replacing(self, replica: Replica) -> Iterator[None]:
        """Replace `replica` if a call in the block shows that it failed."""
        try:
            yield
        except WorkerFailure as failure:
            self.replace(replica, failure)

    def replace(self, replica: Replica, failure: WorkerFailure) -> None:
        """Restart a replica that failed. Raises WorkerFailure if that is not possible."""
        if replica.index in self._starting or replica is not self.replicas[replica.index]:
            # Several calls of a replica fail when it dies.
            return
        if not isinstance(failure, WorkerDied | WorkerHung):
            raise failure
        self._restart(replica, failure)

    def take_lost(self) -> tuple[list[int], int]:
        """Return the unfinished requests of the replicas that failed since the last call.

        Also the number of tokens that were sampled for them, as of the last polls.
        """
        lost = self._lost_ids, self._num_lost_tokens
        self._lost_ids = []
        self._num_lost_tokens = 0
        return lost

    def finish_restarts(self) -> None:
        """Take over replicas whose restart is done; one that died meanwhile is started again."""
        for index, start in list(self._starting.items()):
            if start is None or not start.done():
                continue
            del self._starting[index]
            old = self.replicas[index]
            try:
                group = start.result()
            except (WorkerFailure, ClusterError) as failure:
                # Its node may be gone, or its memory taken; other replicas work meanwhile.
                self._restart(old, failure)
                continue
            # Also at version 0, so that its weights are verified before it samples.
            self.replicas[index] = Replica(
                index, group, has_weights=False, busy_s=old.busy_s, num_tokens=old.num_tokens
            )

    def offload(self, *, discards_weights: bool = False) -> None:
        """Move the weights of every replica to host memory.

        With `discards_weights` all replicas get new ones before `onload`, and need not keep theirs.
        Waits for replicas that are starting, which load their model onto the device. A replica that
        fails while the others are offloaded is started by `onload`.
        """
        while True:
            starting = [start for start in self._starting.values() if start is not None]
            if not starting:
                break
            wait(starting)
            self.finish_restarts()
        self._is_offloaded = True
        self.call(self.live, GenerationWorkerProtocol.offload, discards_weights)

    def onload(self) -> None:
        """Move the weights back to the device, and start the replicas that failed meanwhile."""
        self._is_offloaded = False
        for index in self._starting:
            self._starting[index] = self._start_in_thread(index)
        self.call(self.live, GenerationWorkerProtocol.onload)

    def shutdown(self) -> None:
        """Stop the replicas; may wait for those that are starting."""
        for replica in self.live:
            replica.group.shutdown()
        starting = [start for start in self._starting.values() if start is not None]
        # A start that outlives the cluster would connect to a new one.
        for start in wait(starting, _START_ENDS_S).done:
            if start.exception() is None:
                start.result().shutdown()

    def _restart(self, replica: Replica, failure: WorkerFailure | ClusterError) -> None:
        """Start a new process for a replica. Raises WorkerFailure beyond `max_restarts`."""
        name = f"replica {replica.index} of the generator"
        self._restarts.add(name, failure, group=f"generation-{replica.index}")
        self._num_lost_tokens += replica.num_unfinished_tokens
        self._lost_ids += replica.forget()
        replica.has_weights = False
        start = None if self._is_offloaded else self._start_in_thread(replica.index)
        self._starting[replica.index] = start

    def _start_in_thread(self, index: int) -> Future[WorkerGroup]:
        """Start a replica; its group, or the exception, is the result of the future."""
        future: Future[WorkerGroup] = Future()

        def run() -> None:
            try:
                future.set_result(self._start_replica(index))
            except BaseException as error:  # noqa: BLE001 (raised where the result is read)
                future.set_exception(error)

        # A daemon, so that a run that ends does not wait for a replica that is starting.
        thread = threading.Thread(target=run, name=f"start-replica-{index}", daemon=True)
        thread.start()
        return future
