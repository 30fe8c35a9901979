"""Shuffled batches of encoded rows, epoch after epoch, with exact resume.

Each epoch visits each row once. Batches do not cross epochs: the last batch of an epoch is short,
or dropped with `last_batch="drop"`. Rows whose encoding is None are dropped and counted; the batch
takes the next row instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import plural
from nemo_like.data.mixture import Mixture, MixtureOrder, open_order
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.row_order import Curriculum, RowOrder
from nemo_like.integer_math import ceil_div

Out = TypeVar("Out")
LastBatch = Literal["keep", "drop"]


class FetchableRows(Protocol[Out]):
    """Rows of a file that can be fetched in their encoded form."""

    def __len__(self) -> int: ...

    @property
    def digests(self) -> tuple[str, ...]:
        """Hash of the content of all rows, of each source."""
        ...

    def fetch(self, rows: Sequence[int]) -> list[Out | None]:
        """Return the encoded rows, None for a dropped row. Raises ConfigError for a bad row."""
        ...

    def location(self, row: int) -> str:
        """Return the location of a row. Example: `data/train.jsonl:17`."""
        ...


class Position(Protocol):
    """The position of a loader, in the form that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...


@dataclass(frozen=True, slots=True)
class SavedPosition:
    """The position that a loader had, for a run whose loader is ahead of the trained rows."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        return self.state


@dataclass(frozen=True, eq=False)
class BatchSources:
    """The sources of the rows of a batch of a mixture."""

    names: tuple[str, ...]
    indices: np.ndarray
    """int64 [B]: index in `names` of the source of each row."""

    @property
    def num_rows(self) -> dict[str, int]:
        """Number of rows of each source by its name."""
        counts = np.bincount(self.indices, minlength=len(self.names))
        return dict(zip(self.names, counts.tolist(), strict=True))


class BatchLoader(Protocol[Out]):
    """Batches of encoded rows with a position that a run saves; `RowLoader` or a `StreamLoader`."""

    num_dropped: int
    """Number of rows dropped for the last batch because their encoding is None."""

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        ...

    @property
    def plan(self) -> BatchPlan | None:
        """Plan of the last batch, if it was planned when its rows were chosen."""
        ...

    def __next__(self) -> list[Out]:
        """Return the rows of the next batch. Raises ConfigError for a bad row."""
        ...

    def batch_locations(self) -> list[str]:
        """Return the locations of the rows of the last batch."""
        ...

    def first_rows(self, num_rows: int) -> list[Out]:
        """Return the encoded rows of the first `num_rows` of the file."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the last batch of `state`; see `RowOrder.load_state_dict`."""
        ...

    def batch_sources(self) -> BatchSources | None:
        """Return the sources of the rows of the last batch; None without a mixture."""
        ...

    def batch_metrics(self) -> dict[str, float]:
        """Return the metrics of the choice of the last batch; empty for batches of fixed size."""
        ...

    def rows_of_batches(self, num_batches: int | None) -> np.ndarray:
        """Return the rows of the next batches in the order of their first visit, int64 [n]."""
        ...

    def batches_left(self, num_epochs: int, is_kept: np.ndarray) -> int | None:
        """Count the batches to the end of epoch `num_epochs`; None if that is not known.

        `is_kept` bool [N] marks rows that are not dropped.
        """
        ...

    def has_batch(self, num_epochs: int, is_kept: np.ndarray | None = None) -> bool:
        """Return True if an epoch before `num_epochs` has another batch."""
        ...

    def num_left_out(self, is_kept: np.ndarray) -> int:
        """Count the rows of the last epoch that no batch has because they fill none."""
        ...


