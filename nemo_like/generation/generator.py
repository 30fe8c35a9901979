"""Driver side of generation: distributes requests over replicas and collects completions.

Unfinished requests of a replica that fails go to other replicas, or wait until a restarted one has
the current weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from nemo_like.data.images import RowImage
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.errors import WorkerFailure
from nemo_like.distributed.worker_group import Handle
from nemo_like.generation.replicas import Replica, ReplicaSet, StartReplica, poll_seconds
from nemo_like.generation.requests import (
    Completions,
    GenerationProgress,
    GenerationRequests,
    GenerationWorkerProtocol,
    SamplingParams,
    check_room,
)
from nemo_like.generation.rollout_plan import plan_rollout
from nemo_like.metrics import Mean, Metrics, Sum

logger = logging.getLogger(__name__)

_IDLE_S = 0.05
"""Wait between two checks while no replica can decode."""

_MAX_IMBALANCE = 1.5
"""Ratio of a replica's outstanding tokens to the smallest up to which its episodes stay on it.

In simulations with 2 and 4 replicas 0.92 to 0.98 of the possible prefixes were read from a cache,
and the makespan was as short as without a limit; with a ratio of 1 the share was 0.64 to 0.86.
"""


class Generator:
    """Completions from a number of replicas. Not thread-safe: one thread at a time."""

    def __init__(
        self,
        start_replica: StartReplica,
        num_replicas: int = 1,
        *,
        max_restarts: int = 0,
        report: Callable[[str], None] = logger.warning,
    ) -> None:
        """Start all replicas, in parallel; `report` gets a line about each restart.

        Raises what `start_replica` raises.
        """
        self._set = ReplicaSet(
            start_replica, num_replicas, max_restarts=max_restarts, report=report
        )
        self._requests: dict[int, tuple[GenerationRequests, int, int | None]] = {}
        """Unfinished requests: id to the call of `submit`, the row in it, and the episode."""
        self._last_replica: dict[int, Replica] = {}
        """By episode: the replica that computed its last request with the current weights."""
        self._lengths: dict[int, float] = {}
        """Predicted tokens of the completions of unfinished requests."""
        self._waiting: list[int] = []
        """Unfinished requests that no replica has, without those that a replica just lost."""
        self._num_requests = 0
        self.version = 0
        """Version of the current weights; 0 is the model as loaded."""
        self._num_discarded_tokens = 0
        self._num_cancelled = 0
        """Requests cancelled since the last `pop_metrics`."""
        self._early: list[GenerationProgress] = []
        """Results of polls that were read outside of `collect`."""

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, by index; those that are starting again are as they were."""
        return self._set.replicas

    @property
    def live_replicas(self) -> list[Replica]:
        """Replicas whose process runs."""
        return self._set.live

    @property
    def replicas_without_weights(self) -> list[Replica]:
        """Restarted replicas that need the current weights before they get requests."""
        return [replica for replica in self._set.live if not replica.has_weights]

    @property
    def num_unfinished(self) -> int:
        """Requests whose completions were not returned yet."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Unfinished requests that a replica has; the others wait for one."""
        return sum(len(replica.costs) for replica in self.replicas)

    def submit(
        self,
        prompt_ids: Jagged,
        seeds: np.ndarray,
        sampling: SamplingParams,
        *,
        lengths: np.ndarray | None = None,
        max_total_length: int,
        affinity: Sequence[int] | None = None,
        images: Sequence[Sequence[RowImage]] = (),
    ) -> list[int]:
        """Request one completion for each row of `prompt_ids` (int32, B rows); return their ids.

        `seeds` is uint64 [B]; row i draws from the random stream of `seeds[i]`. Consecutive rows
        with the same prompt go to one replica, which computes the prompt once. With `lengths`,
        float [B], the predicted tokens of the completions, these are what `plan_rollout` balances
        and orders, instead of the token limits. Prompt and
        completion together have at most `max_total_length` tokens. `affinity` has the number of the
        episode of each row: it goes to the replica of the last request of its episode, which has
        the beginning of the prompt in its cache, unless the outstanding tokens of that replica
        exceed `_MAX_IMBALANCE` times the smallest by more than the prompt. `images` are those of
        each prompt, or none. Raises ValueError for a prompt that leaves no room for a token.
        """
        if len(seeds) != len(prompt_ids):
            raise ValueError(f"{len(prompt_ids)} prompts need as many seeds, got {len(seeds)}")
        request_ids = np.arange(len(prompt_ids), dtype=np.int64) + self._num_requests
        requests = GenerationRequests(
            request_ids,
            prompt_ids,
            np.asarray(seeds, dtype=np.uint64),
            sampling,
            max_total_length,
            images if any(images) else (),
            has_order=lengths is not None,
        )
        check_room(requests)
        self._num_requests += len(requests)
        ids = request_ids.tolist()
        if lengths is not None:
            self._lengths.update(zip(ids, lengths.tolist(), strict=True))
        episodes = [None] * len(ids) if affinity is None else affinity
        for row, (request_id, episode) in enumerate(zip(ids, episodes, strict=True)):
            self._requests[request_id] = (requests, row, episode)
        self._waiting += ids
        self._assign()
        return ids

    def collect(
        self, timeout_s: float, calls: Sequence[Handle] = ()
    ) -> tuple[list[int], Completions]:
        """Return the requests that finished since the last call, and their completions.

        Waits up to `timeout_s` for one, or for the end of one of `calls` of other groups. Restarts
        replicas that failed; raises WorkerFailure when that is no longer allowed, or if a replica
        raised an exception.
        """
        self._set.finish_restarts()
        self._assign()
        results = self._early
        self._early = []
        self._read_polls(results, timeout_s, calls)
        finished: list[int] = []
        parts = [Completions.from_rows([], [], [], [])]
        for progress in results:
            ids = progress.request_ids.tolist()
            # Some were cancelled after they had finished.
            rows = [row for row, each in enumerate(ids) if self._forget(each)]
            finished += [ids[row] for row in rows]
            completions = progress.completions
            self._num_discarded_tokens += progress.num_cancelled_tokens
            if len(rows) < len(ids):
                self._num_discarded_tokens += len(completions.token_ids.values)
                completions = completions.take(np.array(rows, dtype=np.int64))
                self._num_discarded_tokens -= len(completions.token_ids.values)
            parts.append(completions)
        return finished, Completions.concat(parts)

    def cancel(self, request_ids: Sequence[int]) -> None:
        """Discard requests, wherever they are; `collect` does not return them. Returns at once.

        Ids of requests that `collect` has returned are ignored.
        """
        self._requeue_lost()
        cancelled = [each for each in request_ids if self._forget(each)]
        self._num_cancelled += len(cancelled)
        self._waiting = [each for each in self._waiting if each in self._requests]
        for replica in self.live_replicas:
            with self._set.replacing(replica):
                replica.cancel(cancelled)

    def add_discarded(self, num_tokens: int) -> None:
        """Count tokens of completions that `collect` has returned, and that are not used."""
        self._num_discarded_tokens += num_tokens

    def generate(
        self,
        prompt_ids: Jagged,
        seeds: np.ndarray,
        sampling: SamplingParams,
        *,
        max_total_length: int,
    ) -> Completions:
        """Return one completion for each row of `prompt_ids` (int32, B rows), in order.

        `seeds` is uint64 [B]; see `submit`. No other request may be unfinished.
        """
        if self._requests:
            raise RuntimeError(
                f"generate was called while {self.num_unfinished} other requests are unfinished"
            )
        self.start_rollout()
        ids = self.submit(prompt_ids, seeds, sampling, max_total_length=max_total_length)
        row_of_id = {request_id: row for row, request_id in enumerate(ids)}
        rows: list[int] = []
        parts = [Completions.from_rows([], [], [], [])]
        while self._requests:
            if not self.num_running and not self._set.is_starting and not self._waiting_is_served():
                raise RuntimeError(
                    f"{self.num_unfinished} requests wait for replicas without the weights of"
                    f" version {self.version}"
                )
            finished, completions = self.collect(timeout_s=1.0)
            rows += [row_of_id[request_id] for request_id in finished]
            parts.append(completions)
        return Completions.concat(parts).take(np.argsort(rows))

    def _waiting_is_served(self) -> bool:
        """True if a replica can take requests, or results were not returned yet."""
        return bool(self._early) or any(replica.has_weights for replica in self.live_replicas)

    def start_rollout(self) -> None:
        """Make the next requests independent of earlier ones; see `GenerationWorkerProtocol`."""
        self._forget_episodes()
        for replica in self.live_replicas:
            if not replica.costs:
                with self._set.replacing(replica):
                    replica.start(GenerationWorkerProtocol.start_rollout)

    def restart_unfinished(self) -> None:
        """Discard what was sampled for unfinished requests; they start again from their prompt."""
        for replica in self.live_replicas:
            with self._set.replacing(replica):
                replica.wait(self._early)
                request_ids, num_tokens = replica.abort()
                self._num_discarded_tokens += num_tokens
                self._waiting += request_ids

    def start_score(
        self, rows: Jagged, replicas: Sequence[Replica]
    ) -> Callable[[], dict[int, Jagged]]:
        """Start to compute the log-probs of `rows` (int32) with each of `replicas`.

        They compute at the same time. The returned function waits for them and returns the
        log-probs by replica index. See `GenerationWorkerProtocol.score`.
        """
        return self._set.start_call(replicas, GenerationWorkerProtocol.score, rows)

    def set_version(self, replicas: Sequence[Replica], version: int) -> None:
        """Record that `replicas` have the weights of `version`, which is the current one now."""
        if version != self.version:
            self._forget_episodes()
            for replica in self.replicas:
                replica.has_weights = False
        self.version = version
        for replica in replicas:
            replica.has_weights = True

    def replace(self, replica: Replica, failure: WorkerFailure) -> None:
        """Restart a replica that failed. Raises WorkerFailure if that is not possible."""
        self._set.replace(replica, failure)

    def pop_metrics(self, wall_s: float) -> Metrics:
        """Return counters since the last call, which was `wall_s` seconds ago."""
        self._requeue_lost()
        num_replicas = len(self.replicas)
        busy_s = sum(replica.busy_s for replica in self.replicas)
        num_tokens = sum(replica.num_tokens for replica in self.replicas)
        metrics: Metrics = {
            "timing/generator_busy_s": Mean(busy_s, num_replicas),
            "timing/generator_idle_s": Mean(max(0.0, wall_s * num_replicas - busy_s), num_replicas),
            "generation/num_discarded_tokens": Sum(float(self._num_discarded_tokens)),
            "generation/num_restarts": Mean(float(self._set.num_restarts)),
            "generation/num_cancelled": Sum(float(self._num_cancelled)),
        }
        num_prompt_tokens = sum(replica.num_prompt_tokens for replica in self.replicas)
        if num_prompt_tokens > 0:
            num_cached_tokens = sum(replica.num_cached_tokens for replica in self.replicas)
            metrics["generation/cached_prompt_share"] = Mean(num_cached_tokens, num_prompt_tokens)
        if busy_s > 0:
            metrics["performance/generation_tokens_per_s"] = Mean(
                num_tokens * num_replicas / busy_s
            )
        for replica in self.replicas:
            replica.busy_s = 0.0
            replica.num_tokens = 0
            replica.num_prompt_tokens = 0
            replica.num_cached_tokens = 0
        self._num_discarded_tokens = 0
        self._num_cancelled = 0
        return metrics

    def offload(self) -> None:
        """Move the weights of every replica to host memory; see `ReplicaSet.offload`."""
        self._set.offload()

    @contextmanager
    def onloaded(self, *, discards_weights: bool = False) -> Iterator[None]:
        """Keep the weights on the device inside the block, and in host memory after it.

        With `discards_weights` they may be lost after it, because an update comes next.
        """
        self._set.onload()
        yield
        # Not after an exception: the run has ended then.
        self._set.offload(discards_weights=discards_weights)

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Keep the weights in host memory inside the block; requests wait, and go on after it."""
        self._set.offload()
        yield
        self._set.onload()

    def shutdown(self) -> None:
        """Stop the replicas."""
        self._set.shutdown()

    def _forget_episodes(self) -> None:
        """Forget the replicas of episodes without a request: the prefix caches are dropped."""
        running = {episode for _, _, episode in self._requests.values()}
        self._last_replica = {
            episode: replica
            for episode, replica in self._last_replica.items()
            if episode in running
        }

    def _read_polls(
        self, results: list[GenerationProgress], timeout_s: float, calls: Sequence[Handle]
    ) -> None:
        """Append the results of the polls that end within `timeout_s`; returns after the first.

        Also at the end of one of `calls`.
        """
        replica_of_poll: dict[Handle, Replica] = {}
        limits = poll_seconds(len(self.replicas), has_turns=bool(self._last_replica))
        for replica in self.live_replicas:
            with self._set.replacing(replica):
                replica.start_polls(*limits)
                if replica.polls:
                    # Rank 0 replies for all ranks.
                    replica_of_poll[replica.polls[0][0]] = replica
        ended: list[Handle] = []
        if replica_of_poll or calls:
            # One call for all replicas: the cost of looking at each would limit their number.
            ended = self.replicas[0].group.wait_any([*replica_of_poll, *calls], timeout_s)
        else:
            time.sleep(min(timeout_s, _IDLE_S))
        for poll in ended:
            replica = replica_of_poll.get(poll)
            if replica is not None:
                with self._set.replacing(replica):
                    replica.read_poll(results)
        for replica in self.live_replicas:
            if replica.is_due:
                with self._set.replacing(replica):
                    replica.check()

    def _assign(self) -> None:
        """Send waiting requests to the replicas with weights; rows of a prompt stay together.

        Those of an episode go where the last one went.
        """
        self._requeue_lost()
        ready = [replica for replica in self.live_replicas if replica.has_weights]
        if not self._waiting or not ready:
            return
        ids: list[list[int]] = [[] for _ in ready]
        outstanding = np.array([replica.cost for replica in ready], dtype=np.int64)
        waiting = self._place_episodes(ready, ids, outstanding)
        self._waiting = []
        # Call by call: the completions of an earlier step are needed first.
        for _, request_ids, _ in self._by_call(waiting):
            self._plan(request_ids, ids, outstanding)
        for replica, request_ids in zip(ready, ids, strict=True):
            self._send(replica, request_ids)

    def _plan(
        self, waiting: Sequence[int], ids: Sequence[list[int]], outstanding: np.ndarray
    ) -> None:
        """Add requests of one call to `ids`, by replica, in the order of `plan_rollout`.

        `outstanding` int64 [R] has the outstanding tokens of the R replicas and is updated.
        """
        units = self._units(waiting)
        if len(units) < len(ids):
            units = [[request_id] for request_id in waiting]
        costs = []
        for unit in units:
            costs.append(sum(self._cost(request_id) for request_id in unit))
        lengths = None
        if all(request_id in self._lengths for request_id in waiting):
            lengths = np.array([self._lengths[unit[0]] for unit in units])
        plan = plan_rollout(np.array(costs, dtype=np.int64), outstanding, lengths)
        for unit in plan.order.tolist():
            replica = int(plan.replica_of_unit[unit])
            ids[replica].extend(units[unit])
            outstanding[replica] += costs[unit]

    def _place_episodes(
        self, ready: Sequence[Replica], ids: Sequence[list[int]], outstanding: np.ndarray
    ) -> list[int]:
        """Add the waiting requests of running episodes to `ids`, by replica; return the others.

        `outstanding` int64 [R] has the outstanding tokens of the R replicas and is updated.
        """
        index_of_replica = {replica: index for index, replica in enumerate(ready)}
        others: list[int] = []
        placed: list[tuple[int, int]] = []
        for request_id in self._waiting:
            episode = self._requests[request_id][2]
            last = None if episode is None else self._last_replica.get(episode)
            if last is None or last not in index_of_replica:
                others.append(request_id)
                continue
            placed.append((request_id, index_of_replica[last]))
            outstanding[placed[-1][1]] += self._cost(request_id)
        for request_id, last_index in placed:
            index = last_index
            cost = self._cost(request_id)
            requests, row, _ = self._requests[request_id]
            excess = outstanding[index] - cost - _MAX_IMBALANCE * outstanding.min()
            if excess > requests.prompt_ids.lengths[row]:
                outstanding[index] -= cost
                index = int(outstanding.argmin())
                outstanding[index] += cost
            ids[index].append(request_id)
        return others

    def _units(self, request_ids: Sequence[int]) -> list[list[int]]:
        """Split requests into runs of equal prompts."""
        units: list[list[int]] = []
        previous: tuple[np.ndarray, Sequence[RowImage]] | None = None
        for request_id in request_ids:
            requests, row, _ = self._requests[request_id]
            prompt = requests.prompt_ids[row]
            images = requests.images[row] if requests.images else ()
            if (
                previous is not None
                and np.array_equal(prompt, previous[0])
                and images == previous[1]
            ):
                units[-1].append(request_id)
            else:
                units.append([request_id])
            previous = prompt, images
        return units

    def _send(self, replica: Replica, request_ids: Sequence[int]) -> None:
        """Send requests to a replica; they wait again if it has failed."""
        for requests, ids, rows in self._by_call(request_ids):
            with self._set.replacing(replica):
                replica.submit(requests.take(rows), [self._cost(each) for each in ids])
                for request_id in ids:
                    episode = self._requests[request_id][2]
                    if episode is not None:
                        self._last_replica[episode] = replica
                continue
            self._waiting += ids

    def _requeue_lost(self) -> None:
        """Let the requests of replicas that failed wait for another replica."""
        request_ids, num_tokens = self._set.take_lost()
        self._waiting += request_ids
        self._num_discarded_tokens += num_tokens

    def _by_call(
        self, request_ids: Sequence[int]
    ) -> Iterator[tuple[GenerationRequests, list[int], list[int]]]:
        """Yield (call of submit, ids, rows) for ids of any calls, in the order of the ids."""
        by_call: dict[int, tuple[GenerationRequests, list[int], list[int]]] = {}
        for request_id in request_ids:
            requests, row, _ = self._requests[request_id]
            _, ids, rows = by_call.setdefault(id(requests), (requests, [], []))
            ids.append(request_id)
            rows.append(row)
        yield from by_call.values()

    def _forget(self, request_id: int) -> bool:
        """Remove a request that has ended or is cancelled; return whether it was unfinished."""
        self._lengths.pop(request_id, None)
        return self._requests.pop(request_id, None) is not None

    def _cost(self, request_id: int) -> int:
        """Return the predicted number of tokens of a request, prompt included, or else the max."""
        requests, row, _ = self._requests[request_id]
        length = int(requests.prompt_ids.lengths[row])
        if request_id in self._lengths:
            return length + round(self._lengths[request_id])
        return min(length + requests.sampling.max_new_tokens, requests.max_total_length)
