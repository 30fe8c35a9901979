"""The driver's side of weight updates: from the policy to all replicas of the generator.

An update is one call of every policy rank and one of every replica: senders and receivers know all
buckets and wait for each other without the driver. The channel between them stays open for the next
update. The driver passes handles and small messages and never receives weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from nemo_like.distributed.errors import WorkerFailure
from nemo_like.distributed.worker_group import Handle, WorkerGroup, call_all, submit_all
from nemo_like.metrics import Mean, Metrics, Sum
from nemo_like.weight_sync.channel import (
    MAX_BUCKET_BYTES,
    ChannelRequest,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    SentWeights,
    WeightSource,
    WeightSyncError,
    WeightTarget,
    bucket_limit,
)
from nemo_like.weight_sync.transfer import TRANSPORTS, select_transport

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
"""Wait for the policy between two checks of the replicas that it may wait for."""
_CHECK_SHARE = 50
"""The wait is at least this many times as long as a check takes."""

_Calls = dict[int, list[Handle]]
"""Position of a replica -> handles of a running call, in rank order."""


@dataclass(frozen=True, kw_only=True)
class SyncReport:
    """One weight update. The seconds of the phases overlap, so their sum may exceed the total."""

    version: int
    transport: str | None
    """None if every replica had failed before one was chosen."""
    num_bytes: int
    num_buckets: int
    gather_s: float
    """Casting the weights and gathering them on policy rank 0, in memory that receivers read or
    that is broadcast; 0 in one process, where loading casts.
    """
    transfer_s: float
    """Broadcasting, without waits; about 0 in one process and with shared memory."""
    load_s: float
    """Copying into the models: of each bucket the slowest replica."""
    total_s: float
    buffer_bytes: int
    """Memory of the buckets: of the sender and, where they have buffers of their own, of the
    receivers.
    """
    failed: Mapping[int, WorkerFailure]
    """Position of a replica -> why it did not get the weights."""

    def metrics(self) -> Metrics:
        """Return the metrics of the update, see docs/metrics.md."""
        # An update that no replica got has no time, and its bytes must not count either.
        is_broadcast = _is_collective(self.transport) and self.transfer_s > 0
        broadcast_gb = self.num_bytes / 1e9 if is_broadcast else 0.0
        return {
            "weight_sync/bytes": Sum(float(self.num_bytes)),
            "weight_sync/num_buckets": Sum(float(self.num_buckets)),
            "weight_sync/seconds": Sum(self.total_s),
            "weight_sync/gather_s": Sum(self.gather_s),
            "weight_sync/transfer_s": Sum(self.transfer_s),
            "weight_sync/load_s": Sum(self.load_s),
            # With the seconds as weights: bytes over seconds of all updates of a step.
            "weight_sync/gb_per_s": Mean(self.num_bytes / 1e9, self.total_s),
            "weight_sync/transfer_gb_per_s": Mean(broadcast_gb, self.transfer_s),
            "weight_sync/num_failed_replicas": Sum(float(len(self.failed))),
        }


class WeightSync:
    """Sends the policy's weights to the replicas of the generator."""

    def __init__(
        self,
        policy_group: WorkerGroup,
        *,
        dtype: str,
        max_bucket_bytes: int = MAX_BUCKET_BYTES,
        transport: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        """Prepare updates in the generator's `dtype` ("float32" or "bfloat16").

        `transport` None selects it from the processes of both sides. A bucket is limited by
        `max_bucket_bytes` and by the free memory of all processes. A member of an update fails when
        it waits longer than `timeout_s` for the others with one bucket.
        """
        self._policy = policy_group
        self._dtype = dtype
        self._max_bucket_bytes = max_bucket_bytes
        self._requested: str | None = transport
        self._timeout_s = timeout_s
        self._policy_endpoints: list[Endpoint] = []
        self._members: list[WorkerGroup] = []
        """The replicas that the open channel reaches; empty without one."""
        self._spec: ChannelSpec | None = None
        """Specification of the last channel, with the weights of its last update."""

    @property
    def transport(self) -> str | None:
        """The transport of the last update; None before the first."""
        return None if self._spec is None else self._spec.transport

    def push(self, replicas: Sequence[WorkerGroup], version: int) -> SyncReport:
        """Load the policy's weights into every replica as `version`.

        A replica is a worker group; each of its ranks, or each process below a rank, is a receiver.
        A replica whose group fails is reported in `SyncReport.failed`, and the others get the
        weights. Raises WorkerFailure if the policy fails, and WeightSyncError if a channel breaks
        although no replica failed.
        """
        start = time.perf_counter()
        live = Replicas(replicas)
        while True:
            num_failed = len(live.failed)
            was_open = self._is_open(live)
            update = _Update()
            try:
                self._run_update(update, live, version)
            except BaseException:
                self._abandon(live)
                raise
            if not update.broken:
                break
            self._abandon(live)
            if len(live.failed) == num_failed and not was_open:
                raise WeightSyncError(
                    f"the weights of version {version} did not reach the generator over"
                    f" {self.transport}: {update.broken}"
                )
            # A lost member breaks a broadcast for all: once more over a new channel without it. A
            # channel of an earlier update may also have broken since.
            logger.info("weight update %d starts again: %s", version, update.broken)
        return SyncReport(
            version=version,
            transport=self.transport,
            num_bytes=0 if self._spec is None else self._spec.num_bytes,
            num_buckets=0 if self._spec is None else len(self._spec.layouts),
            gather_s=update.gather_s,
            transfer_s=update.transfer_s,
            load_s=update.load_s,
            total_s=time.perf_counter() - start,
            buffer_bytes=update.buffer_bytes,
            failed=dict(live.failed),
        )

    def _is_open(self, live: Replicas) -> bool:
        """Return whether the channel of an earlier update reaches these replicas and no other."""
        return self._members == [group for _, group in live.live()]

    def _run_update(self, update: _Update, live: Replicas, version: int) -> None:
        """Send all buckets to the live replicas; sets `update.broken` if the channel breaks."""
        opening: _Calls = {}
        is_first = not self._is_open(live)
        if is_first:
            opening = self._open(live)
        if not self._members:
            return
        if not is_first and self._spec is not None:
            self._spec = self._spec.of_later_updates()
        if TRANSPORTS[self.transport or ""].passes_tensors:
            sending = submit_all(self._policy, WeightSource.send_weights, is_first)
            buckets = self._policy.get(sending)[0].buckets
            loading = live.submit(WeightTarget.load_weights, version, buckets, is_first)
        else:
            # The receivers first: a group in this process returns when it has sent all.
            loading = live.submit(WeightTarget.load_weights, version, None, is_first)
            sending = submit_all(self._policy, WeightSource.send_weights, is_first)
        # The policy first: a receiver that ends breaks its broadcast at once, and a failed gather
        # must not wait for receivers.
        results = self.policy_results(sending, live, [opening, loading])
        for answers in live.collect(opening).values():
            update.note_broken(answers)
        update.add(results, live.collect(loading))

    def _open(self, live: Replicas) -> _Calls:
        """Open a channel to the live replicas; returns the running calls that join it."""
        self._members = []
        if not self._policy_endpoints:
            self._policy_endpoints = call_all(self._policy, WeightSource.weight_endpoint)
        # For each replica and each of its ranks the processes that load.
        endpoints: dict[int, list[Sequence[Endpoint]]] = live.call(WeightTarget.weight_endpoints)
        if not endpoints:
            return {}
        first_index: dict[int, tuple[int, ...]] = {}
        receivers: list[Endpoint] = []
        for position, ranks in endpoints.items():
            starts = []
            for processes in ranks:
                starts.append(len(receivers))
                receivers += processes
            first_index[position] = tuple(starts)
        transport = self._requested
        if transport is None:
            transport = select_transport(self._policy_endpoints, receivers)
        request = ChannelRequest(
            transport=transport,
            dtype=self._dtype,
            max_bytes=bucket_limit([*self._policy_endpoints, *receivers], self._max_bucket_bytes),
            num_receivers=len(receivers),
            host=_address(self._policy),
            timeout_s=self._timeout_s,
        )
        spec = call_all(self._policy, WeightSource.open_weight_channel, request)[0]
        assert isinstance(spec, ChannelSpec), "policy rank 0 returns the channel"
        if transport != self.transport:
            logger.info(
                "weights are sent in %s over %s to %d receivers in %d buckets",
                self._dtype,
                transport,
                len(receivers),
                len(spec.layouts),
            )
        self._spec = spec
        shared = self._policy.put(spec)
        opening = live.submit_each(
            WeightTarget.open_weight_channel,
            {position: (shared, starts) for position, starts in first_index.items()},
        )
        if not TRANSPORTS[transport].is_collective:
            # The sender accepts those that have come. A broadcast group forms while it sends.
            live.collect(opening)
        self._members = [group for _, group in live.live()]
        return opening

    def policy_results(
        self, calls: Sequence[Handle], live: Replicas, running: Sequence[_Calls]
    ) -> list[Any]:
        """Return the results of calls of the policy that may wait for `running` calls of replicas.

        A replica that hangs is killed at its own deadline, which ends its broadcast for all.
        """
        check_s = 0.0
        unfinished = set(calls)
        # All ranks at once: a rank whose collective was aborted is not the cause of the failure.
        while not self._policy.is_done(calls):
            # Without the calls that have ended, which would end the wait at once.
            ended = self._policy.wait_any(list(unfinished), max(_WATCH_S, _CHECK_SHARE * check_s))
            unfinished -= set(ended)
            start = time.perf_counter()
            live.check(running)
            check_s = time.perf_counter() - start
        return self._policy.get(calls)

    def _abandon(self, live: Replicas) -> None:
        """Have both sides leave the channel after a failure, without waiting for them."""
        self._members = []
        live.submit(WeightTarget.close_weight_channel)
        with suppress(WorkerFailure, RuntimeError):
            submit_all(self._policy, WeightSource.close_weight_channel)


@dataclass
class _Update:
    """What is known of an update in progress."""

    gather_s: float = 0.0
    transfer_s: float = 0.0
    load_s: float = 0.0
    buffer_bytes: int = 0
    broken: str = ""
    """Why the channel broke; empty if it did not."""

    def note_broken(self, answers: Sequence[str]) -> None:
        """Keep the first reason of a broken channel."""
        for answer in answers:
            self.broken = self.broken or answer

    def add(
        self, sent: Sequence[SentWeights], loaded: Mapping[int, Sequence[Sequence[LoadedBucket]]]
    ) -> None:
        """Add the results of the policy's ranks, and of each bucket by replica and rank."""
        self.note_broken([each.broken for each in sent])
        self.gather_s = sent[0].gather_s
        self.buffer_bytes = max(each.buffer_bytes for each in sent)
        receivers = [buckets for ranks in loaded.values() for buckets in ranks]
        for bucket in zip(*receivers, strict=False):
            self.note_broken([each.broken for each in bucket])
            self.load_s += max(each.load_s for each in bucket)
            self.buffer_bytes += sum(each.buffer_bytes for each in bucket)
        for transfer_s, *bucket in zip(sent[0].transfer_s, *receivers, strict=False):
            # The last member to come to a broadcast does not wait in it.
            # There is no receiver if all replicas were lost.
            self.transfer_s += min([transfer_s, *(each.transfer_s for each in bucket)])


@dataclass
class Replicas:
    """The replicas of one update. One whose group fails is left out from then on."""

    groups: Sequence[WorkerGroup]
    failed: dict[int, WorkerFailure] = field(default_factory=dict)

    def live(self) -> Iterator[tuple[int, WorkerGroup]]:
        """Yield position and group of each replica that has not failed."""
        for position, group in enumerate(self.groups):
            if position not in self.failed:
                yield position, group

    def call(self, method: Callable[..., Any], *args: Any) -> dict[int, list[Any]]:
        """Call a method on all replicas; results of each in rank order."""
        return self.collect(self.submit(method, *args))

    def submit(self, method: Callable[..., Any], *args: Any) -> _Calls:
        """Start a method on all replicas with the same arguments."""
        return self.submit_each(method, {position: args for position, _ in self.live()})

    def submit_each(
        self, method: Callable[..., Any], args: Mapping[int, tuple[Any, ...]]
    ) -> _Calls:
        """Start a method on all replicas with the arguments of each."""
        calls: _Calls = {}
        for position, group in list(self.live()):
            try:
                calls[position] = group.submit_all(method.__name__, *args[position])
            except WorkerFailure as failure:
                self._record(position, failure)
        return calls

    def collect(self, calls: _Calls) -> dict[int, list[Any]]:
        """Wait for calls; results of the replicas that have not failed."""
        results: dict[int, list[Any]] = {}
        for position, handles in calls.items():
            if position in self.failed:
                continue
            try:
                results[position] = self.groups[position].get(handles)
            except WorkerFailure as failure:
                self._record(position, failure)
        return results

    def check(self, running: Sequence[_Calls]) -> None:
        """Leave out each replica of which a call failed or hangs; `running` is in start order."""
        for position, group in list(self.live()):
            try:
                all(group.is_done(calls.get(position, [])) for calls in running)
            except WorkerFailure as failure:
                self._record(position, failure)

    def _record(self, position: int, failure: WorkerFailure) -> None:
        logger.info("replica %d did not get the weights: %s", position, failure)
        self.failed[position] = failure


def _address(group: WorkerGroup) -> str:
    """Return the address of the node of rank 0."""
    # Only groups of Ray have locations; a group in this process has none.
    locations = getattr(group, "locations", ())
    return locations[0].ip if locations else "127.0.0.1"


def _is_collective(transport: str | None) -> bool:
    return transport is not None and TRANSPORTS[transport].is_collective