class RowLoader(Generic[Out]):
    """Endless batches of at most `batch_size` encoded rows, all of one epoch.

    Example: 5 rows in batches of 2, not shuffled: [0, 1] [2, 3] [4] [0, 1] ...; with
    `last_batch="drop"` [0, 1] [2, 3] [0, 1] ...
    """

    plan: BatchPlan | None = None
    """The policy plans these batches."""

    def __init__(
        self,
        rows: FetchableRows[Out],
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: LastBatch = "keep",
        curriculum: Curriculum | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        if len(rows) < 1 or batch_size < 1:
            raise ValueError(
                f"a loader needs rows and a batch size, got {len(rows)} rows and"
                f" batch_size={batch_size}"
            )
        self.batch_size = batch_size
        self.last_batch: LastBatch = last_batch
        self.num_dropped = 0
        """Number of rows dropped for the last batch because their encoding is None."""
        self.batch_epoch = 0
        """Epoch of the rows of the last batch; `epoch` is the next one after its last batch."""
        self._rows = rows
        self._order = open_order(
            len(rows), rows.digests, mixture, seed=seed, shuffle=shuffle, curriculum=curriculum
        )
        self._batch_rows: list[int] = []

    def __len__(self) -> int:
        """Number of rows of the file, dropped ones included."""
        return len(self._order)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._order.epoch

    @property
    def order(self) -> np.ndarray:
        """Row indices in the order of this epoch, int64 [N]."""
        return self._order.order

    def upcoming(self, num_rows: int) -> np.ndarray:
        """Return the rows of the next `num_rows` visits, each once; see `RowOrder.upcoming`."""
        return self._order.upcoming(num_rows)

    def __iter__(self) -> Iterator[list[Out]]:
        return self

    def __next__(self) -> list[Out]:
        """Return the next batch.

        Raises ConfigError for a bad row, or if an epoch has no batch. The position is then the same
        as before the call.
        """
        return self.take(self.batch_size)

    def take(self, num_rows: int) -> list[Out]:
        """Return a batch of at most `num_rows` rows, which may be fewer than `batch_size`.

        Raises ConfigError as `__next__` does.
        """
        with self._order.undone_on_error():
            return self._take(num_rows)

    def take_in_epoch(self, num_rows: int) -> list[Out]:
        """Return at most `num_rows` rows, all of this epoch: fewer at its end, also none.

        Raises ConfigError for a bad row.
        """
        with self._order.undone_on_error():
            return self._take(num_rows, in_epoch=True)

    def _take(self, batch_size: int, *, in_epoch: bool = False) -> list[Out]:
        """Form the next batch and begin the next epoch if this one has no further batch.

        With `in_epoch` the rows at the end of the epoch are a batch, however few they are.
        """
        first_epoch = self._order.epoch
        self.num_dropped = 0
        batch: list[Out] = []
        self._batch_rows = []
        while len(batch) < batch_size:
            self.batch_epoch = self._order.epoch
            taken = self._order.take(batch_size - len(batch)).tolist()
            encoded = self._rows.fetch(taken)
            for index, row in zip(taken, encoded, strict=True):
                if row is None:
                    self.num_dropped += 1
                else:
                    batch.append(row)
                    self._batch_rows.append(index)
            is_full = len(batch) == batch_size
            if self._order.num_left and not (is_full and self._is_rest_dropped()):
                continue
            self._order.start_epoch()
            if is_full or in_epoch or (batch and self.last_batch == "keep"):
                return batch
            # The first epoch may have begun in the middle, so only a complete second one without a
            # batch is an error.
            if self._order.epoch - first_epoch > 1:
                raise ConfigError(no_batch_text(len(batch), batch_size))
            batch = []
            self._batch_rows = []
        return batch

    def batch_locations(self) -> list[str]:
        """Return the locations of the rows of the last batch. Example: `data/train.jsonl:17`."""
        return [self._rows.location(row) for row in self._batch_rows]

    def batch_sources(self) -> BatchSources | None:
        """Return the sources of the rows of the last batch; None without a mixture."""
        return sources_of(self._order, self._batch_rows)

    def batch_metrics(self) -> dict[str, float]:
        """Return no metrics; see `BatchLoader`."""
        return {}

    def num_left_out(self, is_kept: np.ndarray) -> int:
        """Return 0; see `BatchLoader`. `nemo-like validate` reports `data.last_batch=drop`."""
        return 0

    def rows_of_batches(self, num_batches: int | None) -> np.ndarray:
        """Return the rows of the next batches in the order of their first visit, int64 [n]."""
        return self.upcoming(len(self) if num_batches is None else num_batches * self.batch_size)

    def has_batch(self, num_epochs: int, is_kept: np.ndarray | None = None) -> bool:
        """Return True if an epoch before `num_epochs` has another batch; see `batches_left`."""
        return self.batches_left(num_epochs, is_kept) > 0

    def _is_rest_dropped(self) -> bool:
        """Return True if the rest of the epoch does not fill a batch and is left out."""
        return self.last_batch == "drop" and self._order.num_left < self.batch_size

    def first_rows(self, num_rows: int) -> list[Out]:
        """Return the encoded rows of the first `num_rows` of the file, without dropped ones.

        The position does not change.
        """
        encoded = self._rows.fetch(range(min(num_rows, len(self))))
        return [row for row in encoded if row is not None]

    def batches_left(self, num_epochs: int, is_kept: np.ndarray | None = None) -> int:
        """Count the batches from the current position to the end of epoch `num_epochs`.

        `is_kept` bool [N] marks rows that are not dropped; the default is all.
        """
        if self._order.epoch >= num_epochs:
            return 0
        if is_kept is None:
            is_kept = np.ones(len(self), dtype=bool)
        if isinstance(self._order, MixtureOrder) and not is_kept.all():
            return self._simulated_batches(self._order, num_epochs, is_kept)
        num_left = int(is_kept[self._order.left].sum())
        num_later_epochs = num_epochs - self._order.epoch - 1
        per_epoch = num_batches(int(is_kept.sum()), self.batch_size, self.last_batch)
        in_this_epoch = num_batches(num_left, self.batch_size, self.last_batch)
        return in_this_epoch + num_later_epochs * per_epoch

    def _simulated_batches(self, order: MixtureOrder, num_epochs: int, is_kept: np.ndarray) -> int:
        """Count the batches to the end of epoch `num_epochs` by forming them without encoding.

        The dropped rows of an epoch of a mixture depend on which rows of a source it has.
        """
        simulated = RowLoader(
            _KeptRows(is_kept), batch_size=self.batch_size, last_batch=self.last_batch
        )
        simulated._order = order.copy()
        count = 0
        while simulated.epoch < num_epochs:
            simulated._take(self.batch_size)
            if simulated.batch_epoch < num_epochs:
                count += 1
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; see `RowOrder.state_dict`."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the row of `state`; see `RowOrder.load_state_dict`.

        The batch size may differ.
        """
        if "planner" in state:
            raise ConfigError(
                "resume: the checkpoint was written with another data.batching.kind than fixed, so"
                " rows wait for their step; resume with that kind, or start a new run"
            )
        return self._order.load_state_dict(state, allow_changed_rows=allow_changed_rows)


def sources_of(order: RowOrder | MixtureOrder, rows: Sequence[int]) -> BatchSources | None:
    """Return the sources of `rows`; None without a mixture."""
    if not isinstance(order, MixtureOrder):
        return None
    return BatchSources(order.mixture.names, order.sources_of(rows))


class _KeptRows:
    """Rows of which only is known whether they are kept; a `FetchableRows`."""

    def __init__(self, is_kept: np.ndarray) -> None:
        self.digests = ("",)
        self._is_kept = is_kept

    def __len__(self) -> int:
        return len(self._is_kept)

    def fetch(self, rows: Sequence[int]) -> list[bool | None]:
        """Return True for a kept row, None for a dropped one."""
        return [True if self._is_kept[row] else None for row in rows]

    def location(self, row: int) -> str:
        """Return the index of the row: it has no file here."""
        return f"row {row}"


def num_batches(num_rows: int, batch_size: int, last_batch: LastBatch) -> int:
    """Count the batches of one epoch.

    Example: 10 rows in batches of 4 are 3 batches, 2 with `last_batch="drop"`.
    """
    return num_rows // batch_size if last_batch == "drop" else ceil_div(num_rows, batch_size)


def no_batch_text(num_rows: int, batch_size: int) -> str:
    """Explain why an epoch of `num_rows` usable rows has no batch."""
    if num_rows == 0:
        return (
            "data.train_path: every row is dropped by policy.oversize_rows=drop or"
            " data.max_prompt_tokens; raise policy.max_total_sequence_length or"
            " data.max_prompt_tokens"
        )
    return (
        f"data.train_path has {num_rows} usable {plural(num_rows, 'row')}, fewer than the"
        f" {batch_size} of one batch, and data.last_batch is drop, so there is nothing to train on;"
        " set data.last_batch=keep or a smaller batch"
    )
