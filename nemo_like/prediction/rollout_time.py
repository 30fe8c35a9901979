"""Predicted time of a rollout: the completions of one step decoded on several replicas.

A simulation, not a measurement. A replica decodes up to `max_running` rows together and gives each
of them one token per decode step. The time of a decode step is the larger of reading weights and KV
cache from memory and of computing, plus a constant (roofline model). A row that waits joins when
another one ends (continuous batching), or when all have ended (static batches).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nemo_like.data.planning.cost import CostModel
from nemo_like.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class DecodeModel:
    """Times of one replica, which may have several devices."""

    weight_bytes: float
    """Bytes of the weights; each decode step reads all of them."""
    kv_bytes_per_token: float
    """Bytes of the KV cache of one position; a decode step reads those of all running rows."""
    flops_per_token: float
    """FLOPs of one new token, attention to the KV cache not included."""
    prefill: CostModel
    """Forward FLOPs of a prompt."""
    flops_per_s: float
    memory_bytes_per_s: float
    step_overhead_s: float
    """Constant time of a decode step: launches of kernels, sampling, scheduling."""

    @classmethod
    def from_spec(
        cls,
        spec: ModelSpec,
        *,
        bytes_per_value: int,
        flops_per_s: float,
        memory_bytes_per_s: float,
        step_overhead_s: float,
    ) -> DecodeModel:
        """Return the model of a replica with these rates over all its devices.

        Every expert of a MoE model is read in every step, and sliding windows do not shorten the KV
        cache: both are upper bounds.
        """
        kv_values = 2 * spec.num_kv_heads * spec.head_dim
        if spec.latent is not None:
            kv_values = spec.latent.kv_rank + spec.latent.rope_dim
        num_layers = spec.num_layers - len(spec.linear_attention_layers)
        return cls(
            weight_bytes=float(spec.num_params * bytes_per_value),
            kv_bytes_per_token=float(num_layers * kv_values * bytes_per_value),
            flops_per_token=2.0 * spec.num_active_params,
            prefill=CostModel.from_spec(spec),
            flops_per_s=flops_per_s,
            memory_bytes_per_s=memory_bytes_per_s,
            step_overhead_s=step_overhead_s,
        )

    def decode_seconds(self, num_rows: int, context_tokens: int, num_steps: int) -> float:
        """Return the time of `num_steps` decode steps of `num_rows` rows.

        `context_tokens` is the sum of the rows' positions before the first step; every step adds
        one position per row.
        """
        compute_s = num_rows * self.flops_per_token / self.flops_per_s
        first_read_s = self.weight_bytes + self.kv_bytes_per_token * context_tokens
        first_read_s /= self.memory_bytes_per_s
        # Reading grows by this in every step, while computing stays the same.
        growth_s = self.kv_bytes_per_token * num_rows / self.memory_bytes_per_s
        num_compute_bound = 0
        if first_read_s < compute_s:
            num_compute_bound = num_steps
            if growth_s > 0:
                num_until_equal = math.ceil((compute_s - first_read_s) / growth_s)
                num_compute_bound = min(num_until_equal, num_steps)
        num_memory_bound = num_steps - num_compute_bound
        # Arithmetic series of the steps that are bound by memory.
        start_s = first_read_s + growth_s * num_compute_bound
        series_s = num_memory_bound * start_s
        series_s += growth_s * num_memory_bound * (num_memory_bound - 1) / 2
        return num_compute_bound * compute_s + series_s + num_steps * self.step_overhead_s

    def prefill_seconds(self, prompt_length: int) -> float:
        """Return the time until a prompt is in the KV cache."""
        # Only the last position samples a token, and has logits.
        return float(self.prefill.of([prompt_length], [1])[0]) / self.flops_per_s


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How a replica forms its batch."""

    max_running: int
    """Rows that a replica decodes together."""
    is_static: bool = False
    """Rows join only when all rows before them have ended."""
    shares_prefix: bool = True
    """A prompt is computed once per replica for all its completions."""

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running is {self.max_running}; it must be at least 1")


@dataclass(frozen=True, eq=False)
class RolloutTime:
    """Simulated times of one rollout on R replicas."""

    seconds: float
    """Until the last row has ended."""
    busy_s: np.ndarray
    """float64 [R]: time until each replica has ended its last row."""
    num_tokens: np.ndarray
    """int64 [R]: tokens that each replica has decoded."""
    num_steps: np.ndarray
    """int64 [R]: decode steps of each replica."""

    @property
    def idle_share(self) -> float:
        """Share of the replicas' time after their last row."""
        if self.seconds == 0:
            return 0.0
        return 1.0 - float(self.busy_s.sum()) / (len(self.busy_s) * self.seconds)

    def with_idle(self, num_replicas: int) -> RolloutTime:
        """Return the same times with further replicas that decode nothing."""
        num_idle = num_replicas - len(self.busy_s)
        return RolloutTime(
            self.seconds,
            np.pad(self.busy_s, (0, num_idle)),
            np.pad(self.num_tokens, (0, num_idle)),
            np.pad(self.num_steps, (0, num_idle)),
        )


