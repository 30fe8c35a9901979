"""The interface of driver and workers: context, handles and the worker-group protocol. No Ray.

A worker is a plain class, `Worker(context, **kwargs)`. A group constructs one per rank and calls
its methods by name: `local_group.LocalGroup` in this process, `ray.worker_group.RayWorkerGroup` in
the processes of a Ray cluster. `call_all(group, PolicyWorker.load, path)` is
`group.run_all_workers("load", path)` with checked types of arguments and result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from nemo_like.parallel_layout import ParallelLayout

IN_MEMORY = "memory://"
"""`init_method` of a group of one rank, which needs neither a port nor a file."""


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The rank, device and rendezvous of a worker.

    Example: the second of two workers on one node of a CPU cluster has rank 1, world_size 2,
    local_rank 1, device "cpu" and init_method "tcp://10.0.0.5:23117".
    """

    rank: int
    world_size: int
    local_rank: int
    """Index among the group's workers on the same node."""
    device: str
    """"cpu" or "cuda:0"; only the worker's own GPU is visible to it."""
    init_method: str
    """The rendezvous: `tcp://address:port`, `file://path`, or `IN_MEMORY` for one rank."""
    collective_timeout_s: float
    num_threads: int
    """CPU threads of this worker."""
    owns_process: bool = False
    """The process has no other purpose than this worker, which may end it."""


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """A reference to a value, or to the result of a running call.

    Every method of a group accepts it as a top-level argument.
    """

    value: Any
    """Ray's reference to the value; the value itself in a LocalGroup."""
    outcome: Any = None
    """Ray's reference to the exception of the call, if any; None for a value that was `put`."""
    rank: int = -1
    method: str = "put"
    index: int | None = None
    """The value is this item of a stored sequence; only of `put_shards`."""


class WorkerGroup(Protocol):
    """The calls of a driver to its workers.

    Every call raises WorkerFailure if a worker fails, and stops the group.
    """

    name: str
    parallel_layout: ParallelLayout
    is_local: bool
    """The worker is in this process: a call is done when it is started."""

    @property
    def world_size(self) -> int: ...

    def run_all_workers(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method on every worker; return the results in rank order."""
        ...

    def run_all_workers_sharded_data(
        self, method: str, /, *sharded: Sequence[Any], num_results: int | None = None, **common: Any
    ) -> list[Any]:
        """Call a method with data that is sharded over the data-parallel ranks.

        Every positional argument has one item, or handle, per dp rank; all replicas of a dp rank
        get the same item. Returns one result per dp rank, from its output rank, or only for the
        first `num_results` dp ranks; the results of the other ranks are not sent.
        """
        ...

    def put(self, value: Any) -> Handle:
        """Store a value once, to be passed to many calls."""
        ...

    def put_shards(self, shards: Sequence[Any]) -> tuple[Handle, ...]:
        """Store one value per dp rank, to be passed as positional arguments to many calls."""
        ...

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        """Start a call on every worker; return the handles in rank order at once.

        Call `wait` or `get` with every handle.
        """
        ...

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        """Start a call on one worker and return at once; see `submit_all`."""
        ...

    def wait(self, handles: Sequence[Handle]) -> None:
        """Wait until every call is done, without fetching values."""
        ...

    def is_done(self, handles: Sequence[Handle]) -> bool:
        """Return True if every call is done. Raises WorkerFailure if one failed or hangs."""
        ...

    def wait_any(self, handles: Sequence[Handle], timeout_s: float) -> list[Handle]:
        """Wait until a call is done, at most `timeout_s`; return those that are known to be done.

        A failed call counts as done. With many calls it waits for a share of them. The calls may
        belong to several groups of the same class.
        """
        ...

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        """Wait until every call is done and return the values."""
        ...

    def shutdown(self) -> None:
        """Stop the workers; may be called again."""
        ...


def check_shards(group: WorkerGroup, method: str, sharded: Sequence[Sequence[Any]]) -> None:
    """Raise ValueError unless each argument of `method` has one item per dp rank."""
    for position, items in enumerate(sharded):
        if len(items) != group.parallel_layout.dp:
            raise ValueError(
                f"argument {position} of {method} has {len(items)} items; the {group.name} group"
                f" has dp {group.parallel_layout.dp}"
            )


@contextmanager
def onloaded(group: WorkerGroup) -> Iterator[None]:
    """Keep the group's model on its devices inside the block, and in host memory outside."""
    group.run_all_workers("onload")
    yield
    # Not after an exception: the run has ended then, and the call would wait for the running call
    # of every worker.
    group.run_all_workers("offload")


ParamT = ParamSpec("ParamT")
ResultT = TypeVar("ResultT")


def call_all(
    group: WorkerGroup,
    method: Callable[Concatenate[Any, ParamT], ResultT],
    /,
    *args: ParamT.args,
    **kwargs: ParamT.kwargs,
) -> list[ResultT]:
    """Call `method` on every worker; results in rank order."""
    return group.run_all_workers(method.__name__, *args, **kwargs)


def call_sharded(
    group: WorkerGroup, method: Callable[..., ResultT], /, *sharded: Sequence[Any], **common: Any
) -> list[ResultT]:
    """Call `method` with one item, or handle, of each argument per dp rank; one result per dp rank.

    See `WorkerGroup.run_all_workers_sharded_data`.
    """
    return group.run_all_workers_sharded_data(method.__name__, *sharded, **common)


def call_sharded_once(
    group: WorkerGroup, method: Callable[..., ResultT], /, *sharded: Sequence[Any], **common: Any
) -> ResultT:
    """As `call_sharded`, for a method whose result is equal on all dp ranks; sent once."""
    results = group.run_all_workers_sharded_data(method.__name__, *sharded, num_results=1, **common)
    return results[0]


def submit_all(
    group: WorkerGroup,
    method: Callable[Concatenate[Any, ParamT], Any],
    /,
    *args: ParamT.args,
    **kwargs: ParamT.kwargs,
) -> list[Handle]:
    """Start `method` on every worker and return at once; handles in rank order."""
    return group.submit_all(method.__name__, *args, **kwargs)


def submit_one(
    group: WorkerGroup,
    rank: int,
    method: Callable[Concatenate[Any, ParamT], Any],
    /,
    *args: ParamT.args,
    **kwargs: ParamT.kwargs,
) -> Handle:
    """Start `method` on the worker of `rank` and return at once."""
    return group.submit_one(rank, method.__name__, *args, **kwargs)
