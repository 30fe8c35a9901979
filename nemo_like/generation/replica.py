"""One replica of the generator, as its driver sees it: its group, its requests, its polls."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nemo_like.distributed.worker_calls import call_all, submit_all
from nemo_like.distributed.worker_group import Handle, WorkerGroup
from nemo_like.generation.requests import GenerationProgress, GenerationRequests
from nemo_like.generation.worker_protocol import GenerationWorkerProtocol

POLL_S = 0.1
"""Seconds that a replica decodes per poll; the completions that end in it arrive at its end."""
_POLLS_AHEAD = 2
"""Polls that are queued at a replica, so that it need not wait for the driver between two."""


@dataclass(eq=False)
class Replica:
    """A worker group that decodes requests. Rank 0 is its leader, whose results count.

    A replica runs its calls in the order in which they were started. Only `abort`, and `read_polls`
    with `wait`, wait for it: a replica that hangs must not hold up the driver.
    """

    index: int
    group: WorkerGroup
    has_weights: bool
    """True if its weights are those of the generator's version; requests are sent to it then."""
    costs: dict[int, int] = field(default_factory=dict)
    """Unfinished requests: id to the max number of tokens it may still need."""
    busy_s: float = 0.0
    """Seconds of decoding since the last `Generator.pop_metrics`."""
    num_tokens: int = 0
    """Tokens sampled since then."""
    num_unfinished_tokens: int = 0
    """Tokens sampled for unfinished requests, as of the last poll that was read."""
    polls: deque[list[Handle]] = field(default_factory=deque)
    """Polls that were started and whose result has not been read, oldest first."""
    started: deque[list[Handle]] = field(default_factory=deque)
    """Calls without a result that were started and are not known to have ended, oldest first."""

    @property
    def cost(self) -> int:
        """Max tokens of all unfinished requests."""
        return sum(self.costs.values())

    def start(self, method: Callable[..., None], *args: Any) -> None:
        """Start a call without a result; `read_polls` raises its failure."""
        self.started.append(submit_all(self.group, method, *args))

    def submit(self, requests: GenerationRequests) -> None:
        """Add requests. Returns at once."""
        self.start(GenerationWorkerProtocol.submit, requests)
        costs = (requests.prompt_ids.lengths + requests.max_new_tokens()).tolist()
        self.costs |= dict(zip(requests.request_ids.tolist(), costs, strict=True))

    def start_polls(self) -> None:
        """Queue polls while requests are unfinished."""
        while self.costs and len(self.polls) < _POLLS_AHEAD:
            self.polls.append(submit_all(self.group, GenerationWorkerProtocol.poll, POLL_S))

    def read_polls(self, results: list[GenerationProgress], *, wait: bool = False) -> None:
        """Append the results of the polls that are done, or of all polls with `wait`.

        Raises WorkerFailure for a call that failed; `results` has the polls before it.
        """
        while self.started and (wait or self.group.is_done(self.started[0])):
            self.group.get(self.started.popleft())
        while self.polls and (wait or self.group.is_done(self.polls[0])):
            progress = self.group.get(self.polls.popleft())[0]
            self.busy_s += progress.busy_s
            self.num_tokens += progress.num_tokens
            num_finished = len(progress.completions.token_ids.values)
            self.num_unfinished_tokens += progress.num_tokens - num_finished
            for request_id in progress.request_ids.tolist():
                del self.costs[request_id]
            results.append(progress)

    def abort(self) -> tuple[list[int], int]:
        """Discard unfinished requests; return their ids and the number of tokens discarded.

        Call after `read_polls(wait=True)`.
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


def assign_units(unit_costs: np.ndarray, outstanding: np.ndarray) -> np.ndarray:
    """Assign each unit of work to the replica with the least outstanding work, int64 [U].

    `unit_costs` is int64 [U], `outstanding` int64 [R], the work that each replica has already.
    Units are assigned in order of decreasing cost (longest processing time first), ties in the
    order of the units and of the replicas, so the result depends on the arguments only.
    """
    loads = np.array(outstanding, dtype=np.int64)
    replica_of_unit = np.zeros(len(unit_costs), dtype=np.int64)
    for unit in np.argsort(-unit_costs, kind="stable"):
        replica = int(loads.argmin())
        replica_of_unit[unit] = replica
        loads[replica] += unit_costs[unit]
    return replica_of_unit
