"""The streaming planner: lengths of rows in, one `BatchPlan` per optimizer step out.

It needs the lengths of a bounded window of rows only, so it works where lengths are known only
after preprocessing. Every row is in exactly one step, or counted by the policy that left it out.
`StreamLoader` gives the encoded rows of the steps to a run, epoch after epoch, with exact resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.loader import BatchLoader, FetchableRows, Out
from nemo_like.data.packing.packers import Packing
from nemo_like.data.planning.oversize import FittedRows
from nemo_like.data.planning.plan import BatchPlan, join_steps
from nemo_like.data.planning.plan_step import on_ranks
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.data.row_order import RowOrder
from nemo_like.data.streaming.former import Bin, MicrobatchFormer, split_bins
from nemo_like.data.streaming.spec import StreamSpec
from nemo_like.integer_math import round_up

_MAX_PUSHED = 64
"""Rows that are fetched from the source at once."""


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """One optimizer step of a stream."""

    step: int
    """Number of steps before it."""
    rows: tuple[int, ...]
    """Ids of its rows. Row i of `plan` is `rows[i]`."""
    plan: BatchPlan
    num_trained: int
    """Tokens with loss over all ranks: the denominator of a token-mean loss."""
    num_deferred: int
    """Rows that wait for a later step."""
    max_wait: int
    """Maximum number of steps that a row of this step waited."""
    num_dropped: int
    """Rows dropped since the previous step."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the plan and of the window."""
        return self.plan.metrics() | self.window_metrics()

    def window_metrics(self) -> dict[str, float]:
        """Return the metrics of the window from which the rows were chosen."""
        return {
            "packing/num_rows": float(len(self.rows)),
            "packing/num_deferred": float(self.num_deferred),
            "packing/num_dropped": float(self.num_dropped),
            "packing/max_wait_steps": float(self.max_wait),
        }


class StreamingPlanner(MicrobatchFormer):
    """Plans the steps of all ranks from one stream of rows.

    Example: packed microbatches of 8 tokens, one per step, from a window of 2 rows. After
    `push(0, 5)`, `next_step()` is None because the window is not full; after `push(1, 3)` it is a
    step with the rows 0 and 1.

    A state can also be continued with another number of ranks; the ids of rows must mean the same
    rows.
    """

    def __init__(self, spec: StreamSpec) -> None:
        super().__init__(spec, spec.num_bins)

    def next_step(self) -> PlannedStep | None:
        """Return the next step; None if more rows are needed or the stream ended."""
        if self.form():
            bins = self.take_step()
        elif not self.is_closed or not self.bins:
            return None
        elif self.spec.tail == "drop":
            self.drop_rest()
            return None
        else:
            # Split microbatches are better than dummies: every rank then has rows.
            bins = self.take_step()
            num_bins = round_up(len(bins), self.spec.plan.bins_multiple)
            bins = split_bins(bins, num_bins, self.spec.plan.layout)
        return planned_step(bins, self.spec.step_spec, self)


def planned_step(
    bins: list[Bin],
    spec: PlanSpec,
    former: MicrobatchFormer,
    *,
    num_microbatches: int = 0,
    num_trained: int | None = None,
) -> PlannedStep:
    """Return the step of `bins`, which `former` has just emitted.

    Each rank runs at least `num_microbatches`. `num_trained` are the tokens with loss over all
    ranks; None if `bins` has the rows of all ranks.
    """
    rows = list(chain.from_iterable(bins))
    offsets = np.array([0, *accumulate(map(len, bins))], dtype=np.int64)
    lengths = np.array([row.length for row in rows], dtype=np.int64)
    trained = np.array([row.num_trained for row in rows], dtype=np.int64)
    counts = TokenCounts(lengths, trained)
    if any(row.image_tokens for row in rows):
        images = np.array([(row.image_tokens, row.image_flops) for row in rows], dtype=np.int64)
        work = images[:, 1].astype(np.float64)
        counts = replace(counts, image_tokens=images[:, 0], image_work=work)
    fitted = replace(
        FittedRows.of(counts, spec),
        num_truncated=former.step_counts.num_truncated,
        num_oversize=former.step_counts.num_oversize,
    )
    formed = Packing(np.arange(len(rows)), offsets)
    plan = join_steps(spec, fitted, [on_ranks(formed, fitted, spec, num_microbatches)])
    if num_trained is None:
        num_trained = int(trained.sum())
    step = former.num_steps - 1
    return PlannedStep(
        step=step,
        rows=tuple(row.row for row in rows),
        plan=plan,
        num_trained=num_trained,
        num_deferred=len(former.window),
        max_wait=step - min((row.step for row in rows), default=step),
        num_dropped=former.step_counts.num_dropped,
    )


