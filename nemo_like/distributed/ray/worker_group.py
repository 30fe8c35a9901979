"""A worker group whose workers are processes of a Ray cluster.

NumPy arrays that come out of Ray's object store are read-only views of shared memory: copy one
before writing to it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

import numpy as np
import ray
from ray import ObjectRef
from ray.exceptions import RayError

from nemo_like.distributed.errors import WorkerFailure
from nemo_like.distributed.ray.actor import (
    choose_bundles,
    locate_actors,
    start_actor,
    worker_contexts,
)
from nemo_like.distributed.ray.failures import (
    Failure,
    Location,
    ProgressMonitor,
    Raised,
    Silence,
    explain,
    explain_hung,
    failure_of,
    kill_process,
    waiting_text,
)
from nemo_like.distributed.ray.virtual_cluster import BundleSet, RayVirtualCluster
from nemo_like.distributed.worker_group import Handle, check_shards
from nemo_like.parallel_layout import ParallelLayout

logger = logging.getLogger(__name__)

GRACE_S = 20.0
"""Time to wait for the root cause after a secondary failure.

Ray takes up to about 15 s to detect the loss of a node.
"""

_MAX_SINGLE_WAITS = 32
"""Number of pending calls up to which the driver looks at every call that ends. Above it, it waits
for all of them and looks for failures in between: a pass costs time for every pending call.
"""
_FAILURE_POLL_S = 0.5
_CLOSE_S = 5.0
"""How long `close` of a worker may take, which is killed after it."""

_MAX_SENT_BYTES = 4096
"""Size up to which a value is sent with every call instead of being stored once."""
_MAX_PARTS = 100

_AWAITED_SHARE = 8
"""`wait_any` waits for one of this many calls: with hundreds of pending ones it returns several
together, since every pass costs time for each pending call.
"""

_Pending = dict[ObjectRef[Raised | None], Handle]
"""Running calls, by the references to their outcomes."""


class RayWorkerGroup:
    """One process per worker, in the bundles of a `RayVirtualCluster`.

    When one worker fails, all are stopped: those that wait for it in a collective would hang
    otherwise. The group cannot be used after that.
    """

    is_local = False

    def __init__(
        self,
        cluster: RayVirtualCluster,
        worker_class: type,
        kwargs: Mapping[str, Any],
        *,
        name: str,
        parallel_layout: ParallelLayout,
        bundles: BundleSet = "policy",
        first_bundle: int = 0,
        progress_timeout_s: float | None = None,
        environment: Mapping[str, str | None] | None = None,
    ) -> None:
        """Start the workers and construct `worker_class(context, **kwargs)` in each.

        `bundles` selects the reserved resources they use, from bundle `first_bundle` on;
        `anywhere` reserves none and spreads them over the nodes. `progress_timeout_s` applies to
        calls after the construction; None is the value of the cluster's config. `environment` is
        added to the environment of each process; None removes a variable. Raises ClusterError if
        they do not start, WorkerFailure if a constructor fails.
        """
        self.name = name
        self.parallel_layout = parallel_layout
        self._has_close = hasattr(worker_class, "close")
        self._failure: WorkerFailure | None = None
        self._watched: set[ObjectRef[Raised | None]] = set()
        """Running calls that `is_done` has seen."""
        config = cluster.config
        bundle_of_rank = choose_bundles(cluster, bundles, parallel_layout, name, first_bundle)
        num_threads = 1 if bundles == "anywhere" else max(1, int(config.cpus_per_worker))
        self._collective_timeout_s = config.collective_timeout_s
        if progress_timeout_s is None:
            progress_timeout_s = config.progress_timeout_s
        self._monitor = ProgressMonitor(name, progress_timeout_s)
        self._actors = [
            start_actor(name, rank, bundle, num_threads, self._monitor, environment or {})
            for rank, bundle in enumerate(bundle_of_rank)
        ]
        try:
            self._locations = locate_actors(self._actors, name, config.placement_timeout_s)
            # Loading a model may take much longer than the work between two notes of progress.
            # Without a deadline the workers send no heartbeats, and could only be taken for hung.
            if progress_timeout_s > 0:
                self._monitor.timeout_s = config.progress_timeout_s
            contexts = worker_contexts(
                self._actors,
                self._locations,
                bundle_of_rank,
                num_threads,
                config.collective_timeout_s,
            )
            kwargs_ref = ray.put(dict(kwargs))
            handles = []
            for rank, context in enumerate(contexts):
                args = (worker_class, context, kwargs_ref)
                handles.append(self._submit(rank, "__init__", self._actors[rank].build, args, {}))
            self.wait(handles)
            self._monitor.timeout_s = progress_timeout_s
        except BaseException:
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        return self.parallel_layout.world_size

    def run_all_workers(self, method: str, /, *args: Any, **kwargs: Any) -> list[Any]:
        return self.get(self.submit_all(method, *args, **kwargs))

    def run_all_workers_sharded_data(
        self, method: str, /, *sharded: Sequence[Any], num_results: int | None = None, **common: Any
    ) -> list[Any]:
        check_shards(self, method, sharded)
        self._raise_if_stopped()
        shared = {name: self._share(value) for name, value in common.items()}
        # Stored once per dp rank: its replicas get the same reference.
        args_of_dp_rank = []
        for dp_rank in range(self.parallel_layout.dp):
            args_of_dp_rank.append(self._share_args([items[dp_rank] for items in sharded]))
        num_outputs = self.parallel_layout.dp if num_results is None else num_results
        output_ranks = [self.parallel_layout.output_rank(dp_rank) for dp_rank in range(num_outputs)]
        returning = set(output_ranks)
        handles = []
        for rank in range(self.world_size):
            args = args_of_dp_rank[self.parallel_layout.dp_rank(rank)]
            handles.append(self._call(rank, method, args, shared, returns=rank in returning))
        self.wait(handles)
        return self.get([handles[rank] for rank in output_ranks])

    def put(self, value: Any) -> Handle:
        return Handle(ray.put(value))

    def put_shards(self, shards: Sequence[Any]) -> tuple[Handle, ...]:
        # One object per node: its workers need all of it, and an object costs the driver more CPU
        # time than the rows of a rank.
        nodes: dict[str, list[int]] = {}
        for dp_rank in range(len(shards)):
            location = self._locations[self.parallel_layout.output_rank(dp_rank)]
            nodes.setdefault(location.node_id, []).append(dp_rank)
        handles = {}
        for dp_ranks in nodes.values():
            stored = ray.put([shards[dp_rank] for dp_rank in dp_ranks])
            for index, dp_rank in enumerate(dp_ranks):
                handles[dp_rank] = Handle(stored, index=index)
        return tuple(handles[dp_rank] for dp_rank in range(len(shards)))

    def submit_all(self, method: str, /, *args: Any, **kwargs: Any) -> list[Handle]:
        return self._submit_to(range(self.world_size), method, args, kwargs)

    def submit_one(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Handle:
        return self._submit_to([rank], method, args, kwargs)[0]

    def _submit_to(
        self, ranks: Iterable[int], method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Handle]:
        self._raise_if_stopped()
        shared_args = self._share_args(args)
        shared_kwargs = {name: self._share(value) for name, value in kwargs.items()}
        return [self._call(rank, method, shared_args, shared_kwargs) for rank in ranks]

    def wait(self, handles: Sequence[Handle]) -> None:
        self._raise_if_stopped()
        pending = _pending(handles)
        self._monitor.start_waiting(_ranks(pending))
        while pending:
            self._check(pending, timeout_s=self._monitor.poll_s)

    def is_done(self, handles: Sequence[Handle]) -> bool:
        self._raise_if_stopped()
        pending = _pending(handles)
        new = list(pending.keys() - self._watched)
        if new:
            # The silence of a worker counts from the first check of its running call. A call that
            # has ended must not restart it.
            _, running = ray.wait(new, num_returns=len(new), timeout=0)
            if running:
                self._monitor.start_waiting({pending[outcome].rank for outcome in running})
            self._watched |= set(running)
        self._check(pending, timeout_s=0.0)
        return not pending

    def wait_any(self, handles: Sequence[Handle], timeout_s: float) -> list[Handle]:
        pending = _pending(handles)
        if not pending:
            return []
        num_awaited = -(-len(pending) // _AWAITED_SHARE)
        ended, _ = ray.wait(list(pending), num_returns=num_awaited, timeout=timeout_s)
        return [pending[outcome] for outcome in ended]

    def get(self, handles: Sequence[Handle]) -> list[Any]:
        self.wait(handles)
        try:
            values = ray.get([handle.value for handle in handles])
        except RayError:
            # A value that cannot be pickled, or that was lost with its node.
            for handle in handles:
                failure = failure_of(handle.value, handle.rank, handle.method)
                if failure is not None:
                    self._stop(failure)
            raise
        return [
            value if handle.index is None else value[handle.index]
            for handle, value in zip(handles, values, strict=True)
        ]

    def shutdown(self) -> None:
        # Without Ray the actors are gone already, and any call would start a new Ray.
        if ray.is_initialized():
            self._monitor.close(len(self._actors))
            if self._actors and self._has_close:
                # As `LocalGroup` does. It ends processes and removes files of the worker.
                ranks, args = range(len(self._actors)), self._share_args(())
                calls = [self._call(rank, "close", args, {}, returns=False) for rank in ranks]
                outcomes = [call.outcome for call in calls]
                ray.wait(outcomes, num_returns=len(outcomes), timeout=_CLOSE_S)
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        self._actors = []

    @property
    def locations(self) -> tuple[Location, ...]:
        """Process and node of every worker, in rank order."""
        return self._locations

    def _call(
        self,
        rank: int,
        method: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        returns: bool = True,
    ) -> Handle:
        call = self._actors[rank].call
        return self._submit(rank, method, call, (method, returns, *args), kwargs)

    def _submit(
        self,
        rank: int,
        method: str,
        actor_method: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Handle:
        outcome, value = actor_method.remote(*args, **kwargs)
        return Handle(value, outcome, rank, method)

    def _share_args(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return the last arguments of `WorkerActor.call`: `indices`, then `args`."""
        indices = {
            position: arg.index
            for position, arg in enumerate(args)
            if isinstance(arg, Handle) and arg.index is not None
        }
        return indices, *map(self._share, args)

    def _share(self, value: Any) -> Any:
        """Return a reference that can be passed to several workers; small values as they are."""
        if isinstance(value, Handle):
            return value.value
        # Ray sends small values with the call. An object in its store costs the driver 0.4 ms, and
        # a reference to it 0.05 ms per call.
        return value if _num_bytes(value) <= _MAX_SENT_BYTES else ray.put(value)

    def _raise_if_stopped(self) -> None:
        if self._failure is not None:
            raise self._failure
        if not self._actors:
            raise RuntimeError(f"the {self.name} group was shut down")

    def _check(self, pending: _Pending, timeout_s: float) -> None:
        """Wait for a call to end and remove all ended calls from `pending`.

        Raises WorkerFailure if one failed or a worker hangs.
        """
        failure = self._next_failure(pending, timeout_s=timeout_s)
        if failure is not None:
            self._stop(self._root_cause(failure, pending), pending)
        if pending:
            self._check_progress(pending)

    def _next_failure(self, pending: _Pending, timeout_s: float) -> Failure | None:
        """Wait for a call to end and remove all ended calls from `pending`.

        Returns one of their failures, primary failures first, or None.
        """
        if not pending:
            return None
        calls = list(pending)
        if len(calls) <= _MAX_SINGLE_WAITS:
            ray.wait(calls, num_returns=1, timeout=timeout_s)
            timeout_s = 0.0
        # The failures of several workers often arrive together; the first is not always the cause.
        ended, _ = ray.wait(calls, num_returns=len(calls), timeout=min(timeout_s, _FAILURE_POLL_S))
        failures = []
        for outcome in ended:
            call = pending.pop(outcome)
            self._watched.discard(outcome)
            failure = failure_of(outcome, call.rank, call.method)
            if failure is not None:
                failures.append(failure)
        return min(failures, key=lambda failure: failure.is_secondary, default=None)

    def _root_cause(self, failure: Failure, pending: _Pending) -> Failure:
        """Return the failure that caused a secondary one, if it arrives within the grace period.

        A collective is aborted in all other workers when one worker ends.
        """
        deadline = time.monotonic() + GRACE_S
        while failure.is_secondary and pending and time.monotonic() < deadline:
            silence = self._silence_of_timeout(pending)
            if silence is not None and not silence.responds:
                break
            left_s = max(0.0, deadline - time.monotonic())
            other = self._next_failure(pending, timeout_s=min(left_s, self._monitor.poll_s))
            if other is not None and not other.is_secondary:
                failure = other
        return failure

    def _check_progress(self, pending: _Pending) -> None:
        """Raise WorkerHung after the progress deadline."""
        silence = self._monitor.check(_ranks(pending))
        if silence is not None:
            self._stop_hung(silence, pending, self._monitor.waiting_text(silence.rank))

    def _stop(self, failure: Failure, pending: _Pending | None = None) -> NoReturn:
        if failure.is_secondary and pending:
            # A collective timed out: the root cause is a rank whose call is still running.
            silence = self._silence_of_timeout(pending)
            if silence is not None:
                assert isinstance(failure.error, Raised)
                collective = failure.error.collective
                self._stop_hung(silence, pending, waiting_text(failure.rank, collective))
        self._failure = explain(failure, self.name, self._locations[failure.rank])
        self.shutdown()
        raise self._failure

    def _silence_of_timeout(self, pending: _Pending) -> Silence | None:
        """Return the rank with a running call whose silence let a collective time out, if any."""
        # Its silence is about as long as the timeout; 0.9 is a margin.
        min_silent_s = 0.9 * self._collective_timeout_s
        return self._monitor.longest_silence(_ranks(pending), min_silent_s=min_silent_s)

    def _stop_hung(self, silence: Silence, pending: _Pending, waiting: str) -> NoReturn:
        location = self._locations[silence.rank]
        method = next(call.method for call in pending.values() if call.rank == silence.rank)
        hung = explain_hung(silence, self.name, method, location, waiting)
        self._failure = hung
        logger.info("%s", "\n".join([str(hung), *getattr(hung, "__notes__", ())]))
        # Ray cannot end a stopped process (SIGSTOP).
        kill_process(location)
        self.shutdown()
        raise hung


def _num_bytes(value: Any) -> float:
    """Return about the size of a value of known types; infinite for all others."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, np.ndarray):
        return math.inf if value.dtype.hasobject else value.nbytes
    parts: Sequence[Any] = ()
    if isinstance(value, tuple):
        parts = value
    elif isinstance(value, dict):
        parts = (*value.keys(), *value.values())
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    elif value is not None and not isinstance(value, (bool, int, float)):
        return math.inf
    # Counting the parts of a long sequence would cost more than it saves.
    return 8.0 + sum(map(_num_bytes, parts)) if len(parts) <= _MAX_PARTS else math.inf


def _pending(handles: Sequence[Handle]) -> _Pending:
    """Return the calls among `handles`; the others are values that were `put`."""
    return {handle.outcome: handle for handle in handles if handle.outcome is not None}


def _ranks(pending: _Pending) -> set[int]:
    return {call.rank for call in pending.values()}
