"""Order in which the rows of a data set are visited, with a position that a run can resume.

The order of an epoch depends on the seed and the epoch only, so the position is the number of
visited rows. `RowOrder` is the order of a run: every row once, or the sources of a `Mixture` by
weight. A digest of the rows detects changed files on resume. `ShardedOrder` is the part of one rank
of a plain PyTorch loop. All ranks compute the same permutation, so a shard is known from (rank,
number of ranks) alone. An epoch that continues on another number of ranks deals out the rows that
no rank has trained yet.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.integer_math import check_integer

_VERSION = 4
_SHARD_VERSION = 1


@dataclass(frozen=True)
class Mixture:
    """The sources of a data set, whose rows follow each other in the order of the sources.

    Visit k (from 0) of a source with weight w has the time (k + 1/2) / w, and the mixture visits
    the rows of all sources by increasing time. After n visits a source with share s of S sources
    was visited s n times, to within 1/2 + s S / 2.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of rows of each source."""
    weights: tuple[float, ...]
    """Relative weight of each source, above 0; their sum need not be 1."""

    def __post_init__(self) -> None:
        if not len(self.names) == len(self.sizes) == len(self.weights) > 0:
            raise ValueError(
                f"a mixture needs one size and one weight per source, got {len(self.names)} names,"
                f" {len(self.sizes)} sizes and {len(self.weights)} weights"
            )
        if min(self.sizes) < 1:
            raise ValueError(f"every source needs a row, got sizes {self.sizes}")
        for weight in self.weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"a weight is a finite number above 0, got {weight!r}")

    def visits(self, start: int, num_visits: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the visits from `start`: the source of each, and how often that source was visited
        before, int64 [num_visits] each.
        """
        weights = np.array(self.weights, dtype=np.float64)
        shares = weights / weights.sum()
        # At least the bound above: each source has had at least `first` visits and has at most
        # `last` at the end.
        margin = len(weights) + 1
        first = np.maximum(np.floor(shares * start).astype(np.int64) - margin, 0)
        last = np.ceil(shares * (start + num_visits)).astype(np.int64) + margin
        sources = np.repeat(np.arange(len(weights)), last - first)
        counts = np.concatenate([np.arange(*ends) for ends in zip(first, last, strict=True)])
        by_time = np.argsort((counts + 0.5) / weights[sources], kind="stable")
        num_before = start - int(first.sum())
        chosen = by_time[num_before : num_before + num_visits]
        return sources[chosen], counts[chosen]

    def sources_of(self, rows: Sequence[int]) -> np.ndarray:
        """Return the index of the source of each of `rows`, int64 [n]."""
        return np.searchsorted(np.cumsum(self.sizes), rows, side="right")

    def to_json(self) -> list[list[Any]]:
        """Return [name, weight] of each source as JSON values.

        A list, because the order of the sources decides between equal times.
        """
        pairs = zip(self.names, self.weights, strict=True)
        return [[name, float(weight)] for name, weight in pairs]


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


class EpochOrder:
    """Row indices in visiting order, epoch after epoch, with a position."""

    def __init__(self, num_rows: int, *, seed: int, shuffle: bool) -> None:
        self.seed = check_integer("seed", seed, 0)
        self.shuffle = shuffle
        self.num_rows = check_integer("num_rows", num_rows, 0)
        self.start_epoch(0)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def num_left(self) -> int:
        """Number of rows that this epoch has not visited yet."""
        return len(self._order) - self._position

    @property
    def order(self) -> np.ndarray:
        """Row indices in the order of this epoch, int64 [N]."""
        return self._order

    @property
    def left(self) -> np.ndarray:
        """Rows that this epoch has not visited yet, in order, int64 [num_left]."""
        return self._order[self._position :]

    def take(self, num_rows: int) -> np.ndarray:
        """Return the next rows of this epoch, int64 [at most `num_rows`], and advance."""
        rows = self._order[self._position : self._position + num_rows]
        self._position += len(rows)
        return rows

    def start_epoch(self, epoch: int | None = None) -> None:
        """Go to the first row of `epoch`, by default the next one."""
        self._epoch = self._epoch + 1 if epoch is None else check_integer("epoch", epoch, 0)
        self._position = 0
        self._order = self._order_of_epoch()

    def _order_of_epoch(self) -> np.ndarray:
        """Return the rows of the present epoch, int64."""
        return epoch_permutation(self.num_rows, self.seed, self._epoch, shuffle=self.shuffle)


