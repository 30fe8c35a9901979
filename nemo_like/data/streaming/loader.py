"""Planned steps of encoded rows, epoch after epoch, with exact resume.

The rows of a step are chosen by a `StreamingPlanner` from a window of the rows in visiting order.
Only numbers are kept in the window; the row source keeps the encoded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.loader import BatchLoader, FetchableRows, Out
from nemo_like.data.row_order import Curriculum, Mixture
from nemo_like.data.streaming.planner import PlannedStep, StreamingPlanner
from nemo_like.data.streaming.spec import StreamSpec

_MAX_PUSHED = 64
"""Rows that are fetched from the source at once."""


class RowNumbers(NamedTuple):
    """What the planner needs of a row."""

    length: int
    num_trained: int


class StreamLoader(BatchLoader[Out]):
    """The rows of planned steps. Row i of the last step's plan is row i of the returned list.

    Each epoch visits each row once. With `tail="emit"` and `"drop"` the window is emptied at the
    end of an epoch; with `"wrap"` rows of the next epoch follow, and a row is never twice in the
    window.
    """

    def __init__(
        self,
        rows: FetchableRows[Out],
        spec: StreamSpec,
        numbers_of: Callable[[Out], RowNumbers],
        *,
        num_epochs: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Visit `rows` for `num_epochs` epochs, by default without end.

        Raises ValueError for no rows, and for `tail="wrap"` with a number of epochs.
        """
        if spec.tail == "wrap" and num_epochs is not None:
            raise ValueError("tail is wrap, so epochs have no end: num_epochs must be None")
        super().__init__(rows, seed=seed, shuffle=shuffle, curriculum=curriculum, mixture=mixture)
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
        return self.num_left(is_kept) if is_dropped else 0

    def num_left(self, is_kept: np.ndarray) -> int:
        """Count the rows of this epoch that no step has yet; `is_kept` bool [N] as above."""
        if self._num_epochs is not None and self.epoch >= self._num_epochs:
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
        return int(self.order.left[0]) in self._planner.in_window

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
