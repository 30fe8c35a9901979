"""Shuffled batches of encoded rows, epoch after epoch, with exact resume.

Each epoch visits each row once. Batches do not cross epochs: the last batch of an epoch is short,
or dropped with `last_batch="drop"`. Rows whose encoding is None are dropped and counted; the batch
takes the next row instead.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError, plural
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.row_order import Mixture, RowOrder
from nemo_like.integer_math import ceil_div

Out = TypeVar("Out")
LastBatch = Literal["keep", "drop"]
_SELECTION = "selection"
"""Key of the state of the selector in a position."""
DEFERRED = "deferred"
"""Key of the rows in a position that wait for a later batch; see `data.oversampling`."""

logger = logging.getLogger(__name__)


class FetchableRows(Protocol[Out]):
    """Rows of a file that can be fetched in their encoded form."""

    def __len__(self) -> int: ...

    @property
    def digests(self) -> tuple[str, ...]:
        """Hash of the content of all rows, of each source."""
        ...

    @property
    def num_skipped(self) -> int:
        """Number of bad rows that `data.on_bad_row=skip` left out."""
        ...

    def fetch(self, rows: Sequence[int]) -> list[Out | None]:
        """Return the encoded rows, None for a dropped row. Raises ConfigError for a bad row."""
        ...

    def location(self, row: int) -> str:
        """Return the location of a row. Example: `data/train.jsonl:17`."""
        ...


class Position(Protocol):
    """The position of a loader, in the form that a checkpoint keeps: a loader or a `RowOrder`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...


