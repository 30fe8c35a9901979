"""Steps of equal size on all ranks, where each rank sees only the rows of its own shard.

Each rank forms the microbatches of a step from its own window. One all-gather of `_NUM_VALUES`
integers per step tells every rank how many microbatches, rows and trained tokens the others have:

* no rank has more than `microbatches_per_step` microbatches: further rows are deferred, they stay
  in its window;
* the step has as many microbatches as the rank with the most. Ranks with fewer, whose shards end,
  split theirs; a rank with fewer rows than microbatches runs dummies with zero loss;
* a rank that is ahead in its shard, because its rows are shorter, takes fewer rows per step, so
  that all shards end together. Otherwise it would run dummies while the others train their rest;
* the sum of trained tokens is the denominator of the loss on every rank;
* the stream ends in the step in which no rank has a row. With `join=False` it ends in the first
  step that some rank cannot fill.

All ranks compute the end and the number of microbatches from the same integers, so all take part in
the same number of exchanges and no rank waits for another at the end. In each step a rank that has
rows left emits at least one, so there are at most as many exchanges as rows of the largest shard,
plus one.

This assumes that every rank pushes rows while `needs_rows` and then calls `next_step` until it
returns None, that a rank that cannot go on calls `fail`, that shards are finite, and that a
collective that all ranks entered completes. A process that dies is not covered. Then:

* Every rank reaches the exchange: each iteration of reading pushes a row or closes a finite shard,
  and forming a microbatch removes at least the oldest row from the window.
* All ranks decide alike: the end and the number N of microbatches are functions of the gathered
  values and of settings, whose checksum is gathered too. Ranks with other settings, or at another
  step, raise AlignmentError together.
* Equal counts: a rank has b <= N microbatches with k >= b rows. Splitting gives min(N, k), dummies
  the rest. A part has fewer rows and no longer ones, so it is within every limit.
* Coverage: a row is in the window, in the current step, in a returned step, or dropped, and moves
  in this order only. With `join=True` and `tail="emit"` the stream ends when no rank has a
  microbatch, so every shard has ended and every window is empty: each row is in exactly one step.
* Bounded termination: a rank with rows left emits at least one in each round. Without `join` a step
  takes at least `microbatches_per_step` rows from each rank.
* No deadlock: ranks wait in the exchange only and end in the same round. A rank that calls `fail`
  arrives with its flag, and all ranks raise AlignmentError in that round.
* Bounded wait: each microbatch has the oldest row of its window, so a row that arrives after k
  waiting rows is in one of the next k + 1 microbatches of its rank, or of the next k + 1 steps if
  rows are deferred.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from nemo_like.data.streaming.former import Bin, MicrobatchFormer, positions, split_bins
from nemo_like.data.streaming.planner import PlannedStep, planned_step
from nemo_like.data.streaming.selection import WaitingRow, Window
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import round_up

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

_NUM_VALUES = 8
"""Integers of one rank in an exchange: see `AlignedPlanner.proposal`."""

_MIN_LEAD = 0.7
"""A rank defers rows if it needs less than this share of the steps of the slowest rank. Smaller
differences are chance: to even them out would make every step as small as the step of the rank
that happens to have the longest rows.
"""
_LEAD = 0.95
"""Share of the steps of the slowest rank over which such a rank distributes its rows. The rest is
for the error of the estimate, as the slowest rank must not wait.
"""


class AlignmentError(RuntimeError):
    """The ranks have no common step: one reported an error, or they differ in step or settings."""


class Coordinator(Protocol):
    """Exchanges a few integers between the ranks of a group."""

    @property
    def rank(self) -> int:
        """Rank of this process in the group."""
        ...

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        ...

    def all_gather(self, values: Sequence[int]) -> np.ndarray:
        """Return the values of all ranks, int64 [num_ranks, len(values)]. Every rank calls it."""
        ...


class SingleCoordinator:
    """A group of one rank."""

    rank = 0
    num_ranks = 1

    def all_gather(self, values: Sequence[int]) -> np.ndarray:
        """Return the values, int64 [1, len(values)]."""
        return np.array([values], dtype=np.int64)


class ProcessGroupCoordinator:
    """A `torch.distributed` group. The backend must support the device: gloo, or NCCL on CUDA."""

    def __init__(
        self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Use `group`, or the default group. Raises ValueError without an initialized group."""
        import torch.distributed as dist

        # Without the check a spawned process would run unaligned, and hang its peers later.
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialized in this process, so ranks cannot be aligned;"
                " call torch.distributed.init_process_group, or use SingleCoordinator for one rank"
            )
        self._group = group
        self._device = device
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ValueError(
                "this process is not in the group, so its rows cannot be aligned; pass a group"
                " that contains it"
            )
        self.num_ranks = dist.get_world_size(group)

    def all_gather(self, values: Sequence[int]) -> np.ndarray:
        """Return the values of all ranks, int64 [num_ranks, len(values)], with one collective."""
        import torch
        import torch.distributed as dist

        own = torch.tensor(values, dtype=torch.int64, device=self._device)
        gathered = torch.empty(self.num_ranks * len(values), dtype=torch.int64, device=self._device)
        # torch 2.13 renamed the collective and warns of the old name.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, own, group=self._group)
        return gathered.cpu().numpy().reshape(self.num_ranks, len(values))


