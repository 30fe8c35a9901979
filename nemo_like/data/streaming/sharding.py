"""One permutation of the rows per (seed, epoch), and the strides of ranks and workers in it.

All ranks compute the same permutation, so a shard is known from (rank, number of ranks) alone. An
epoch that continues on another number of ranks deals out the rows that no rank has trained yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.data.row_order import epoch_permutation
from nemo_like.integer_math import check_integer

_VERSION = 1


def shard_stride(rank: int, num_ranks: int, worker: int = 0, num_workers: int = 1) -> slice:
    """Return the positions of a loader worker in an order: every `num_ranks * num_workers`-th one.

    The order of the rows of a rank does not depend on the number of workers if their rows are taken
    in turns: worker w has the rows w, w + num_workers, ... of its rank.
    Raises ValueError for an index out of range.
    """
    check_integer("num_ranks", num_ranks, 1)
    if check_integer("rank", rank, 0) >= num_ranks:
        raise ValueError(f"rank {rank} of {num_ranks}; it must be from 0 to {num_ranks - 1}")
    if not 0 <= worker < num_workers:
        raise ValueError(
            f"worker {worker} of {num_workers}; it must be from 0 to {num_workers - 1}"
        )
    return slice(rank + worker * num_ranks, None, num_ranks * num_workers)


@dataclass(frozen=True)
class _Part:
    """A part of an epoch that was trained on a fixed number of ranks, as plain values."""

    taken: tuple[int, ...]
    """Rows that each rank took from its shard."""
    left: tuple[tuple[int, ...], ...]
    """Rows of these that each rank had not trained when the part ended."""


class ShardedOrder:
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
        shard_stride(rank, num_ranks)
        check_integer("seed", seed, 0)
        self.num_rows = check_integer("num_rows", num_rows, 0)
        self.rank = rank
        self.num_ranks = num_ranks
        self.seed = seed
        self.shuffle = shuffle
        self.epoch = 0
        self._history: list[_Part] = []
        self._position = 0
        self._shard = self._own_shard()

    @property
    def num_left(self) -> int:
        """Rows of this rank that were not taken in this epoch."""
        return len(self._shard) - self._position

    @property
    def left(self) -> np.ndarray:
        """Rows of this rank that were not taken in this epoch, in order, int64 [num_left]."""
        return self._shard[self._position :]

    def take(self, num_rows: int) -> np.ndarray:
        """Return the next rows of this rank, int64 [at most num_rows], and advance."""
        rows = self._shard[self._position : self._position + num_rows]
        self._position += len(rows)
        return rows

    def start_epoch(self, epoch: int | None = None) -> None:
        """Begin `epoch`, by default the next one, on the current number of ranks."""
        self.epoch = self.epoch + 1 if epoch is None else check_integer("epoch", epoch, 0)
        self._history = []
        self._position = 0
        self._shard = self._own_shard()

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values; the states of all ranks together are the global position."""
        return {
            "version": _VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_rows": self.num_rows,
            "epoch": self.epoch,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "position": self._position,
            "history": [
                {"taken": list(part.taken), "left": [list(rows) for rows in part.left]}
                for part in self._history
            ],
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
                    f"the state is that of {name}={state[name]}, this is {name}="
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
        left = [tuple(map(int, rows)) for rows in untrained] or [()] * len(states)
        part = _Part(tuple(int(state["position"]) for state in states), tuple(left))
        self._restore(states[0], 0)
        self._history.append(part)
        self._shard = self._own_shard()

    def _restore(self, state: Mapping[str, Any], position: int) -> None:
        self.epoch = int(state["epoch"])
        self._history = []
        for part in state["history"]:
            left = tuple(tuple(rows) for rows in part["left"])
            self._history.append(_Part(tuple(part["taken"]), left))
        self._position = position
        self._shard = self._own_shard()

    def _check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `state` is a position in the same order of the same rows."""
        if state.get("version") != _VERSION:
            raise ValueError(
                f"the state of the order has version {state.get('version')}, this is version"
                f" {_VERSION}; continue with the version that wrote it"
            )
        for name in ("num_rows", "seed", "shuffle"):
            if state.get(name) != getattr(self, name):
                raise ValueError(
                    f"the state was written with {name}={state.get(name)}, here {name}="
                    f"{getattr(self, name)}: another order of the rows; use the same {name}, or"
                    " start a new run"
                )

    def _own_shard(self) -> np.ndarray:
        """Return the rows of this rank in this epoch, int64."""
        rows = epoch_permutation(self.num_rows, self.seed, self.epoch, shuffle=self.shuffle)
        for part in self._history:
            rows = _rows_after(rows, part)
        return rows[shard_stride(self.rank, self.num_ranks)]


def _check_group(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError unless `states`, sorted by rank, are those of all ranks of one group."""
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
    for rank, num_taken in enumerate(part.taken):
        own = np.arange(rank, len(rows), len(part.taken))
        is_taken[own[:num_taken]] = True
    left = np.array([row for rows in part.left for row in rows], dtype=np.int64)
    return np.concatenate([left, rows[~is_taken]])