def stream_steps(
    lengths: np.ndarray,
    planner: StreamingPlanner,
    num_trained: np.ndarray | None = None,
    images: np.ndarray | None = None,
) -> Iterator[PlannedStep]:
    """Push rows with ids 0 to B - 1, then close; yield every step.

    `lengths` and `num_trained`, their tokens with loss, are int64 [B]; `images` are the tokens of
    their images and the FLOPs of the vision tower for them, int64 [B, 2].
    """
    if images is None:
        images = np.zeros((len(lengths), 2), dtype=np.int64)
    for row, (length, (tokens, flops)) in enumerate(
        zip(lengths.tolist(), images.tolist(), strict=True)
    ):
        trained = None if num_trained is None else int(num_trained[row])
        planner.push(row, length, trained, images=(tokens, flops))
        while (step := planner.next_step()) is not None:
            yield step
    planner.close()
    while (step := planner.next_step()) is not None:
        yield step


def plan_stream(
    lengths: np.ndarray,
    spec: StreamSpec,
    num_trained: np.ndarray | None = None,
    images: np.ndarray | None = None,
) -> BatchPlan:
    """Plan rows of `lengths` int64 [B] in this order as one epoch of a stream.

    `num_trained` int64 [B] are their tokens with loss; None: all but the first of a row. `images`
    int64 [B, 2] are the tokens and FLOPs of their images.
    The plan has one optimizer step for each step of the stream. Rows that the oversize policy or
    `tail="drop"` leaves out are `dropped`. Raises ValueError for a row above the token limit under
    `oversize="error"`, and if no step can be formed.
    """
    planner = StreamingPlanner(spec)
    is_dropped = np.ones(len(lengths), dtype=bool)
    kept_lengths = lengths.copy()
    kept_trained = lengths.copy()
    steps = []
    for step in stream_steps(lengths, planner, num_trained, images):
        plan = step.plan
        rows = np.asarray(step.rows, dtype=np.int64)[plan.rows]
        is_dropped[rows] = False
        kept_lengths[rows] = plan.lengths
        kept_trained[rows] = plan.num_trained
        steps.append(Packing(rows, plan.offsets))
    if not steps:
        raise ValueError(
            f"the {len(lengths)} rows do not fill one step of {spec.num_bins} microbatches, and"
            f" tail is {spec.tail}; give more rows, or set tail to emit"
        )
    counts = planner.counts
    kept = TokenCounts(kept_lengths, kept_trained)
    if images is not None:
        kept = replace(kept, image_tokens=images[:, 0], image_work=images[:, 1].astype(np.float64))
    fitted = replace(
        FittedRows.of(kept, spec.plan),
        is_dropped=is_dropped,
        num_truncated=counts.num_truncated,
        num_oversize=counts.num_oversize,
    )
    return join_steps(spec.step_spec, fitted, steps)


class RowNumbers(NamedTuple):
    """What the planner needs of a row."""

    length: int
    num_trained: int
    extra: int = 0
    images: tuple[int, int] = (0, 0)
    """Tokens of its images, and FLOPs of the vision tower for them."""