@dataclass(frozen=True)
class AlignedStep:
    """A step of this rank, with what the loss and the logs need from the others."""

    own: PlannedStep
    """Rows and plan of this rank; a plan of one rank. `num_trained` counts all ranks."""
    num_rows: int
    """Rows of all ranks."""
    num_dummies: int
    """Dummy microbatches of all ranks."""
    position_imbalance: float
    """Positions of the max-loaded rank over the mean rank, without dummies and as they were before
    microbatches were split.
    """

    def metrics(self) -> dict[str, float]:
        """Return the metrics of this rank's plan and of the group."""
        return {
            **self.own.metrics(),
            "packing/num_rows": float(self.num_rows),
            "packing/num_dummies": float(self.num_dummies),
            "packing/rank_imbalance_tokens": self.position_imbalance,
        }


class AlignedPlanner(MicrobatchFormer):
    """Plans the steps of this rank; the number of microbatches is the same on all ranks.

    `spec.plan.num_ranks` is 1: the spec describes one rank.
    """

    def __init__(self, spec: StreamSpec, coordinator: Coordinator, *, join: bool = True) -> None:
        """Align with the ranks of `coordinator`.

        With `join` every row of every shard is in one step. Without it the stream ends when the
        first rank cannot fill a step, and the other ranks count their remaining rows as dropped.
        """
        if spec.plan.num_ranks != 1:
            raise ValueError(
                f"an aligned planner plans the rows of one rank: plan.num_ranks must be 1, got"
                f" {spec.plan.num_ranks}"
            )
        super().__init__(spec, spec.microbatches_per_step)
        self.join = join
        self.is_finished = False
        """True after `next_step` returned None, on all ranks."""
        self.shard_rows: int | None = None
        """Rows of this rank's shard until the next `clear`; None if it is not known."""
        self.source: tuple[int, ...] = ()
        """What tells the rows that the ranks divide: their number, the contents of a few, and the
        seed of their order.
        """
        self._num_before = 0
        """Rows pushed before the last `clear`."""
        self._num_pushed_tokens = 0
        """Lengths of the rows pushed since the last `clear`."""
        self._num_formed_tokens = 0
        """Lengths of the rows of all steps since then, as they were formed."""
        self._num_formed_steps = 0
        self._step_tokens = 0
        """Lengths of the rows of the current step, as it was formed."""
        self._max_steps_left: float | None = None
        """Estimated steps of the rank that needs most of them for the rest of its shard; None if
        that is this rank, or not known.
        """
        self._failure: str | None = None
        self._coordinator = coordinator

    @property
    def needs_rows(self) -> bool:
        """True while rows must be pushed (or the stream closed) before `next_step`."""
        if self.is_finished or self._failure is not None:
            return False
        return not self.form() and not self.is_closed

    def reopen(self) -> None:
        """Continue after the last step, for example with the next epoch. Every rank must call it.

        Raises ValueError before the last step: the ranks end together.
        """
        if not self.is_finished:
            raise ValueError("the stream has not ended on all ranks; call `next_step` until None")
        self.is_finished = False
        super().reopen()

    def next_step(self) -> AlignedStep | None:
        """Return the next step; None after the last one. Every rank must call it.

        Raises ValueError if rows are missing (`needs_rows`). Raises AlignmentError, on all ranks,
        if a rank called `fail`, or if the ranks differ in their number of steps or settings.
        """
        if self._failure is not None:
            # The others take part in no further exchange.
            raise AlignmentError(self._failure)
        if self.is_finished:
            return None
        return self.resolve(self._coordinator.all_gather(self.proposal()))

    def proposal(self) -> list[int]:
        """Return what this rank has for the next step, the values that the ranks exchange.

        Microbatches, rows, trained tokens, positions, estimated thousandths of steps for the rest
        of the shard (-1 if not known), number of steps, a checksum of the settings that all ranks
        must share, and 1 for a failure. Raises ValueError if rows are missing.
        """
        if self.needs_rows:
            raise ValueError("the step is incomplete: push rows while `needs_rows`, or close")
        self._defer_rows_ahead()
        rows = [row for rows in self.bins for row in rows]
        return [
            len(self.bins),
            len(rows),
            sum(row.num_trained for row in rows),
            sum(positions(rows, self.spec.plan.layout) for rows in self.bins),
            self._steps_left(),
            self.num_steps,
            self._settings_checksum(),
            0,
        ]

    def resolve(self, ranks: np.ndarray) -> AlignedStep | None:
        """Return the step that follows from the proposals of all ranks, int64 [R, _NUM_VALUES].

        None if there is no further step. Raises AlignmentError like `next_step`.
        """
        self._failure = _failure_of(ranks)
        if self._failure is not None:
            raise AlignmentError(self._failure)
        # Lists: for few ranks the operations of arrays take longer.
        num_bins, num_rows, num_trained, num_positions, steps_left = ranks[:, :5].T.tolist()
        if self._is_end(num_bins):
            self.drop_rest()
            self.is_finished = True
            # Without `join` the shard may have more rows; they must not be pushed and lost.
            self.close()
            return None
        self._follow_slowest(steps_left)
        num_microbatches = round_up(max(num_bins), self.spec.plan.microbatch_multiple)
        bins = split_bins(self.take_step(), num_microbatches, self.spec.plan.layout)
        own = planned_step(
            bins,
            self.spec.step_spec,
            self,
            num_microbatches=num_microbatches,
            num_trained=sum(num_trained),
        )
        # A step has a row on some rank, so the mean is positive.
        position_imbalance = max(num_positions) * len(num_positions) / sum(num_positions)
        return AlignedStep(
            own=own,
            num_rows=sum(num_rows),
            # A rank with fewer rows than microbatches has one row in each, and dummies.
            num_dummies=sum(max(num_microbatches - rows, 0) for rows in num_rows),
            position_imbalance=position_imbalance,
        )

    def fail(self) -> None:
        """Take part in the exchange of the next step with a report of an error.

        Call it where `next_step` cannot be called, so that the other ranks raise AlignmentError
        instead of waiting. Without effect after the last step and after an AlignmentError, when no
        rank waits.
        """
        if self.is_finished or self._failure is not None:
            return
        self._failure = "this rank reported an error, so it has no further step"
        self._coordinator.all_gather([0] * (_NUM_VALUES - 1) + [1])

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values of this rank."""
        return {
            **super().state_dict(),
            "rank": self._coordinator.rank,
            "num_ranks": self._coordinator.num_ranks,
            "is_finished": self.is_finished,
            "num_before": self._num_before,
            "num_pushed_tokens": self._num_pushed_tokens,
            "num_formed_tokens": self._num_formed_tokens,
            "num_formed_steps": self._num_formed_steps,
            "max_steps_left": self._max_steps_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of this rank.

        Raises ValueError for a state of another version, rank or number of ranks.
        """
        for name in ("rank", "num_ranks"):
            if state.get(name) != getattr(self._coordinator, name):
                raise ValueError(
                    f"the state belongs to {name}={state.get(name)}, this is {name}="
                    f"{getattr(self._coordinator, name)}; for another number of ranks pass the"
                    " states of all ranks to `load_global_state`"
                )
        super().load_state_dict(state)
        self.is_finished = bool(state["is_finished"])
        self._num_before = int(state["num_before"])
        self._num_pushed_tokens = int(state["num_pushed_tokens"])
        self._num_formed_tokens = int(state["num_formed_tokens"])
        self._num_formed_steps = int(state["num_formed_steps"])
        self._max_steps_left = state["max_steps_left"]
        self._failure = None

    def load_global_state(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue after the steps of a group of any size, from the states of all its ranks.

        The window is empty: the rows that waited must be pushed again. Give `waiting_rows` of each
        state, in the order of the ranks, as `untrained` to `ShardedOrder.load_global_state`. Counts
        of rows start at 0. Raises ValueError unless the states are from all ranks at one step.
        """
        ranks = sorted(int(state["rank"]) for state in states)
        if not states or ranks != list(range(states[0]["num_ranks"])):
            raise ValueError(
                f"the states of the ranks {ranks} were given; one state of each rank of a group is"
                " needed"
            )
        positions_in_stream = {(state["num_steps"], state["is_finished"]) for state in states}
        if len(positions_in_stream) > 1:
            raise ValueError(
                "the states are from different steps"
                f" {[state['num_steps'] for state in states]}; pass the states of one checkpoint"
            )
        self.restart(int(states[0]["num_steps"]))
        self._num_before = 0
        self.is_finished = bool(states[0]["is_finished"])

    def clear(self) -> None:
        """Remove the waiting rows, and forget the end of the stream or a failure."""
        super().clear()
        self.is_closed = False
        self.is_finished = False
        self._num_before = self.counts.num_pushed
        self._num_pushed_tokens = 0
        self._num_formed_tokens = 0
        self._num_formed_steps = 0
        self._max_steps_left = None
        self._failure = None

    def push(
        self,
        row: int,
        length: int,
        num_trained: int | None = None,
        extra: int = 0,
        images: tuple[int, int] = (0, 0),
    ) -> bool:
        """Add a row of this rank's shard; see `MicrobatchFormer.push`."""
        is_kept = super().push(row, length, num_trained, extra, images)
        self._num_pushed_tokens += length
        return is_kept

    def _steps_left(self) -> int:
        """Return the estimated thousandths of steps for the rows after the current step.

        The estimate is from the mean length of the rows seen and the mean tokens of full steps.
        """
        if self.shard_rows is None or self._ends_incomplete:
            return -1
        num_pushed = self.counts.num_pushed - self._num_before
        row_tokens = self._num_pushed_tokens / max(num_pushed, 1)
        num_tokens = max(self.shard_rows - num_pushed, 0) * row_tokens + self.window.num_tokens
        formed = self._num_formed_tokens + self._step_tokens
        step_tokens = formed / (self._num_formed_steps + 1)
        return math.ceil(1000 * num_tokens / max(step_tokens, 1))

    def _defer_rows_ahead(self) -> None:
        """Return rows to the window, as its oldest ones, if this rank would end before the others.

        At least one row is kept, and as many as are necessary to end with the others.
        """
        num_rows = sum(map(len, self.bins))
        self._step_tokens = sum(row.length for rows in self.bins for row in rows)
        if self._max_steps_left is None or self.shard_rows is None or num_rows == 0:
            return
        num_pushed = self.counts.num_pushed - self._num_before
        num_left = max(self.shard_rows - num_pushed, 0) + len(self.window) + num_rows
        num_kept = math.ceil(num_left / max(_LEAD * self._max_steps_left, 1.0))
        if num_kept >= num_rows:
            return
        kept: list[Bin] = []
        deferred: list[WaitingRow] = []
        for rows in self.bins:
            room = num_kept - sum(map(len, kept))
            if room > 0:
                kept.append(rows[:room])
            deferred += rows[max(room, 0) :]
        self.bins = kept
        self.window = Window([*deferred, *self.window])

    def _follow_slowest(self, steps_left: list[int]) -> None:
        """Set how many steps the rows of this rank must last, from the estimates of all ranks."""
        self._num_formed_tokens += self._step_tokens
        self._num_formed_steps += 1
        own = steps_left[self._coordinator.rank]
        self._max_steps_left = None
        if min(steps_left) >= 0 and own < _MIN_LEAD * max(steps_left):
            self._max_steps_left = max(steps_left) / 1000

    def _settings_checksum(self) -> int:
        """Return a checksum of the settings from which ranks compute the size of a step."""
        settings = (
            self.spec.microbatches_per_step,
            self.spec.plan.microbatch_multiple,
            self._ends_incomplete,
            self.source,
        )
        return zlib.crc32(repr(settings).encode())

    @property
    def _ends_incomplete(self) -> bool:
        """True if the stream ends in the first step that some rank cannot fill."""
        return not self.join or self.spec.tail == "drop"

    def _is_end(self, num_bins: list[int]) -> bool:
        """Return True if there is no further step; `num_bins` are the microbatches of all ranks."""
        if self._ends_incomplete:
            return min(num_bins) < self.spec.microbatches_per_step
        return not any(num_bins)


def waiting_rows(state: Mapping[str, Any]) -> list[int]:
    """Return the ids of the rows that wait in the state of a planner, the oldest first."""
    return [int(row[0]) for row in chain(*state["bins"], state["window"])]


def _failure_of(ranks: np.ndarray) -> str | None:
    """Return why the ranks have no common step, or None; `ranks` int64 [R, _NUM_VALUES]."""
    failed = [rank for rank, value in enumerate(ranks[:, -1].tolist()) if value]
    if failed:
        names = ", ".join(map(str, failed))
        return f"rank {names} could not form its step; its own error message has the cause"
    steps = ranks[:, 5].tolist()
    if len(set(steps)) > 1:
        return (
            f"the ranks are at different steps {steps}; resume all of them from the same checkpoint"
        )
    if len(set(ranks[:, 6].tolist())) > 1:
        return (
            "the ranks have different settings; microbatches_per_step, microbatch_multiple, join"
            " and tail must be the same on all ranks, and so must a map-style dataset, of which"
            " each rank takes its part (number and contents of the rows, seed, shuffle): give every"
            " rank the complete dataset, or an IterableDataset of its own rows"
        )
    return None
