"""The driver's side of weight updates: from the policy to all replicas of the generator.

The driver passes handles and small messages and never receives weights.
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
    BucketMessage,
    ChannelRequest,
    ChannelSpec,
    Endpoint,
    LoadedBucket,
    SentBucket,
    WeightPlan,
    WeightSource,
    WeightSyncError,
    WeightTarget,
)
from nemo_like.weight_sync.transfer import TRANSPORTS, select_transport

logger = logging.getLogger(__name__)

_WATCH_S = 0.5
"""Wait for the policy between two checks of the replicas that it may wait for."""


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
    that is broadcast.
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

        `transport` None selects it from the processes of both sides. A broadcast of one bucket
        fails after `timeout_s`.
        """
        self._policy = policy_group
        self._dtype = dtype
        self._max_bucket_bytes = max_bucket_bytes
        self._requested: str | None = transport
        self._timeout_s = timeout_s
        self.transport: str | None = None
        """The transport of the last update; None before the first."""

    def push(self, replicas: Sequence[WorkerGroup], version: int) -> SyncReport:
        """Load the policy's weights into every replica as `version`.

        A replica is a worker group; each of its ranks, or each process below a rank, is a receiver.
        A replica whose group fails is reported in `SyncReport.failed`, and the others get the
        weights. Raises WorkerFailure if the policy fails, and WeightSyncError if a channel breaks
        although no replica failed.
        """
        start = time.perf_counter()
        live = Replicas(replicas)
        plan = call_all(
            self._policy, WeightSource.plan_weights, self._dtype, self._max_bucket_bytes
        )
        while True:
            num_failed = len(live.failed)
            update = _Update(plan[0])
            try:
                self._run_update(update, live, [each.endpoint for each in plan], version)
            except BaseException:
                self._abandon(live)
                raise
            if not update.broken:
                break
            if len(live.failed) == num_failed:
                self._abandon(live)
                raise WeightSyncError(
                    f"the weights of version {version} did not reach the generator over"
                    f" {self.transport}: {update.broken}"
                )
            # A member of a broadcast that ends breaks it for all: once more without that replica.
            logger.info("weight update %d starts again: %s", version, update.broken)
        return SyncReport(
            version=version,
            transport=self.transport,
            num_bytes=plan[0].num_bytes,
            num_buckets=plan[0].num_buckets,
            gather_s=update.gather_s,
            transfer_s=update.transfer_s,
            load_s=update.load_s,
            total_s=time.perf_counter() - start,
            buffer_bytes=update.buffer_bytes,
            failed=dict(live.failed),
        )

    def _run_update(
        self, update: _Update, live: Replicas, policy_endpoints: Sequence[Endpoint], version: int
    ) -> None:
        """Send all buckets to the live replicas; sets `update.broken` if the channel breaks."""
        endpoints = live.call(WeightTarget.weight_endpoints)
        if not endpoints:
            return
        self._open(update, live, policy_endpoints, endpoints)
        if not update.broken:
            live.call(WeightTarget.begin_update, update.plan.names)
            if _is_collective(self.transport):
                self._broadcast_buckets(update, live)
            else:
                self._pass_buckets(update, live)
        if not update.broken:
            live.call(WeightTarget.finish_update, version)
        # Receivers first: CUDA keeps the memory of a slot while another process has it open.
        received = live.call(WeightTarget.close_weight_channel)
        update.buffer_bytes = max(call_all(self._policy, WeightSource.close_weight_channel))
        for sizes in received.values():
            update.buffer_bytes += sum(sizes)

    def _open(
        self,
        update: _Update,
        live: Replicas,
        policy_endpoints: Sequence[Endpoint],
        endpoints: Mapping[int, Sequence[Sequence[Endpoint]]],
    ) -> None:
        """Open the channel on both sides.

        `endpoints` has for each replica and each of its ranks the processes that load.
        """
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
            transport = select_transport(policy_endpoints, receivers)
        if transport != self.transport:
            logger.info(
                "weights are sent in %s over %s to %d receivers in %d buckets",
                self._dtype,
                transport,
                len(receivers),
                update.plan.num_buckets,
            )
        self.transport = transport
        request = ChannelRequest(
            transport=transport,
            num_receivers=len(receivers),
            host=_address(self._policy),
            timeout_s=self._timeout_s,
        )
        spec = call_all(self._policy, WeightSource.open_weight_channel, request)[0]
        assert isinstance(spec, ChannelSpec), "policy rank 0 returns the channel"
        # Started before the receivers open their side: a broadcast group forms when all have come.
        connecting = submit_all(self._policy, WeightSource.connect_weight_channel)
        opening = live.submit_each(
            WeightTarget.open_weight_channel,
            {position: (spec, starts) for position, starts in first_index.items()},
        )
        update.note_broken(self.policy_results(connecting, live, [opening]))
        for answers in live.collect(opening).values():
            update.note_broken(answers)

    def _pass_buckets(self, update: _Update, live: Replicas) -> None:
        """Send each bucket, then have it loaded; bucket i + 1 is gathered while i is loaded."""
        num_buckets = update.plan.num_buckets
        sending = submit_all(self._policy, WeightSource.send_weight_bucket, 0)
        loading: _Calls = {}
        for index in range(num_buckets):
            sent: SentBucket = self._policy.get(sending)[0]
            started = live.submit(WeightTarget.load_bucket, sent.message)
            # Before the next gather, which writes into the slot of the bucket before this one.
            loaded = live.collect(loading)
            if index > 0:
                update.add_loaded(loaded)
            loading = started
            update.gather_s += sent.gather_s
            update.transfer_s += sent.transfer_s
            if index + 1 < num_buckets:
                sending = submit_all(self._policy, WeightSource.send_weight_bucket, index + 1)
        update.add_loaded(live.collect(loading))

    def _broadcast_buckets(self, update: _Update, live: Replicas) -> None:
        """Send and load all buckets; both sides meet in the broadcast of each bucket."""
        sending: list[list[Handle]] = []
        loading: list[_Calls] = []
        for index in range(update.plan.num_buckets):
            sending.append(submit_all(self._policy, WeightSource.send_weight_bucket, index))
            loading.append(live.submit(WeightTarget.load_bucket, BucketMessage(index)))
        # The policy first: a receiver that ends breaks its broadcast at once, and a failed gather
        # must not wait for receivers.
        results: list[SentBucket] = []
        for calls in sending:
            results.append(self.policy_results(calls, live, loading)[0])
        update.note_broken([sent.broken for sent in results])
        for sent, calls in zip(results, loading, strict=True):
            loaded = live.collect(calls)
            update.add_loaded(loaded)
            update.gather_s += sent.gather_s
            # The last member to come to a broadcast does not wait in it.
            durations = [each.transfer_s for ranks in loaded.values() for each in ranks]
            update.transfer_s += min([sent.transfer_s, *durations])

    def policy_results(
        self, calls: Sequence[Handle], live: Replicas, running: Sequence[_Calls]
    ) -> list[Any]:
        """Return the results of calls of the policy that may wait for `running` calls of replicas.

        A replica that hangs is killed at its own deadline, which ends its broadcast for all.
        """
        # All ranks at once: a rank whose collective was aborted is not the cause of the failure.
        while not self._policy.is_done(calls):
            # Without the calls that have ended, which would end the wait at once.
            unfinished = [call for call in calls if not self._policy.is_done([call])]
            self._policy.wait_any(unfinished, _WATCH_S)
            live.check(running)
        return self._policy.get(calls)

    def _abandon(self, live: Replicas) -> None:
        """Have both sides release their buffers after a failure, without waiting for them."""
        live.submit(WeightTarget.close_weight_channel)
        with suppress(WorkerFailure, RuntimeError):
            submit_all(self._policy, WeightSource.close_weight_channel)


@dataclass
class _Update:
    """What is known of an update in progress."""

    plan: WeightPlan
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

    def add_loaded(self, loaded: Mapping[int, Sequence[LoadedBucket]]) -> None:
        """Add the results of loading one bucket, by replica and rank."""
        slowest = 0.0
        for ranks in loaded.values():
            self.note_broken([each.broken for each in ranks])
            slowest = max([slowest, *(each.load_s for each in ranks)])
        self.load_s += slowest


_Calls = dict[int, list[Handle]]
"""Position of a replica -> handles of a running call, in rank order."""


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
