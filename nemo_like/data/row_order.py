"""Order in which the rows of a data set are visited, with a position that a run can resume.

Every epoch visits the rows in a permutation that depends on the seed and the epoch only, so the
position is the number of visited rows. A digest of the rows detects changed files on resume.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError

_VERSION = 3


@dataclass(frozen=True, eq=False)
class Curriculum:
    """An order of rows by increasing difficulty."""

    name: str
    """What the difficulty is, e.g. `length`; a resumed run must have the same."""
    difficulty: np.ndarray
    """float64 [N], finite."""


def epoch_permutation(num_rows: int, seed: int, epoch: int, *, shuffle: bool = True) -> np.ndarray:
    """Return the order of the rows of an epoch, int64 [num_rows].

    Independent of the number of ranks, of the global random state and of the platform.
    """
    if not shuffle:
        return np.arange(num_rows)
    # A sequence as the seed gives independent streams for every pair.
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


class RowOrder:
    """Row indices in visiting order, epoch after epoch; every epoch visits each row exactly once.

    Example: 3 rows, not shuffled: `take(2)` is [0, 1], `take(2)` is [2], `start_epoch()`, `take(2)`
    is [0, 1].
    """

    def __init__(
        self,
        digests: np.ndarray,
        *,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Initialize from `digests` uint64 [N], a hash of the content of each row.

        With a `curriculum` every epoch visits the rows by increasing difficulty, rows of equal
        difficulty in random order, or without `shuffle` in the order of the file.
        """
        if len(digests) == 0:
            raise ValueError("an order needs at least one row")
        if curriculum is not None and not np.isfinite(curriculum.difficulty).all():
            raise ValueError(f"the difficulty {curriculum.name} is not finite for every row")
        self.seed = seed
        self.shuffle = shuffle
        self._curriculum = curriculum
        self._digests = digests
        self.start_epoch(0)

    def __len__(self) -> int:
        """Number of rows of an epoch."""
        return len(self._digests)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def num_left(self) -> int:
        """Number of rows that this epoch has not visited yet."""
        return len(self) - self._position

    @property
    def order(self) -> np.ndarray:
        """Row indices in the order of this epoch, int64 [N]."""
        return self._order

    @property
    def left(self) -> np.ndarray:
        """Rows that this epoch has not visited yet, in order, int64 [num_left]."""
        return self._order[self._position :]

    def upcoming(self, num_rows: int) -> np.ndarray:
        """Return the rows of the next `num_rows` visits, each once, in the order of the first
        visit, int64 [at most N].
        """
        rows = self.left[:num_rows]
        if len(rows) == num_rows:
            return rows
        later = self.copy()
        later.start_epoch()
        more = later.order[: num_rows - len(rows)]
        return np.concatenate([rows, more[~np.isin(more, rows)]])

    def take(self, num_rows: int) -> np.ndarray:
        """Return the next rows of this epoch, int64 [at most `num_rows`], and advance."""
        rows = self._order[self._position : self._position + num_rows]
        self._position += len(rows)
        return rows

    def copy(self) -> RowOrder:
        """Return an order at the same position that advances independently."""
        # The arrays are replaced as a unit, never changed.
        return copy.copy(self)

    @cached_property
    def _content(self) -> str:
        """Digest of all rows. Cached, because every saved position has it."""
        return hashlib.blake2b(self._digests.tobytes(), digest_size=16).hexdigest()

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the position if the block raises."""
        before = self.copy()
        try:
            yield
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise

    def start_epoch(self, epoch: int | None = None) -> None:
        """Go to the first row of `epoch`, by default the next one."""
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._position = 0
        order = epoch_permutation(len(self), self.seed, self._epoch, shuffle=self.shuffle)
        if self._curriculum is not None:
            order = order[np.argsort(self._curriculum.difficulty[order], kind="stable")]
        self._order = order

    def restart_epoch(self) -> None:
        """Go back to the first row of this epoch."""
        self.start_epoch(self._epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; their size does not depend on the number of rows."""
        return {
            "version": _VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "curriculum": None if self._curriculum is None else self._curriculum.name,
            "num_rows": len(self),
            "rows": self._content,
            "epoch": self._epoch,
            "num_visited": self._position,
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the last row that was visited when `state` was taken.

        Return False if the rows changed, which needs `allow_changed_rows`. The position is kept if
        their number is the same, for example after a correction; otherwise the epoch begins again.
        Raises ConfigError for changed rows without `allow_changed_rows`, and for another order.
        """
        if "mixture" in state:
            raise ConfigError(
                "resume: the checkpoint was written with data.train_sets, this run has"
                " data.train_path; use the same, or start a new run"
            )
        if state.get("version") != _VERSION:
            raise ConfigError(
                "resume: the checkpoint's data position has the format of another version of"
                " nemo_like; continue the run with that version, or start a new run"
            )
        own = self.state_dict()
        keys = {"seed": "seed", "shuffle": "data.shuffle", "curriculum": "data.curriculum"}
        for name, key in keys.items():
            if state[name] != own[name]:
                raise ConfigError(
                    f"resume: the checkpoint was written with {key}={_shown(state[name])}, this run"
                    f" has {key}={_shown(own[name])}, which is another order of the rows; set"
                    f" {key}={_shown(state[name])} or start a new run"
                )
        is_same = state["rows"] == own["rows"]
        if not is_same and not allow_changed_rows:
            raise ConfigError(
                "resume: the rows of the training data (data.train_path, data.train_sets,"
                " data.max_train_rows, filters) are not the rows that the checkpoint was written"
                " with; restore them, or set data.allow_changed_rows=true to continue with the new"
                " rows (the epoch begins again if their number is another one)"
            )
        self.start_epoch(int(state["epoch"]))
        if state["num_rows"] == len(self):
            self._position = int(state["num_visited"])
        return is_same


def _shown(value: object) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
