"""Batches with more rows than a step trains, whose other rows are deferred to a later batch.

Deferred rows wait until they fill a batch of their own, which is trained completely, so that no row
is deferred twice. An epoch has as many batches as without deferred rows, and each row is trained in
exactly one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from nemo_like.config.errors import ConfigError
from nemo_like.data.loader import (
    DEFERRED,
    FetchableRows,
    LastBatch,
    Out,
    Position,
    RowLoader,
    logger,
    no_batch_text,
)
from nemo_like.data.row_order import RowOrder

_MAX_EPOCHS = 3
"""Epochs in which a batch is looked for: the rest of one, one with and one without a selector."""


@dataclass(frozen=True)
class DeferredRows:
    """Rows that wait for a later batch of their epoch.

    Example: rows 7 and 2 of the first epoch: `rows` (7, 2), `probabilities` (1.0, 1.0), `epoch` 0.
    """

    rows: tuple[int, ...] = ()
    """In the order in which they were deferred."""
    probabilities: tuple[float, ...] = ()
    """Probability with which a selector took each."""
    epoch: int = 0


@dataclass(frozen=True)
class DeferredPosition:
    """A position of a loader and the rows that it deferred before."""

    position: Position
    deferred: DeferredRows

    def state_dict(self) -> dict[str, Any]:
        """See `Position.state_dict`."""
        deferred = {
            "rows": list(self.deferred.rows),
            "probabilities": list(self.deferred.probabilities),
            "epoch": self.deferred.epoch,
        }
        return {**self.position.state_dict(), DEFERRED: deferred}


class OversamplingLoader(RowLoader[Out]):
    """Batches of up to `num_sampled` rows, of which `num_wanted` are trained.

    After each batch `keep` gets the rows that are trained; the others are deferred. As soon as
    `batch_size` rows wait, they are the next batch. The last batches of an epoch have the rows that
    are left.

    Example: 5 rows in batches of 2, 3 sampled, not shuffled, the first of each batch is deferred:
    [0, 1, 2] trains 1 and 2, [3, 4] trains both, [0].
    """

    def __init__(
        self,
        rows: FetchableRows[Out],
        order: RowOrder,
        *,
        batch_size: int,
        num_sampled: int,
        last_batch: LastBatch = "keep",
    ) -> None:
        # An epoch of the order has its rest as a batch, which deferred rows may fill.
        super().__init__(rows, order, batch_size=batch_size)
        self._drops_rest = last_batch == "drop"
        self._num_sampled = num_sampled
        self.deferred = DeferredRows()
        """The rows that wait now."""

    @classmethod
    def of(cls, loader: RowLoader[Out], *, num_sampled: int) -> Self:
        """Return a loader of the rows of a new `loader`, with its batch size."""
        return cls(
            loader.rows,
            loader.order,
            batch_size=loader.batch_size,
            num_sampled=num_sampled,
            last_batch=loader.last_batch,
        )

    @property
    def num_wanted(self) -> int:
        """Number of rows of the last batch that are trained."""
        return min(self.batch_size, len(self.batch_rows))

    @property
    def position(self) -> Position:
        """The position after the last batch, with the rows that `keep` has deferred until now."""
        return DeferredPosition(super().position, self.deferred)

    def __next__(self) -> list[Out]:
        before = self.order.copy(), self.deferred, self.selector
        batch: list[Out] = []
        try:
            for num_epochs in range(_MAX_EPOCHS):
                if num_epochs == _MAX_EPOCHS - 1:
                    # As in `RowLoader`: an epoch without a batch ends a run.
                    self.selector = None
                batch = self._next_batch()
                if len(batch) >= self.batch_size or (batch and not self._drops_rest):
                    self.selector = before[2]
                    return batch
            raise ConfigError(no_batch_text(len(batch), self.batch_size))
        except BaseException:
            self.order, self.deferred, self.selector = before
            raise

    def keep(self, kept: Sequence[int]) -> None:
        """Train the rows of the last batch with these increasing indices, and defer the others."""
        rest = sorted(set(range(len(self.batch_rows))) - set(kept))
        if rest:
            self.deferred = DeferredRows(
                self.deferred.rows + tuple(self.batch_rows[index] for index in rest),
                self.deferred.probabilities
                + tuple(self.batch_probabilities[index] for index in rest),
                self.batch_epoch,
            )
        self.batch_rows = [self.batch_rows[index] for index in kept]
        self.batch_probabilities = [self.batch_probabilities[index] for index in kept]

    def _next_batch(self) -> list[Out]:
        """Return the next batch; one that is shorter than `batch_size` ends its epoch."""
        waiting = self.deferred
        is_ended = bool(waiting.rows) and waiting.epoch < self.epoch
        batch: list[Out] = []
        if len(waiting.rows) >= self.batch_size or is_ended:
            self.num_dropped = self.num_skipped = 0
            self.batch_rows, self.batch_probabilities = [], []
            self.batch_epoch = waiting.epoch
        else:
            batch = self.take(self._num_sampled, in_epoch=True)
        num_more = max(self.batch_size - len(batch), 0)
        rows = waiting.rows[:num_more]
        for index, row in zip(rows, self.rows.fetch(rows), strict=True):
            assert row is not None, f"row {index} was not dropped when it was deferred"
            batch.append(row)
        self.batch_rows = [*self.batch_rows, *rows]
        self.batch_probabilities = [*self.batch_probabilities, *waiting.probabilities[:num_more]]
        self.deferred = DeferredRows(
            waiting.rows[num_more:], waiting.probabilities[num_more:], waiting.epoch
        )
        return batch

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """See `RowLoader.load_state_dict`."""
        deferred = state.get(DEFERRED, {"rows": (), "probabilities": (), "epoch": 0})
        plain = {name: value for name, value in state.items() if name != DEFERRED}
        is_same = super().load_state_dict(plain, allow_changed_rows=allow_changed_rows)
        self.deferred = DeferredRows()
        if is_same:
            self.deferred = DeferredRows(
                tuple(deferred["rows"]), tuple(deferred["probabilities"]), deferred["epoch"]
            )
        elif deferred["rows"]:
            logger.warning(
                "the rows changed, so %d deferred rows are left out", len(deferred["rows"])
            )
        return is_same