class RowSelector(Protocol):
    """Decides which visited rows a batch has; its state is part of the position."""

    def choose(
        self, rows: Sequence[int], epoch: int, position: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Decide about the visits of `rows`, the first at `position` of the epoch.

        Returns whether each is taken, bool [n], and with which probability, float64 [n].
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with a state."""
        ...


@dataclass(frozen=True)
class SelectedPosition:
    """A position among rows that a selector chooses from, with the selector's present state."""

    order: RowOrder
    selector: RowSelector

    def state_dict(self) -> dict[str, Any]:
        """See `Position.state_dict`."""
        return {**self.order.state_dict(), _SELECTION: self.selector.state_dict()}


class BatchLoader(ABC, Generic[Out]):
    """Batches of encoded rows with a position that a run saves."""

    plan: BatchPlan | None = None
    """Plan of the last batch, if it was planned when its rows were chosen."""

    def __init__(self, rows: FetchableRows[Out], order: RowOrder) -> None:
        self.rows = rows
        self.order = order
        self.batch_rows: Sequence[int] = ()
        """Indices of the rows of the last batch."""
        self.num_dropped = 0
        """Number of rows dropped for the last batch because their encoding is None."""

    def __len__(self) -> int:
        """Number of rows of the file, dropped ones included."""
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.order.epoch

    @property
    def mixture(self) -> Mixture | None:
        """The sources of the rows, if they are visited by weight."""
        return self.order.mixture

    def __iter__(self) -> Self:
        return self

    @abstractmethod
    def __next__(self) -> list[Out]:
        """Return the next batch.

        Raises ConfigError for a bad row, or if an epoch has no batch. The position is then the same
        as before the call.
        """

    def batch_locations(self) -> list[str]:
        """Return the locations of the rows of the last batch. Example: `data/train.jsonl:17`."""
        return [self.rows.location(row) for row in self.batch_rows]

    def batch_sources(self) -> np.ndarray | None:
        """Return the source of each row of the last batch, int64 [B]; None without a mixture."""
        return None if self.mixture is None else self.mixture.sources_of(self.batch_rows)

    def batch_metrics(self) -> dict[str, float]:
        """Return the metrics of the choice of the last batch; empty for batches of fixed size."""
        return {}

    def first_rows(self, num_rows: int) -> list[Out]:
        """Return the encoded rows of the first `num_rows` of the file, without dropped ones.

        The position does not change.
        """
        encoded = self.rows.fetch(range(min(num_rows, len(self))))
        return [row for row in encoded if row is not None]

    def rows_of_batches(self, num_batches: int | None) -> np.ndarray:
        """Return the rows of the next batches in the order of their first visit, int64 [n].

        They are the rows of one epoch if the number of rows of a batch is not known in advance.
        """
        return self.order.upcoming(len(self))

    def batches_left(self, num_epochs: int, is_kept: np.ndarray) -> int | None:
        """Count the batches to the end of epoch `num_epochs`; None if that is not known.

        `is_kept` bool [N] marks rows that are not dropped.
        """
        return None

    def is_finished(self, is_kept: np.ndarray | None = None) -> bool:
        """Return True if no batch follows; always False for a loader without an end.

        `is_kept` bool [N] marks rows that are not dropped.
        """
        return False

    def num_left_out(self, is_kept: np.ndarray) -> int:
        """Count the rows of the last epoch that no batch has because they fill none.

        0 for batches of fixed size: `nemo-like validate` reports `data.last_batch=drop`.
        """
        return 0

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the last batch of `state`; see `RowOrder.load_state_dict`."""


class RowLoader(BatchLoader[Out]):
    """Endless batches of at most `batch_size` encoded rows, all of one epoch.

    Example: 5 rows in batches of 2, not shuffled: [0, 1] [2, 3] [4] [0, 1] ...; with
    `last_batch="drop"` [0, 1] [2, 3] [0, 1] ...
    """

    def __init__(
        self,
        rows: FetchableRows[Out],
        order: RowOrder,
        *,
        batch_size: int,
        last_batch: LastBatch = "keep",
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"a loader needs a batch size of at least 1, got {batch_size}")
        super().__init__(rows, order)
        self.batch_size = batch_size
        self.last_batch: LastBatch = last_batch
        self.next_size = batch_size
        """Number of rows of the next batch."""
        self.batch_epoch = 0
        """Epoch of the rows of the last batch; `epoch` is the next one after its last batch."""
        self.selector: RowSelector | None = None
        """Leaves rows out before they are encoded; None takes all."""
        self.num_skipped = 0
        """Number of visited rows that the selector left out of the last batch."""
        self.batch_probabilities: list[float] = []
        """With a selector: the probability with which each row of the last batch was taken."""

    def __next__(self) -> list[Out]:
        return self.take(self.next_size)

    @property
    def position(self) -> Position:
        """The position after the last batch, which does not change with further batches."""
        order = self.order.copy()
        return order if self.selector is None else SelectedPosition(order, self.selector)

    def take(self, num_rows: int, *, in_epoch: bool = False) -> list[Out]:
        """Return a batch of at most `num_rows` rows, which may be fewer than `batch_size`.

        With `in_epoch` they are all of this epoch: fewer rows at its end, also none. Raises
        ConfigError as `__next__` does.
        """
        before = self.order.copy()
        try:
            return self._take(num_rows, in_epoch=in_epoch)
        except BaseException:
            self.order = before
            raise

    def _take(self, batch_size: int, *, in_epoch: bool) -> list[Out]:
        """Form the next batch and begin the next epoch if this one has no further batch."""
        first_epoch = self.epoch
        self.num_dropped = 0
        self.num_skipped = 0
        batch: list[Out] = []
        batch_rows: list[int] = []
        self.batch_rows = batch_rows
        self.batch_probabilities = []
        # An epoch without a batch ends a run, so after one that was skipped all rows are taken.
        last_selected = first_epoch if self.selector is None else first_epoch + 1
        while len(batch) < batch_size:
            self.batch_epoch = self.epoch
            taken, probabilities = self._visit(batch_size - len(batch), last_selected)
            rows = self.rows.fetch(taken)
            for index, row, probability in zip(taken, rows, probabilities, strict=True):
                if row is None:
                    self.num_dropped += 1
                else:
                    batch.append(row)
                    batch_rows.append(index)
                    self.batch_probabilities.append(probability)
            is_full = len(batch) == batch_size
            # A rest that does not fill a batch is left out.
            is_rest_dropped = self.last_batch == "drop" and self.order.num_left < self.batch_size
            if self.order.num_left and not (is_full and is_rest_dropped):
                continue
            self.order.start_epoch()
            is_enough = len(batch) >= self.batch_size or self.last_batch == "keep"
            if is_full or in_epoch or (batch and is_enough):
                return batch
            # The first epoch may have begun in the middle, so only a complete second one without a
            # batch is an error.
            if self.epoch - last_selected > 1:
                raise ConfigError(no_batch_text(len(batch), batch_size))
            batch.clear()
            batch_rows.clear()
            self.batch_probabilities.clear()
        return batch

    def _visit(self, num_rows: int, last_selected: int) -> tuple[list[int], list[float]]:
        """Visit `num_rows` rows; return those taken, and their probabilities.

        Rows are selected in the epochs up to `last_selected`.
        """
        position = len(self.order) - self.order.num_left
        rows = self.order.take(num_rows)
        if self.selector is None or self.epoch > last_selected:
            return rows.tolist(), [1.0] * len(rows)
        is_taken, probabilities = self.selector.choose(rows.tolist(), self.epoch, position)
        self.num_skipped += int(len(rows) - is_taken.sum())
        return rows[is_taken].tolist(), probabilities[is_taken].tolist()

    def rows_of_batches(self, num_batches: int | None) -> np.ndarray:
        """Return the rows of the next batches in the order of their first visit, int64 [n]."""
        if num_batches is None:
            return super().rows_of_batches(None)
        return self.order.upcoming(num_batches * self.batch_size)

    def batches_left(self, num_epochs: int, is_kept: np.ndarray) -> int:
        """Count the batches to the end of epoch `num_epochs`; see `BatchLoader`."""
        count = 0
        order = self.order.copy()
        while order.epoch < num_epochs:
            num_kept = int(is_kept[order.left].sum())
            count += num_batches(num_kept, self.batch_size, self.last_batch)
            order.start_epoch()
            # Else the dropped rows of an epoch depend on which rows of a source it has.
            if self.mixture is None or is_kept.all():
                per_epoch = num_batches(int(is_kept.sum()), self.batch_size, self.last_batch)
                return count + (num_epochs - order.epoch) * per_epoch
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; see `RowOrder.state_dict`."""
        return self.position.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the row of `state`; see `RowOrder.load_state_dict`.

        The batch size may differ.
        """
        if "planner" in state:
            raise ConfigError(
                "resume: the checkpoint was written with another data.batching.kind than fixed, so"
                " rows wait for their step; resume with that kind, or start a new run"
            )
        num_deferred = len(state.get(DEFERRED, {"rows": ()})["rows"])
        if num_deferred:
            raise ConfigError(
                f"resume: {num_deferred} prompts of the checkpoint wait for a later step, as it was"
                " written with grpo.oversampling_factor above 1; resume with a factor above 1, or"
                " start a new run"
            )
        is_same = self.order.load_state_dict(state, allow_changed_rows=allow_changed_rows)
        if self.selector is not None and _SELECTION in state:
            if is_same:
                self.selector.load_state_dict(state[_SELECTION])
            else:
                logger.warning("the rows changed, so the selection of rows begins without history")
        return is_same


def num_batches(num_rows: int, batch_size: int, last_batch: LastBatch) -> int:
    """Count the batches of one epoch.

    Example: 10 rows in batches of 4 are 3 batches, 2 with `last_batch="drop"`.
    """
    return num_rows // batch_size if last_batch == "drop" else ceil_div(num_rows, batch_size)


def no_batch_text(num_rows: int, batch_size: int) -> str:
    """Explain why an epoch of `num_rows` usable rows has no batch."""
    if num_rows == 0:
        return (
            "data.train_path: every row is dropped by policy.oversize_rows=drop,"
            " data.max_prompt_tokens or data.on_bad_row=skip; raise"
            " policy.max_total_sequence_length or data.max_prompt_tokens, or set"
            " data.on_bad_row=error, which lists the bad rows"
        )
    return (
        f"data.train_path has {num_rows} usable {plural(num_rows, 'row')}, fewer than the"
        f" {batch_size} of one batch, and data.last_batch is drop, so there is nothing to train on;"
        " set data.last_batch=keep or a smaller batch"
    )