class RowOrder(EpochOrder):
    """Row indices in visiting order, epoch after epoch.

    Without a mixture every epoch visits each row exactly once. An epoch of a mixture has as many
    visits: a source that is smaller than its share is repeated within it, each time in a new order;
    a larger one continues in the next epoch.

    Example: 3 rows, not shuffled: `take(2)` is [0, 1], `take(2)` is [2], `start_epoch()`, `take(2)`
    is [0, 1].
    """

    def __init__(
        self,
        num_rows: int,
        digests: Sequence[str] = (),
        *,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        """Initialize for `num_rows` rows; `digests` has a hash of the rows of each source.

        With a `curriculum` the rows of each source are visited by increasing difficulty, rows of
        equal difficulty in random order, or without `shuffle` in the order of the file.
        """
        if num_rows == 0:
            raise ValueError("an order needs at least one row")
        if curriculum is not None and not np.isfinite(curriculum.difficulty).all():
            raise ValueError(f"the difficulty {curriculum.name} is not finite for every row")
        self.mixture = mixture
        self._curriculum = curriculum
        self._digests = tuple(digests)
        super().__init__(num_rows, seed=seed, shuffle=shuffle)

    def __len__(self) -> int:
        """Number of visits of an epoch."""
        return self.num_rows

    def upcoming(self, num_visits: int) -> np.ndarray:
        """Return the rows of the next `num_visits` visits, at most of two epochs, each once, in the
        order of the first visit, int64 [at most N].
        """
        later = self.copy()
        num_left = min(num_visits, 2 * len(self))
        parts = [later.take(num_left)]
        while (num_left := num_left - len(parts[-1])) > 0:
            later.start_epoch()
            parts.append(later.take(num_left))
        rows = np.concatenate(parts)
        _, first = np.unique(rows, return_index=True)
        return rows[np.sort(first)]

    def copy(self) -> RowOrder:
        """Return an order at the same position that advances independently."""
        # The arrays are replaced as a unit, never changed.
        return copy.copy(self)

    def _order_of_epoch(self) -> np.ndarray:
        if self.mixture is None:
            return self._pass(0, self.num_rows, self._epoch)
        sources, counts = self.mixture.visits(self._epoch * self.num_rows, self.num_rows)
        rows = np.empty(self.num_rows, dtype=np.int64)
        start = 0
        for source, size in enumerate(self.mixture.sizes):
            places = np.flatnonzero(sources == source)
            passes, positions = np.divmod(counts[places], size)
            # The visits of a source are consecutive, and so are its passes.
            for number in np.unique(passes).tolist():
                of_pass = slice(*np.searchsorted(passes, (number, number + 1)))
                rows[places[of_pass]] = self._pass(start, size, number)[positions[of_pass]]
            start += size
        return rows

    def _pass(self, start: int, num_rows: int, number: int) -> np.ndarray:
        """Return the rows [start, start + num_rows) in the order of a pass, int64 [num_rows]."""
        rows = start + epoch_permutation(num_rows, self.seed, number, shuffle=self.shuffle)
        if self._curriculum is None:
            return rows
        return rows[np.argsort(self._curriculum.difficulty[rows], kind="stable")]

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; their size does not depend on the number of rows."""
        return {
            "version": _VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "curriculum": None if self._curriculum is None else self._curriculum.name,
            "mixture": None if self.mixture is None else self.mixture.to_json(),
            "num_rows": len(self),
            "rows": " ".join(self._digests),
            "epoch": self._epoch,
            "num_visited": self._position,
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the last row that was visited when `state` was taken.

        Return False if the rows changed, which needs `allow_changed_rows`. The position is kept if
        their number is the same, for example after a correction; otherwise the epoch begins again.
        Raises ConfigError for changed rows without `allow_changed_rows`, and for another order.
        """
        if state.get("version") != _VERSION:
            raise ConfigError(
                "resume: the checkpoint's data position has the format of another version of"
                " nemo_like; continue the run with that version, or start a new run"
            )
        own = self.state_dict()
        # Positions of earlier versions, which had no mixture here.
        state = {"mixture": None, **state}
        self._check_mixture(state["mixture"], own["mixture"])
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
                "resume: the rows of the training data"
                f" ({self._changed_sources(state['rows'].split())}) are not the rows that the"
                " checkpoint was written with; restore them, or set data.allow_changed_rows=true"
                " to continue with the new rows (the epoch begins again if their number is another"
                " one)"
            )
        self.start_epoch(int(state["epoch"]))
        if state["num_rows"] == len(self):
            self._position = int(state["num_visited"])
        return is_same

    def _check_mixture(self, written: list[Any] | None, own: list[Any] | None) -> None:
        """Raise ConfigError unless a checkpoint was `written` with the mixture of this run."""
        if written == own:
            return
        if written is None or own is None:
            keys = ("data.train_sets", "data.train_path")
            before, now = keys if own is None else reversed(keys)
            raise ConfigError(
                f"resume: the checkpoint was written with {before}, this run has {now}; use the"
                " same, or start a new run"
            )
        raise ConfigError(
            f"resume: the checkpoint was written with data.train_weights {written}, this run has"
            f" {own}, which is another order of the rows; use the same, or start a new run. If none"
            " are set, they are the numbers of rows of the files"
        )

    def _changed_sources(self, digests: Sequence[str]) -> str:
        """Name the sources whose rows do not have these digests."""
        if self.mixture is None:
            return "data.train_path, data.max_train_rows, filters"
        sources = zip(self.mixture.names, self._digests, digests, strict=True)
        return ", ".join(f"data.train_sets.{name}" for name, own, old in sources if own != old)


_Part = dict[str, Any]
"""A part of an epoch that was trained on a fixed number of ranks, as JSON values: `taken`, the
number of rows that each rank took from its shard, and `left`, the rows of these that each rank had
not trained when the part ended.
"""