class StreamLoader(BatchLoader[Out]):
    """The rows of planned steps. Row i of the last step's plan is row i of the returned list.

    Only numbers are kept in the window; the row source keeps the encoded rows.

    Each epoch visits each row once. With `tail="emit"` and `"drop"` the window is emptied at the
    end of an epoch; with `"wrap"` rows of the next epoch follow, and a row is never twice in the
    window.
    """

    def __init__(
        self,
        rows: FetchableRows[Out],
        order: RowOrder,
        spec: StreamSpec,
        numbers_of: Callable[[Out], RowNumbers],
        *,
        num_epochs: int | None = None,
    ) -> None:
        """Visit `rows` in `order` for `num_epochs` epochs, by default without end.

        Raises ValueError for `tail="wrap"` with a number of epochs.
        """
        if spec.tail == "wrap" and num_epochs is not None:
            raise ValueError("tail is wrap, so epochs have no end: num_epochs must be None")
        super().__init__(rows, order)
        self.spec = spec
        self._numbers_of = numbers_of
        self._num_epochs = num_epochs
        self._planner = StreamingPlanner(spec)
        self._planned: PlannedStep | None = None

    @property
    def planned(self) -> PlannedStep:
        """The step whose rows were returned last."""
        assert self._planned is not None, "the loader has returned a step"
        return self._planned

    def __next__(self) -> list[Out]:
        """Return the rows of the next step. Raises StopIteration after the last one."""
        # Copies are the simplest way back after an error.
        before = self.order.copy(), self._planner.copy()
        try:
            self.num_dropped = 0
            step = self._next_step()
            if step is None:
                raise StopIteration
            rows = self.rows.fetch(step.rows)
        except BaseException:
            self.order, self._planner = before
            raise
        self._planned = step
        self.plan = step.plan
        self.batch_rows = step.rows
        assert all(row is not None for row in rows), "dropped rows are not pushed"
        return rows  # pyright: ignore[reportReturnType]

    def is_finished(self, is_kept: np.ndarray | None = None) -> bool:
        """Return True if no step follows; see `BatchLoader`.

        A stream that had no step is not finished: if its epochs give none, `next` raises the error.
        """
        if self._num_epochs is None or self._planner.num_steps == 0:
            return False
        if self.epoch >= self._num_epochs:
            return True
        if self.epoch + 1 < self._num_epochs:
            return False
        left = self.order.left
        if is_kept is not None:
            left = left[is_kept[left]]
        if self.spec.tail == "drop":
            return self._is_rest_dropped(left)
        return len(left) == 0 and self._planner.num_waiting == 0

    def batch_metrics(self) -> dict[str, float]:
        """Return the metrics of the window from which the rows of the last step were chosen."""
        return self.planned.window_metrics()

    def num_left_out(self, is_kept: np.ndarray) -> int:
        """Count the rows that `tail="drop"` leaves out of the last epoch; 0 before its last step.

        Those of earlier epochs are in the metric `packing/num_dropped` of the steps that follow.
        """
        is_dropped = self.spec.tail == "drop" and self.is_finished(is_kept)
        if not is_dropped or self.epoch == self._num_epochs:
            return 0
        return int(is_kept[self.order.left].sum()) + self._planner.num_waiting

    def _is_rest_dropped(self, left: np.ndarray) -> bool:
        """Return True if the waiting rows and the rows `left` int64 [n] do not fill a step."""
        trial = self._planner.copy()
        for start in range(0, len(left), _MAX_PUSHED):
            indices = left[start : start + _MAX_PUSHED].tolist()
            for index, row in zip(indices, self.rows.fetch(indices), strict=True):
                if row is not None:
                    trial.push(index, *self._numbers_of(row))
            if trial.next_step() is not None:
                return False
        trial.close()
        return trial.next_step() is None

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values: the position in the order, and the rows that wait."""
        return {"order": self.order.state_dict(), "planner": self._planner.state_dict()}

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the last step of `state`, also with another number of ranks.

        If rows changed, the epoch begins again: the rows that waited for their step may be others.
        See `RowOrder.load_state_dict`.
        """
        if "planner" not in state:
            raise ConfigError(
                "resume: the checkpoint was written with data.batching.kind=fixed, this run has"
                " another kind; resume with fixed, or start a new run"
            )
        is_same = self.order.load_state_dict(state["order"], allow_changed_rows=allow_changed_rows)
        self._planner = StreamingPlanner(self.spec)
        if not is_same:
            self.order.start_epoch(self.epoch)
            return False
        try:
            self._planner.load_state_dict(state["planner"])
        except ValueError as error:
            raise ConfigError(f"resume: {error}") from error
        return True

    def _next_step(self) -> PlannedStep | None:
        """Push rows until a step is complete; None after the last epoch."""
        first_epoch = self.epoch
        while True:
            step = self._planner.next_step()
            if step is not None:
                self._end_epoch_if_done()
                return step
            self._end_epoch_if_done()
            # The first epoch may have begun in the middle, so only a complete second one without a
            # step is an error.
            if self.epoch - first_epoch > 1 and self._planner.num_waiting == 0:
                raise ConfigError(self._no_step_text())
            if self._num_epochs is not None and self.epoch >= self._num_epochs:
                if self._planner.num_steps == 0:
                    raise ConfigError(self._no_step_text())
                return None
            self._push_rows()

    def _end_epoch_if_done(self) -> None:
        """Begin the next epoch if all rows of this one are in steps (or dropped)."""
        if self.order.num_left:
            return
        if self.spec.tail == "wrap":
            self.order.start_epoch()
        elif self._planner.num_waiting == 0:
            self.order.start_epoch()
            self._planner.reopen()

    def _push_rows(self) -> None:
        """Push the next rows of the epoch, or mark its end."""
        if self.order.num_left == 0:
            if self.spec.tail != "wrap":
                self._planner.close()
            return
        if self._must_wait():
            # The row of the last epoch still waits. Both in one microbatch would count it twice.
            self._planner.form_now()
            return
        # One by one, so that no row is taken from the order that the window does not need.
        index = int(self.order.take(1)[0])
        row = self.rows.fetch([index])[0]
        if row is None:
            self.num_dropped += 1
            return
        self._planner.push(index, *self._numbers_of(row))

    def _must_wait(self) -> bool:
        """Return True if the next row is in the window already."""
        # A source may repeat its rows within an epoch, also within a microbatch.
        if self.spec.tail != "wrap" or self.mixture is not None:
            return False
        return int(self.order.left[0]) in self._planner.window.ids

    def _no_step_text(self) -> str:
        if self._planner.counts.num_pushed == 0:
            return (
                "data.train_path: every row is dropped by policy.oversize_rows=drop; raise"
                " policy.max_total_sequence_length"
            )
        return (
            f"the rows of an epoch do not fill the {self.spec.num_bins} microbatches of one step,"
            " and data.batching.tail is drop, so there is nothing to train on; set"
            " data.batching.tail=emit, or lower data.batching.microbatches_per_step"
        )
