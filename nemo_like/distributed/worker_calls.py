"""Typed calls of worker methods: a method of the worker's Protocol instead of its name.

Example: `call_all(group, PolicyWorker.load, path)` is `group.run_all_workers("load", path)`
with arguments and result checked against the Protocol, and with jump-to-definition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from nemo_like.distributed.worker_group import Handle, WorkerGroup

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