class ShardedOrder(EpochOrder):
    """The rows of one rank, epoch after epoch, with a position that other group sizes can continue.

    Example: 5 rows, not shuffled, rank 1 of 2: `take(9)` is [1, 3].
    """

    def __init__(
        self,
        num_rows: int,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        check_rank(rank, num_ranks)
        self.rank = rank
        self.num_ranks = num_ranks
        super().__init__(num_rows, seed=seed, shuffle=shuffle)

    def start_epoch(self, epoch: int | None = None) -> None:
        """Begin `epoch`, by default the next one, on the current number of ranks."""
        self._history: list[_Part] = []
        super().start_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; the states of all ranks together are the global position."""
        return {
            "version": _SHARD_VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_rows": self.num_rows,
            "epoch": self.epoch,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "position": self._position,
            "history": self._history,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the rows of `state`, which a rank of the same number of ranks wrote.

        Raises ValueError for a state of other rows, another seed or another number of ranks; see
        `load_global_state` for the latter.
        """
        self._check(state)
        for name in ("rank", "num_ranks"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"the state belongs to {name}={state[name]}, this is {name}="
                    f"{getattr(self, name)}; pass the states of all ranks to `load_global_state`"
                )
        self._restore(state, int(state["position"]))

    def load_global_state(
        self, states: Sequence[Mapping[str, Any]], untrained: Sequence[Sequence[int]] = ()
    ) -> None:
        """Continue the epoch of a group of any size, from the states of all its ranks.

        `untrained` are the rows that each of them had taken and not trained. They come first; the
        other rows follow in the order of the epoch. Ranks may be in different epochs (with
        `tail="wrap"`) only if their number is unchanged. Raises ValueError for incomplete or
        different states.
        """
        states = sorted(states, key=lambda state: state["rank"])
        _check_group(states)
        if untrained and len(untrained) != len(states):
            raise ValueError(
                f"untrained has {len(untrained)} lists of rows for {len(states)} ranks; pass one"
                " list per rank"
            )
        epochs = {state["epoch"] for state in states}
        if len(epochs) > 1:
            raise ValueError(
                f"the ranks are in different epochs {sorted(epochs)}, so their rows cannot be"
                " dealt out again; resume on the same number of ranks"
            )
        for state in states:
            self._check(state)
        left = [list(map(int, rows)) for rows in untrained]
        taken = [int(state["position"]) for state in states]
        self._restore(states[0], 0, {"taken": taken, "left": left})

    def _restore(self, state: Mapping[str, Any], position: int, *new_parts: _Part) -> None:
        self._epoch = int(state["epoch"])
        self._history = [*state["history"], *new_parts]
        self._order = self._order_of_epoch()
        self._position = position

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is a position in the same order of the same rows."""
        if state.get("version") != _SHARD_VERSION:
            raise ValueError(
                f"the state of the order has version {state.get('version')}, this is version"
                f" {_SHARD_VERSION}; continue with the version that wrote it"
            )
        for name in ("num_rows", "seed", "shuffle"):
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"the state was written with {name}={state.get(name)}, here {name}="
                    f"{getattr(self, name)}: another order of the rows; use the same {name}, or"
                    " start a new run"
                )

    def _order_of_epoch(self) -> np.ndarray:
        rows = super()._order_of_epoch()
        for part in self._history:
            rows = _rows_after(rows, part)
        return rows[self.rank :: self.num_ranks]


def check_rank(rank: int, num_ranks: int) -> None:
    """Raise ValueError unless there is such a rank."""
    check_integer("num_ranks", num_ranks, 1)
    if check_integer("rank", rank, 0) >= num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}; it must be from 0 to {num_ranks - 1}")


def _check_group(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless `states`, sorted by rank, are from all ranks of one group."""
    if not states or len(states) != states[0]["num_ranks"]:
        raise ValueError(
            f"{len(states)} states were given; the states of all"
            f" {states[0]['num_ranks'] if states else 'former'} ranks are needed"
        )
    ranks = [state["rank"] for state in states]
    if ranks != list(range(len(states))):
        raise ValueError(
            f"the states belong to the ranks {ranks}; one state of each of the {len(states)}"
            " ranks is needed"
        )
    for state in states:
        if (state["num_ranks"], state["history"]) != (len(states), states[0]["history"]):
            raise ValueError(
                f"the state of rank {state['rank']} belongs to another part of the epoch than that"
                " of rank 0: the group had another size then; pass states of one checkpoint"
            )


def _rows_after(rows: np.ndarray, part: _Part) -> np.ndarray:
    """Return the rows of an order, int64, that are untrained after `part`: first those taken."""
    is_taken = np.zeros(len(rows), dtype=bool)
    for rank, num_taken in enumerate(part["taken"]):
        own = np.arange(rank, len(rows), len(part["taken"]))
        is_taken[own[:num_taken]] = True
    left = np.array([row for rows in part["left"] for row in rows], dtype=np.int64)
    return np.concatenate([left, rows[~is_taken]])


def _shown(value: object) -> str:
    """Return a value as YAML writes it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return str(value)