def rollout_times(
    prompt_lengths: np.ndarray,
    completion_lengths: np.ndarray,
    replica_counts: Sequence[int],
    decode: DecodeModel,
    batching: Batching,
    groups: np.ndarray | None = None,
) -> list[RolloutTime]:
    """Return the simulated time for each number of replicas, in the order of `replica_counts`.

    Where fewer of the given numbers of replicas are faster, because their assignment of rows is a
    better one, that assignment is used, and the others are idle. More replicas are therefore never
    slower. The other arguments are as in `simulate_rollout`.
    """
    best_of: dict[int, RolloutTime] = {}
    best: RolloutTime | None = None
    for count in sorted(set(replica_counts)):
        found = simulate_rollout(
            prompt_lengths, completion_lengths, count, decode, batching, groups
        )
        if best is None or found.seconds < best.seconds:
            best = found
        best_of[count] = best.with_idle(count)
    return [best_of[count] for count in replica_counts]


def simulate_rollout(
    prompt_lengths: np.ndarray,
    completion_lengths: np.ndarray,
    num_replicas: int,
    decode: DecodeModel,
    batching: Batching,
    groups: np.ndarray | None = None,
) -> RolloutTime:
    """Simulate a rollout of B rows, which all wait at the start, in their order.

    A row goes to the replica with the fewest running rows; if none has room, to the first one on
    which a row ends. `prompt_lengths`, `completion_lengths` (at least 1) and `groups`, equal for
    rows of one prompt, are int [B]. Raises ValueError for no rows, lengths below 1 or no replica.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}; it must be at least 1")
    if len(completion_lengths) == 0 or np.min(completion_lengths) < 1:
        raise ValueError("a rollout needs at least one row, and completions of at least one token")
    if groups is None:
        groups = np.arange(len(completion_lengths))
    rows = zip(
        np.asarray(prompt_lengths).tolist(),
        np.asarray(completion_lengths).tolist(),
        np.asarray(groups).tolist(),
        strict=True,
    )
    queue = deque(_Row(*row) for row in rows)
    replicas = [_Replica(decode, batching) for _ in range(num_replicas)]
    for _ in range(batching.max_running):
        for replica in replicas:
            if queue:
                replica.admit(queue.popleft())
    # While rows wait, every replica is full, so the next row goes where one ends.
    events = []
    for index, replica in enumerate(replicas):
        if replica.running:
            heapq.heappush(events, (replica.next_end_s(), index))
    while events:
        _, index = heapq.heappop(events)
        replica = replicas[index]
        replica.decode_until_end()
        while queue and replica.has_room():
            replica.admit(queue.popleft())
        if replica.running:
            heapq.heappush(events, (replica.next_end_s(), index))
    busy_s = np.array([replica.seconds for replica in replicas])
    return RolloutTime(
        float(busy_s.max()),
        busy_s,
        np.array([replica.num_tokens for replica in replicas], dtype=np.int64),
        np.array([replica.num_steps for replica in replicas], dtype=np.int64),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    prompt_length: int
    completion_length: int
    group: int


@dataclass
class _Replica:
    """The state of one replica after `num_steps` decode steps."""

    decode: DecodeModel
    batching: Batching
    seconds: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0
    context_tokens: int = 0
    """Positions in the KV cache of all running rows."""
    running: list[tuple[int, int]] = field(default_factory=list)
    """Heap of (decode step after which the row ends, its positions at the end)."""
    is_filling: bool = True
    """A static batch takes rows until it is full, and then none until all have ended."""
    known_groups: set[int] = field(default_factory=set)

    def has_room(self) -> bool:
        """Return True if a row may join now."""
        if self.batching.is_static:
            self.is_filling = self.is_filling or not self.running
        return self.is_filling and len(self.running) < self.batching.max_running

    def admit(self, row: _Row) -> None:
        """Compute the prompt and add the row to the batch."""
        is_cached = self.batching.shares_prefix and row.group in self.known_groups
        if not is_cached:
            self.seconds += self.decode.prefill_seconds(row.prompt_length)
            self.known_groups.add(row.group)
        num_positions = row.prompt_length + row.completion_length
        heapq.heappush(self.running, (self.num_steps + row.completion_length, num_positions))
        self.context_tokens += row.prompt_length

    def next_end_s(self) -> float:
        """Return the time at which the next row ends if none joins before."""
        return self.seconds + self._seconds_to_end()

    def decode_until_end(self) -> None:
        """Decode until the next row ends, and remove all rows that end then."""
        self.seconds += self._seconds_to_end()
        last_step = self.running[0][0]
        num_new = len(self.running) * (last_step - self.num_steps)
        self.num_tokens += num_new
        self.context_tokens += num_new
        self.num_steps = last_step
        while self.running and self.running[0][0] == last_step:
            _, num_positions = heapq.heappop(self.running)
            self.context_tokens -= num_positions
        if self.batching.is_static:
            self.is_filling = not self.running

    def _seconds_to_end(self) -> float:
        num_steps = self.running[0][0] - self.num_steps
        return self.decode.decode_seconds(len(self.running), self.context_tokens, num_steps)
