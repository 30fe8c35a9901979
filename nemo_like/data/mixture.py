"""Mixture of several sources of rows by weight, deterministic and exactly resumable.

The source of every position follows from the weights alone: after n rows, source s with share w_s
has given c_s rows with |c_s - w_s n| < 1, for every n. The rule is earliest deadline first over the
windows of Pfair scheduling (Baruah, Cohen, Plaxton, Varvel, "Proportionate Progress", 1996; the
bound is that of Tijdeman's chairman assignment problem, 1980). For the simpler rule of the largest
deficit the difference reaches one row, e.g. with weights 1, 20, 18, 1 and 22. Arithmetic is in
integers, so it is exact at any position.

Within a source the rows come in the order of its own `RowOrder`, pass after pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.row_order import Curriculum, RowOrder

_MAX_SOURCES = 1024
_MIN_GROWTH = 1024
"""Positions by which the computed part of a schedule grows at least."""


@dataclass(frozen=True)
class Mixture:
    """The sources of a data set, whose rows follow each other in the order of the sources."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Number of rows of each source."""
    weights: tuple[float, ...]
    """Relative weight of each source, above 0; their sum need not be 1."""

    def __post_init__(self) -> None:
        """Raise ValueError for sources that do not fit together."""
        if not len(self.names) == len(self.sizes) == len(self.weights) > 0:
            raise ValueError(
                f"a mixture needs one size and one weight per source, got {len(self.names)} names,"
                f" {len(self.sizes)} sizes and {len(self.weights)} weights"
            )
        if min(self.sizes) < 1:
            raise ValueError(f"every source needs a row, got sizes {self.sizes}")


