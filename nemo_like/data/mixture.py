"""Mixture of several sources of rows by weight, deterministic and resumable.

Row k (from 0) of a source with weight w has the time (k + 1/2) / w, and the mixture visits the rows
of all sources by increasing time. After n rows a source with share s of S sources has given s n
rows, to within 1/2 + s S / 2. The position is the number of rows of each source.

Within a source the rows follow its own `RowOrder`, pass after pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.row_order import Curriculum, RowOrder


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
        for weight in self.weights:
            if not (math.isfinite(weight) and weight > 0):
                raise ValueError(f"a weight is a finite number above 0, got {weight!r}")


class MixtureOrder:
    """Row indices of a mixture in visiting order; has the interface of `RowOrder`.

    An epoch has as many rows as all sources together. A source that is smaller than its share is
    repeated within it, each time in a new order; a larger one continues in the next epoch where it
    stopped. The shares hold over all epochs, not only within each.
    """

    def __init__(
        self,
        mixture: Mixture,
        digests: Sequence[str],
        *,
        seed: int = 0,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        """Initialize from `digests`, a hash of the rows of each source.

        With a `curriculum` the rows of each source are visited by increasing difficulty.
        """
        self.mixture = mixture
        self._weights = np.array(mixture.weights, dtype=np.float64)
        self._offsets = np.cumsum([0, *mixture.sizes])[:-1]
        self._orders: list[RowOrder] = []
        for offset, size, digest in zip(self._offsets, mixture.sizes, digests, strict=True):
            own_curriculum = None
            if curriculum is not None:
                difficulty = curriculum.difficulty[offset : offset + size]
                own_curriculum = Curriculum(curriculum.name, difficulty)
            order = RowOrder(size, digest, seed=seed, shuffle=shuffle, curriculum=own_curriculum)
            self._orders.append(order)
        self._num_rows = sum(mixture.sizes)
        self._epoch = 0
        self._position = 0
        self._taken = np.zeros(len(mixture.sizes), dtype=np.int64)

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
        # Sources may have lost rows between two runs (data.allow_changed_rows).
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
        """Return the rows of the next `num_rows` visits, at most of two epochs, each once, in the
        order of the first visit, int64 [at most N].
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
        twin = copy.copy(self)
        twin._orders = [order.copy() for order in self._orders]
        return twin

    def sources_of(self, rows: Sequence[int]) -> np.ndarray:
        """Return the index of the source of each of `rows`, int64 [n]."""
        return np.searchsorted(self._offsets, rows, side="right") - 1

    def take(self, num_rows: int) -> np.ndarray:
        """Return the next rows of this epoch, int64 [at most `num_rows`], and advance."""
        num_rows = min(num_rows, self.num_left)
        sources = self._next_sources(num_rows)
        rows = np.empty(num_rows, dtype=np.int64)
        for source, order in enumerate(self._orders):
            places = np.flatnonzero(sources == source)
            rows[places] = self._offsets[source] + _take_from(order, len(places))
        self._position += num_rows
        self._taken = self._taken + np.bincount(sources, minlength=len(self._orders))
        return rows

    def _next_sources(self, num_rows: int) -> np.ndarray:
        """Return the source of each of the next rows, int64 [num_rows]."""
        num_sources = len(self._orders)
        # At most so many of the next rows are of one source, see the bound above.
        shares = self._weights / self._weights.sum()
        limits = np.ceil(shares * (num_rows + num_sources)).astype(np.int64) + 1
        sources = np.repeat(np.arange(num_sources), limits)
        rows = np.concatenate([np.arange(n) + k for k, n in zip(self._taken, limits, strict=True)])
        times = (rows + 0.5) / self._weights[sources]
        return sources[np.argsort(times, kind="stable")[:num_rows]]

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Restore the position if the block raises."""
        before = self.copy()
        try:
            yield
        except BaseException:
            self.__dict__.update(before.__dict__)
            raise

    def start_epoch(self) -> None:
        """Begin the next epoch. Rows left in this one are the first of the next."""
        self._epoch += 1
        self._position = 0

    def restart_epoch(self) -> None:
        """Go back to the first row of this epoch, and of the pass of each source."""
        for order in self._orders:
            order.restart_epoch()
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
            "num_taken": self._taken.tolist(),
            "sources": sources,
        }

    def load_state_dict(self, state: dict[str, Any], *, allow_changed_rows: bool = False) -> bool:
        """Continue after the last row that was visited when `state` was taken.

        For changed rows of a source see `RowOrder.load_state_dict`. Raises ConfigError for other
        sources or weights.
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
        is_same = True
        for name, order in zip(self.mixture.names, self._orders, strict=True):
            own_state = state["sources"][name]
            try:
                is_same &= order.load_state_dict(own_state, allow_changed_rows=allow_changed_rows)
            except ConfigError as error:
                raise ConfigError(f"data.train_sets.{name}: {error}") from error
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._taken = np.array(state["num_taken"], dtype=np.int64)
        return is_same


def open_order(
    num_rows: int,
    digests: Sequence[str],
    mixture: Mixture | None = None,
    *,
    seed: int = 0,
    shuffle: bool = True,
    curriculum: Curriculum | None = None,
) -> RowOrder | MixtureOrder:
    """Return the order of rows with one of `digests` per source: of one source, or of a mixture."""
    if mixture is None:
        (digest,) = digests
        return RowOrder(num_rows, digest, seed=seed, shuffle=shuffle, curriculum=curriculum)
    return MixtureOrder(mixture, digests, seed=seed, shuffle=shuffle, curriculum=curriculum)


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
