"""Endless shuffled batches of rows. The position is a few numbers, so a resumed run goes on with the very next row.

Rows are encoded when their batch is asked for, never all at the start. Batches cross epoch boundaries: every epoch
visits every row exactly once, and the batch in which it ends is filled up from the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError

In = TypeVar("In")
Out = TypeVar("Out")


class ShuffledIndices:
    """Endless batches of row indices; epoch e is a permutation drawn from (seed, e) alone.

    Example: 5 rows in batches of 2, not shuffled: [0, 1] [2, 3] [4, 0] [1, 2] ...
    """

    def __init__(self, num_rows: int, batch_size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        if num_rows < 1 or batch_size < 1:
            raise ValueError(f"a loader needs rows and a batch size, got {num_rows} rows and batch_size={batch_size}")
        self.num_rows, self.batch_size, self.seed, self.shuffle = num_rows, batch_size, seed, shuffle
        self._epoch, self._cursor = 0, 0
        self._order = self._permutation(0)

    @property
    def epoch(self) -> int:
        """Epoch of the next row."""
        return self._epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every row was seen once, the last one counted whole."""
        return -(-self.num_rows // self.batch_size)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        """int64 [batch_size]."""
        parts: list[np.ndarray] = []
        missing = self.batch_size
        while missing:
            part = self._order[self._cursor : self._cursor + missing]
            parts.append(part)
            missing -= len(part)
            self._cursor += len(part)
            if self._cursor == self.num_rows:
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._permutation(self._epoch)
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, Any]:
        """JSON values: what the next row depends on."""
        return {
            "epoch": self._epoch,
            "cursor": self._cursor,
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; another batch size is fine.

        Raises ConfigError if it was taken of other rows or another order.
        """
        own = self.state_dict()
        for name, key in (
            ("num_rows", "the data file or data.max_train_rows"),
            ("seed", "seed"),
            ("shuffle", "data.shuffle"),
        ):
            if state[name] != own[name]:
                raise ConfigError(
                    f"the checkpoint's loader has {name}={state[name]}, this run has {own[name]}: {key} changed, so the "
                    "run cannot go on at the same row; restore it or start a new run"
                )
        self._epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._order = self._permutation(self._epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(self.num_rows, dtype=np.int64)
        key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(self.num_rows)


class RowLoader(Generic[In, Out]):
    """Endless batches of encoded rows. Example: `next(RowLoader(rows, encode, batch_size=32))` is a list of 32."""

    def __init__(
        self, rows: Sequence[In], encode: Callable[[In], Out], *, batch_size: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        self.rows = rows
        self.batch_size = batch_size
        self._encode = encode
        self._indices = ShuffledIndices(len(rows), batch_size, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Number of rows, that is of one epoch."""
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """Epoch of the next row."""
        return self._indices.epoch

    @property
    def batches_per_epoch(self) -> int:
        """Batches until every row was seen once, the last one counted whole."""
        return self._indices.batches_per_epoch

    def __iter__(self) -> Iterator[list[Out]]:
        return self

    def __next__(self) -> list[Out]:
        return [self.encode(row) for row in next(self._indices).tolist()]

    def one_pass(self) -> Iterator[list[Out]]:
        """Every row once in file order, the last batch short if need be; the position does not move. For validation."""
        for start in range(0, len(self.rows), self.batch_size):
            yield [self.encode(row) for row in range(start, min(start + self.batch_size, len(self.rows)))]

    def encode(self, row: int) -> Out:
        """Row `row` of the file, encoded; an error says where the row stands."""
        try:
            return self._encode(self.rows[row])
        except ConfigError as error:
            places = getattr(self.rows, "places", None)
            raise ConfigError(f"{places[row] if places else f'row {row}'}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return self._indices.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `ShuffledIndices.load_state_dict`."""
        self._indices.load_state_dict(state)