class SourceSchedule:
    """Source of every position of a mixture.

    Example: with weights 2 and 1 the sources are 0 0 1, repeated.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Initialize from relative weights. Raises ValueError unless all are finite and above 0."""
        if not 0 < len(weights) <= _MAX_SOURCES:
            raise ValueError(f"a mixture has 1 to {_MAX_SOURCES} sources, got {len(weights)}")
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"a weight is a finite number above 0, got {weight!r}")
        # The decimal text: 0.1 is one tenth, not the nearest binary fraction.
        fractions = [Fraction(str(weight)) for weight in weights]
        denominator = math.lcm(*(fraction.denominator for fraction in fractions))
        counts = [int(fraction * denominator) for fraction in fractions]
        divisor = math.gcd(*counts)
        self._shares = [count // divisor for count in counts]
        self.period = sum(self._shares)
        """Number of positions after which the sources repeat: every source then has its exact
        share.
        """
        self._sources = np.empty(0, np.int16)
        self._counts = [0] * len(weights)

    def sources(self, start: int, stop: int) -> np.ndarray:
        """Return the sources of the positions [start, stop), int16 [stop - start]."""
        self._extend(min(stop, self.period))
        if stop <= len(self._sources):
            return self._sources[start:stop]
        return self._sources[np.arange(start, stop) % self.period]

    def counts(self, position: int) -> np.ndarray:
        """Return the number of rows of each source before `position`, int64 [S]."""
        num_periods, rest = divmod(position, self.period)
        in_period = np.bincount(self.sources(0, rest), minlength=len(self._shares))
        return num_periods * np.array(self._shares, np.int64) + in_period

    def _extend(self, stop: int) -> None:
        """Compute the sources of the positions before `stop`, at most one period."""
        num_known = len(self._sources)
        if stop <= num_known:
            return
        # Growth by a factor: the cost of many short extensions would be quadratic.
        stop = min(self.period, max(stop, 2 * num_known, _MIN_GROWTH))
        added = [self._next_source(position) for position in range(num_known, stop)]
        self._sources = np.concatenate([self._sources, np.array(added, np.int16)])

    def _next_source(self, position: int) -> int:
        """Return the source of `position`, after those of all positions before.

        Row j (from 1) of source s may come at the positions floor((j - 1) / w_s) up to, but not
        including, ceil(j / w_s). Of the rows that may come now, that with the earliest end is
        taken.
        """
        best = -1
        best_deadline = 0
        for source, share in enumerate(self._shares):
            count = self._counts[source]
            if count * self.period >= share * (position + 1):
                continue
            deadline = -(-(count + 1) * self.period // share)
            if best < 0 or deadline < best_deadline:
                best = source
                best_deadline = deadline
        self._counts[best] += 1
        return best


class MixtureOrder:
    """Row indices of a mixture in visiting order; has the interface of `RowOrder`.

    An epoch has as many rows as all sources together. A source that is smaller than its share is
    repeated within it, each time in a new order; a larger one continues in the next epoch where it
    stopped. The shares hold over all epochs, not only within each.
    """

    def __init__(
        self,
        digests: np.ndarray,
        mixture: Mixture,
        *,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Initialize from `digests` uint64 [N], a hash of the content of each row.

        Raises ValueError if the sizes of the sources do not add up to N. With a `curriculum` the
        rows of each source are visited by increasing difficulty.
        """
        if sum(mixture.sizes) != len(digests):
            raise ValueError(
                f"the sources have {sum(mixture.sizes)} rows together, but {len(digests)} are given"
            )
        self.mixture = mixture
        self._schedule = SourceSchedule(mixture.weights)
        self._offsets = np.cumsum([0, *mixture.sizes])[:-1]
        self._orders: list[RowOrder] = []
        for offset, size in zip(self._offsets, mixture.sizes, strict=True):
            rows = slice(offset, offset + size)
            own_curriculum = None
            if curriculum is not None:
                own_curriculum = Curriculum(curriculum.name, curriculum.difficulty[rows])
            order = RowOrder(
                digests[rows],
                seed=seed,
                shuffle=shuffle,
                curriculum=own_curriculum,
            )
            self._orders.append(order)
        self._num_rows = len(digests)
        self._epoch = 0
        self._position = 0
        self._num_taken = 0

    def __len__(self) -> int:
        """Number of rows of an epoch."""
        return self._num_rows

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def num_left(self) -> int:
        """Number of rows that this epoch has not visited yet."""
        # A source may have lost rows between two runs.
        return max(self._num_rows - self._position, 0)

    @property
    def order(self) -> np.ndarray:
        """Rows that this epoch visits from here on, each once, in the order of the first visit,
        int64 [at most N].
        """
        return _first_visits(self.left)

    @property
    def left(self) -> np.ndarray:
        """Rows that this epoch has not visited yet, in order, int64 [num_left]."""
        return self.copy().take(self.num_left)

    def upcoming(self, num_rows: int) -> np.ndarray:
        """Return the rows of the next `num_rows` visits, at most those of two epochs, each once, in
        the order of the first visit, int64 [at most N].
        """
        later = self.copy()
        num_left = min(num_rows, 2 * len(self))
        parts = [np.empty(0, np.int64)]
        while num_left > 0:
            if later.num_left == 0:
                later.start_epoch()
            parts.append(later.take(num_left))
            num_left -= len(parts[-1])
        return _first_visits(np.concatenate(parts))

    def copy(self) -> MixtureOrder:
        """Return an order at the same position that advances independently."""
        twin = MixtureOrder.__new__(MixtureOrder)
        twin.__dict__.update(self.__dict__)
        twin._orders = [order.copy() for order in self._orders]
        return twin

    def sources_of(self, rows: Sequence[int]) -> np.ndarray:
        """Return the index of the source of each of `rows`, int64 [n]."""
        return np.searchsorted(self._offsets, rows, side="right") - 1

    def take(self, num_rows: int) -> np.ndarray:
        """Return the next rows of this epoch, int64 [at most `num_rows`], and advance."""
        num_rows = min(num_rows, self.num_left)
        sources = self._schedule.sources(self._num_taken, self._num_taken + num_rows)
        rows = np.empty(num_rows, dtype=np.int64)
        for source, order in enumerate(self._orders):
            places = np.flatnonzero(sources == source)
            rows[places] = self._offsets[source] + _take_from(order, len(places))
        self._position += num_rows
        self._num_taken += num_rows
        return rows

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the position if the block raises."""
        saved = (self._epoch, self._position, self._num_taken)
        try:
            with ExitStack() as stack:
                for order in self._orders:
                    stack.enter_context(order.undone_on_error())
                yield
        except BaseException:
            self._epoch, self._position, self._num_taken = saved
            raise

    def start_epoch(self) -> None:
        """Begin the next epoch. Rows left in this one are the first of the next."""
        self._epoch += 1
        self._position = 0

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; their size does not depend on the number of rows."""
        sources = {}
        for name, order in zip(self.mixture.names, self._orders, strict=True):
            sources[name] = order.state_dict()
        return {
            "mixture": _named_weights(self.mixture),
            "epoch": self._epoch,
            "position": self._position,
            "num_taken": self._num_taken,
            "sources": sources,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last row that was visited when `state` was taken.

        Rows that were not visited may have changed since; see `RowOrder.load_state_dict`. Raises
        ConfigError for other sources or weights.
        """
        own = _named_weights(self.mixture)
        if "mixture" not in state:
            raise ConfigError(
                "resume: the checkpoint was written with data.train_path, this run has"
                f" data.train_sets {own}; use the same, or start a new run"
            )
        if state["mixture"] != own:
            raise ConfigError(
                f"resume: the checkpoint was written with data.train_weights {state['mixture']},"
                f" this run has {own}, which is another order of the rows; use the same, or start a"
                " new run. If none are set, they are the numbers of rows of the files"
            )
        for name, order in zip(self.mixture.names, self._orders, strict=True):
            try:
                order.load_state_dict(state["sources"][name])
            except ConfigError as error:
                raise ConfigError(f"data.train_sets.{name}: {error}") from error
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._num_taken = int(state["num_taken"])


def open_order(
    digests: np.ndarray,
    mixture: Mixture | None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    curriculum: Curriculum | None = None,
) -> RowOrder | MixtureOrder:
    """Return the order of rows with `digests` uint64 [N]: of one source, or of a mixture."""
    if mixture is None:
        return RowOrder(digests, seed=seed, shuffle=shuffle, curriculum=curriculum)
    return MixtureOrder(
        digests,
        mixture,
        seed=seed,
        shuffle=shuffle,
        curriculum=curriculum,
    )


def _take_from(order: RowOrder, num_rows: int) -> np.ndarray:
    """Return the next rows of a source, int64 [num_rows], over as many passes as needed."""
    parts = [np.empty(0, np.int64)]
    while num_rows > 0:
        if order.num_left == 0:
            order.start_epoch()
        rows = order.take(num_rows)
        parts.append(rows)
        num_rows -= len(rows)
    return np.concatenate(parts)


def _first_visits(rows: np.ndarray) -> np.ndarray:
    """Return each of `rows` int64 [n] once, in the order of its first occurrence."""
    _, first = np.unique(rows, return_index=True)
    return rows[np.sort(first)]


def _named_weights(mixture: Mixture) -> list[list[Any]]:
    """Return [name, weight] of each source as JSON values.

    A list, because the order of the sources decides between equal deadlines.
    """
    pairs = zip(mixture.names, mixture.weights, strict=True)
    return [[name, float(weight)] for name, weight in pairs]
