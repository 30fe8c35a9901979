"""Order in which the rows of a data set are visited, with a position that is robust to changes of
later rows.

An epoch visits the rows sorted by a hash of the seed, the epoch and the row's content. Removing or
changing one row therefore does not change the order of the others, and the position is the hash of
the last visited row. A sketch of all rows visited so far shows on resume whether one of them
changed.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.row_sketch import MAX_DIFFERENCE, RowSketch, mix, unmix

_STATE_KEYS = {"version", "seed", "shuffle", "epoch", "num_visited", "last", "late", "seen"}
_VERSION = 2
_MAX_COPIES = 2**32
"""Maximum number of equal rows that a row id distinguishes."""
_COPY_VISITED = -1
"""Value of `late` for a row of which an equal copy was visited."""


@dataclass(frozen=True, eq=False)
class Curriculum:
    """An order of rows by increasing difficulty."""

    name: str
    """What the difficulty is, e.g. `length`; a resumed run must have the same."""
    difficulty: np.ndarray
    """float64 [N], finite."""


class RowOrder:
    """Row indices in visiting order, epoch after epoch; every epoch visits each row exactly once.

    A row that is added or changed between two runs, and whose position in the epoch has already
    passed, is visited at the end of the epoch. It is called late.

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

        Equal rows may occur several times. With a `curriculum` every epoch visits the rows by
        increasing difficulty, rows of equal difficulty in random order or in that of the file.
        """
        if len(digests) == 0:
            raise ValueError("an order needs at least one row")
        if curriculum is not None and not np.isfinite(curriculum.difficulty).all():
            raise ValueError(f"the difficulty {curriculum.name} is not finite for every row")
        self.seed = seed
        self.shuffle = shuffle
        self._curriculum = curriculum
        # The number distinguishes equal rows. Without shuffling it is the position in the file,
        # which is part of a row's identity because it decides when the row is visited.
        number = _occurrences(digests) if shuffle else np.arange(len(digests), dtype=np.uint64)
        self._digests = digests
        self._ids = mix(digests ^ mix(number))
        self._seen = np.zeros(len(digests), dtype=bool)
        self._late = np.zeros(len(digests), dtype=np.int64)
        self._epoch = 0
        self._position = 0
        self._newly_seen: list[np.ndarray] = []
        # The sketch of the rows in `_sketched`; brought up to date by `state_dict`.
        self._sketch = RowSketch.of(np.empty(0, np.uint64))
        self._sketched = np.zeros(len(digests), dtype=bool)
        self._sort()

    def __len__(self) -> int:
        """Number of rows of an epoch."""
        return len(self._ids)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def num_left(self) -> int:
        """Number of rows that this epoch has not visited yet."""
        return len(self._ids) - self._position

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
        is_known = np.zeros(len(self), dtype=bool)
        is_known[rows] = True
        more = later.order[: num_rows - len(rows)]
        return np.concatenate([rows, more[~is_known[more]]])

    def take(self, num_rows: int) -> np.ndarray:
        """Return the next rows of this epoch, int64 [at most `num_rows`], and advance."""
        rows = self._order[self._position : self._position + num_rows]
        self._position += len(rows)
        self._newly_seen.append(rows[~self._seen[rows]])
        self._seen[rows] = True
        return rows

    def copy(self) -> RowOrder:
        """Return an order at the same position that advances independently."""
        twin = copy.copy(self)
        # The other arrays are replaced as a unit, never changed.
        twin._seen = self._seen.copy()
        twin._late = self._late.copy()
        twin._newly_seen = []
        twin._sketched = self._sketched.copy()
        return twin

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the position if the block raises."""
        epoch = self._epoch
        position = self._position
        late = self._late.copy()
        # `_seen` has one entry per row, so the changes are recorded instead of a copy.
        self._newly_seen = []
        try:
            yield
        except BaseException:
            self._epoch = epoch
            self._position = position
            self._late = late
            for rows in self._newly_seen:
                self._seen[rows] = False
            self._sort()
            raise

    def start_epoch(self) -> None:
        """Begin the next epoch; rows left in this one are skipped."""
        self._epoch += 1
        self._position = 0
        self._late[:] = 0
        self._sort()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; their size does not depend on the number of rows."""
        last: list[Any] | None = None
        if self._position:
            row = self._order[self._position - 1]
            last = [int(self._late[row]), int(self._keys[row])]
            if self._curriculum is not None:
                last.append(float(self._curriculum.difficulty[row]))
        late = np.flatnonzero(self._late)
        curriculum = {}
        if self._curriculum is not None:
            curriculum["curriculum"] = self._curriculum.name
        return {
            **curriculum,
            "version": _VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self._epoch,
            "num_visited": self._position,
            "last": last,
            "late": [[int(self._ids[row]), int(self._late[row])] for row in late],
            "seen": self._seen_sketch().to_dict(),
        }

    def _seen_sketch(self) -> RowSketch:
        """Return the sketch of the rows seen so far, at the cost of those since the last call."""
        changed = self._seen != self._sketched
        added = RowSketch.of(self._ids[changed & self._seen])
        removed = RowSketch.of(self._ids[changed & self._sketched])
        self._sketch = self._sketch.combined(added, removed)
        self._sketched = self._seen.copy()
        return self._sketch

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last row that was visited when `state` was taken.

        Rows that were not visited may have been changed, added or removed since. Raises ConfigError
        if visited rows were, or if the seed or `shuffle` differs.
        """
        if "mixture" in state:
            raise ConfigError(
                "resume: the checkpoint was written with data.train_sets, this run has"
                " data.train_path; use the same, or start a new run"
            )
        if set(state) - {"curriculum"} != _STATE_KEYS or state["version"] != _VERSION:
            raise ConfigError(
                "resume: the checkpoint's data position has the format of another version of"
                " nemo_like; continue the run"
                " with that version, or start a new run"
            )
        for name, key in (("seed", "seed"), ("shuffle", "data.shuffle")):
            own = getattr(self, name)
            if state[name] != own:
                raise ConfigError(
                    f"resume: the checkpoint was written with {key}={state[name]}, this run has"
                    f" {key}={own}, which is another"
                    f" order of the rows; set {key}={state[name]} or start a new run"
                )
        own_name = None if self._curriculum is None else self._curriculum.name
        if state.get("curriculum") != own_name:
            raise ConfigError(
                f"resume: the checkpoint was written with data.curriculum="
                f"{state.get('curriculum') or 'null'}, this run has {own_name or 'null'}, which is"
                " another order of the rows; use the same, or start a new run"
            )
        self._epoch = int(state["epoch"])
        # From an earlier state that was loaded.
        self._late[:] = 0
        late_numbers = dict(state["late"])
        if late_numbers:
            self._late = np.array([late_numbers.get(row_id, 0) for row_id in self._ids.tolist()])
        self._keys = self._epoch_keys()
        passed = self._passed(state["last"])
        try:
            seen = RowSketch.from_dict(state["seen"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"resume: the checkpoint's data position cannot be read: {error}"
            ) from error
        self._seen = self._seen_rows(seen, passed)
        if state["last"] is not None:
            # New rows whose position has passed: they form the next pass of late rows.
            self._late[passed & ~self._seen] = state["last"][0] + 1
        self._sort()
        self._position = int(self._passed(state["last"]).sum())

    def _passed(self, last: list[Any] | None) -> np.ndarray:
        """Mark rows whose position in this epoch is not after the last visited row, bool [N].

        `last` is (late number, key) of that row, and its difficulty with a curriculum; rows are
        visited in the order of (late number, difficulty, key).
        """
        if last is None:
            return np.zeros(len(self._ids), dtype=bool)
        late_number = last[0]
        key = np.uint64(last[1])
        is_before = self._late < late_number
        is_equal = self._late == late_number
        if self._curriculum is not None:
            difficulty = self._curriculum.difficulty
            is_before |= is_equal & (difficulty < last[2])
            is_equal &= difficulty == last[2]
        return is_before | (is_equal & (self._keys <= key))

    def _seen_rows(self, seen: RowSketch, passed: np.ndarray) -> np.ndarray:
        """Mark the rows of the sketch, bool [N]. Raises ConfigError unless all of them exist."""
        # In the first epoch only rows up to the position can have been visited, so other rows may
        # differ in any number.
        candidates = passed if self._epoch == 0 else np.ones(len(self._ids), dtype=bool)
        difference = RowSketch.of(self._ids[candidates]).difference(seen)
        if difference is None:
            raise ConfigError(
                f"resume: more than about {MAX_DIFFERENCE} of the rows that were trained on before"
                f" the checkpoint are changed or"
                " missing, or as many are new: this is another data file (data.train_path,"
                " data.max_train_rows); restore it"
                " or start a new run"
            )
        new, missing = difference
        seen_rows = candidates & ~np.isin(self._ids, new)
        copies = self._unseen_copies(missing, seen_rows)
        missing = missing[copies < 0]
        self._late[copies[copies >= 0]] = _COPY_VISITED
        seen_rows[copies[copies >= 0]] = True
        if len(missing):
            count = f"{len(missing)} rows" if len(missing) > 1 else "1 row"
            raise ConfigError(
                f"resume: {count} of data.train_path that the run had trained on before the"
                f" checkpoint changed or disappeared"
                " since; only rows it had not reached may change. Restore the file (and"
                " data.max_train_rows), or start a"
                " new run"
            )
        return seen_rows

    def _unseen_copies(self, missing: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Find an unseen row with the content of each missing id uint64 [M]; int64 [M], -1 if none.

        If a file has equal rows and one of them is removed, it does not matter which one was
        visited.
        """
        copies = np.full(len(missing), -1)
        free = np.flatnonzero(~seen) if self.shuffle else np.empty(0, np.int64)
        for index, inner in enumerate(unmix(missing)):
            # An id is mix(digest ^ mix(number)), so a row with the same digest gives back a small
            # number, and any other row a random one.
            matches = free[unmix(inner ^ self._digests[free]) < _MAX_COPIES]
            if len(matches):
                copies[index] = matches[0]
                free = free[free != matches[0]]
        return copies

    def _epoch_keys(self) -> np.ndarray:
        """Return the sort keys of the rows in this epoch, uint64 [N]."""
        if not self.shuffle:
            return np.arange(len(self._ids), dtype=np.uint64)
        salt = hashlib.blake2b(f"{self.seed}/{self._epoch}".encode(), digest_size=8).digest()
        return mix(self._ids ^ np.frombuffer(salt, dtype="<u8")[0])

    def _sort(self) -> None:
        """Sort the rows by late number, then by difficulty, then by key."""
        self._keys = self._epoch_keys()
        order = np.argsort(self._keys, kind="stable")
        if self._curriculum is not None:
            order = order[np.argsort(self._curriculum.difficulty[order], kind="stable")]
        if self._late.any():
            order = order[np.argsort(self._late[order], kind="stable")]
        self._order = order


def _occurrences(digests: np.ndarray) -> np.ndarray:
    """Count the equal rows before each row, uint64 [N]."""
    order = np.argsort(digests, kind="stable")
    ordered = digests[order]
    index = np.arange(len(digests))
    is_first = np.ones(len(digests), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    first = np.maximum.accumulate(np.where(is_first, index, 0))
    occurrences = np.empty(len(digests), dtype=np.uint64)
    occurrences[order] = (index - first).astype(np.uint64)
    return occurrences
