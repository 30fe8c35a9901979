"""What a driver and its workers agree on: a worker's context, handles, and the calls of a worker
group. No Ray.

A worker is a plain class, `Worker(context, **kwargs)`. A group constructs one per rank and calls
its methods by name: `local_group.LocalGroup` in this process, `ray.worker_group.RayWorkerGroup` in
the processes of a Ray cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_like.distributed.parallel_layout import Topology

IN_MEMORY = "memory://"
"""`init_method` of a group of one rank, which needs neither a port nor a file."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """What a worker knows of its place.

    Example: the second of two workers on one node of a CPU cluster has rank 1, world_size 2,
    local_rank 1, device "cpu" and init_method "tcp://10.0.0.5:23117".
    """

    rank: int
    world_size: int
    local_rank: int
    """Position among the group's workers on the same node."""
    device: str
    """"cpu" or "cuda:0"; a worker sees no GPU but its own."""
    init_method: str
    """The rendezvous of the group: `tcp://address:port`, `file://path`, or `IN_MEMORY` for one
    rank.
    """
    collective_timeout_s: float
    num_threads: int
    """CPU threads of this worker."""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A value that stays where it was made, and a call's promise of one. Any group takes it as a
    top-level argument.
    """

    value: Any
    """Ray's reference to the value; in a LocalGroup the value itself."""
    outcome: Any = None
    """Ray's reference to whether the call raised; None for what was `put`."""
    rank: int = -1
    method: str = "put"


class WorkerGroup(Protocol):
    """What a driver may ask of workers. Every call raises WorkerFailure if a worker fails, and
    stops the group.
    """

    name: str
    topology: Topology

    @property
    def world_size(self) -> int: ...

    def run_all_workers(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """The same call on every worker; results in rank order."""
        ...

    def run_all_workers_sharded_data(
        self, method: str, /, *sharded: Sequence[Any], **common: Any
    ) -> list[Any]:
        """Every positional argument has one item, or handle, per dp rank; all replicas of a dp rank
        get the same one.

        Returns one result per dp rank, that of its output rank; the other ranks' results are not
        fetched.
        """
        ...

    def put(self, value: Any) -> Handle:
        """Store a value once, to be passed to many calls."""
        ...

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        """Start the same call on every worker and return at once, in rank order; `wait` for or
        `get` every handle.
        """
        ...

    def wait(self, handles: Sequence[Handle]) -> None:
        """Return when every call is done. Fetches no value."""
        ...

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        """The values, once every call is done."""
        ...

    def shutdown(self) -> None:
        """Stop the workers; may be called again."""
        ...


@contextmanager
def onloaded(group: WorkerGroup) -> Iterator[None]:
    """The group's model is on its devices inside, and in host memory outside."""
    group.run_all_workers("onload")
    yield
    # Not after an exception: the run is over then, and a call would wait behind whatever a worker
    # is still doing.
    group.run_all_workers("offload")
