"""Curriculum: rows in the order of their difficulty, the same for every number of ranks.

A curriculum is either a complete order (`curriculum_order`), or a schedule that raises the
difficulty up to which rows are drawn (`CurriculumSampler`). Both are functions of the difficulties,
the seed, the epoch and the step only; `rank_rows` deals their result to ranks.
"""

from __future__ import annotations

import heapq
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

logger = logging.getLogger(__name__)


def length_difficulty(rows: Iterable[Mapping[str, Any]], column: str = "input_ids") -> np.ndarray:
    """Return the number of items in `column` of each row, float64 [N]. Raises ValueError."""
    return function_difficulty(rows, lambda row: len(row[column]))


def column_difficulty(rows: Iterable[Mapping[str, Any]], column: str) -> np.ndarray:
    """Return the number in `column` of each row, float64 [N]. Raises ValueError."""
    return function_difficulty(rows, lambda row: row[column])


def function_difficulty(
    rows: Iterable[Mapping[str, Any]], function: Callable[[Mapping[str, Any]], float]
) -> np.ndarray:
    """Return `function(row)` of each row, float64 [N].

    Raises ValueError with the number of the row if its difficulty is not a finite number.
    """
    values = []
    for number, row in enumerate(rows):
        try:
            value = float(function(row))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"row {number} has no difficulty: {error!r}") from error
        if not math.isfinite(value):
            raise ValueError(f"row {number} has difficulty {value}: give a finite number")
        values.append(value)
    return np.array(values, dtype=np.float64)


def curriculum_order(difficulty: np.ndarray, *, seed: int, epoch: int) -> np.ndarray:
    """Return the rows by increasing difficulty, int64 [N].

    `difficulty` is [N] of any real dtype. Rows of equal difficulty are ordered by a hash of the
    seed, the epoch and the row. Raises ValueError for a difficulty that is not finite.
    """
    row_ids = np.arange(len(difficulty))
    keys = curriculum_keys(difficulty, row_ids, seed=seed, epoch=epoch)
    return np.lexsort(keys.T[::-1]).astype(np.int64)


def curriculum_keys(
    difficulty: np.ndarray, row_ids: np.ndarray, *, seed: int, epoch: int
) -> np.ndarray:
    """Return the difficulty, a hash and the id of rows, float64 [n, 3].

    Sorted lexicographically, the last column is `curriculum_order`. For rows that are spread over
    ranks, `sample_sort.sample_sort` sorts them and `sample_sort.deal_interleaved` gives each rank
    what `rank_rows` would. `difficulty` is [n] of any real dtype; `row_ids` are integers [n], the
    indices of the rows among all N < 2^53. Raises ValueError for a difficulty that is not finite.
    """
    values = _checked_difficulty(difficulty)
    if row_ids.shape != values.shape:
        raise ValueError(f"row_ids has shape {row_ids.shape}: give {values.shape}")
    # float64 holds integers of 53 bits exactly.
    hashes = _row_hashes(row_ids, seed, epoch) >> np.uint64(11)
    return np.stack([values, hashes.astype(np.float64), row_ids.astype(np.float64)], axis=1)


def rank_rows(order: np.ndarray, rank: int, num_ranks: int) -> np.ndarray:
    """Return the rows of one rank: every `num_ranks`-th of `order` int64 [N], from `rank` on.

    Ranks have equally many rows to within 1, and at each position rows of nearly the same
    difficulty. Raises ValueError for a rank outside 0 to `num_ranks` - 1.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank is {rank}: give 0 to {num_ranks - 1}")
    return order[rank::num_ranks]


@dataclass(frozen=True)
class DifficultySchedule:
    """Maximum difficulty of the rows of each step.

    With p = min(step / num_steps, 1), the difficulty is

    * `constant`: end
    * `linear`: start + (end - start) × p
    * `root`: start + (end - start) × p^(1 / degree); degree 2 is the square root
    * `discrete`: `levels[i]`, where i is the number of `boundaries` that are at most the step
    """

    kind: Literal["constant", "linear", "root", "discrete"]
    start: float = 0.0
    end: float = 0.0
    num_steps: int = 1
    degree: float = 2.0
    levels: tuple[float, ...] = ()
    boundaries: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("constant", "linear", "root", "discrete"):
            raise ValueError(f"kind is {self.kind!r}: give constant, linear, root or discrete")
        if self.num_steps < 1:
            raise ValueError(f"num_steps is {self.num_steps}: give at least 1")
        if not self.degree > 0:
            raise ValueError(f"degree is {self.degree}: give a number above 0")
        for name in ("start", "end", "levels"):
            if not np.isfinite(getattr(self, name)).all():
                raise ValueError(f"{name} is {getattr(self, name)}: give finite numbers")
        if self.kind != "discrete":
            return
        if len(self.levels) != len(self.boundaries) + 1:
            raise ValueError(
                f"{len(self.levels)} levels have {len(self.boundaries)} boundaries: give one "
                "boundary, a step, between each two levels"
            )
        if list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError(f"boundaries are {self.boundaries}: give increasing steps")

    def at(self, step: int) -> float:
        """Return the maximum difficulty of a step, counted from 0."""
        if self.kind == "constant":
            return self.end
        if self.kind == "discrete":
            return self.levels[bisect_right(self.boundaries, step)]
        progress = min(step / self.num_steps, 1.0)
        if self.kind == "root":
            progress = progress ** (1 / self.degree)
        return self.start + (self.end - self.start) * progress


class CurriculumSampler:
    """Draws the rows of each step from those up to the difficulty of a schedule.

    Rows that become eligible join the others, and rows are drawn in the order of a hash of seed,
    epoch and row. An epoch has each row exactly once. If fewer rows are eligible than a step
    requires, the difficulty is raised until there are enough: rows are never repeated. Such steps
    are counted in `num_early_raises`, and the first, second, fourth, eighth, ... is logged. The
    last step of an epoch may have fewer rows.

    Every rank draws the same rows and selects its own with `rank_rows`.

    Example: difficulties 1 to 8 and the levels 2, 4, 8 at steps 0, 1, 2: with two rows per step,
    step 0 has rows 0 and 1, step 1 rows 2 and 3, the following any of the others.
    """

    def __init__(
        self, difficulty: np.ndarray, schedule: DifficultySchedule, *, seed: int = 0
    ) -> None:
        """Initialize from `difficulty` [N] of any real dtype. Raises ValueError."""
        self._difficulty = _checked_difficulty(difficulty)
        self._schedule = schedule
        self._seed = seed
        self._by_difficulty = np.argsort(self._difficulty, kind="stable")
        self._sorted_difficulty = self._difficulty[self._by_difficulty]
        self._epoch = 0
        self._step = 0
        self._num_early_raises = 0
        self._reset_epoch()

    @property
    def epoch(self) -> int:
        """Number of `start_epoch` calls."""
        return self._epoch

    @property
    def step(self) -> int:
        """Number of `take` calls in all epochs."""
        return self._step

    @property
    def num_left(self) -> int:
        """Rows of this epoch that were not drawn yet."""
        return self._num_left

    @property
    def num_early_raises(self) -> int:
        """Steps in all epochs whose difficulty was raised above the schedule."""
        return self._num_early_raises

    def take(self, num_rows: int) -> np.ndarray:
        """Draw the rows of the next step, int64 [n]; n is less than `num_rows` at the end only.

        Raises ValueError for `num_rows` below 1, and at the end of an epoch.
        """
        if num_rows < 1:
            raise ValueError(f"num_rows is {num_rows}: give at least 1")
        if self.num_left == 0:
            raise ValueError(f"epoch {self._epoch} has no more rows: call start_epoch first")
        scheduled = self._schedule.at(self._step)
        self._join(int(np.searchsorted(self._sorted_difficulty, scheduled, side="right")))
        num_missing = min(num_rows, self.num_left) - len(self._eligible)
        if num_missing > 0:
            self._raise_difficulty(num_missing, scheduled)
        num_drawn = min(num_rows, len(self._eligible))
        positions = [heapq.heappop(self._eligible) for _ in range(num_drawn)]
        rows = self._by_hash[positions]
        self._is_drawn[rows] = True
        self._num_left -= num_drawn
        self._step += 1
        return rows

    def start_epoch(self) -> None:
        """Make all rows available again; steps of the schedule continue.

        Raises ValueError if the epoch has rows left.
        """
        if self.num_left:
            raise ValueError(f"epoch {self._epoch} has {self.num_left} rows left: draw them first")
        self._epoch += 1
        self._reset_epoch()

    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON serializable: N / 4 characters for the drawn rows."""
        return {
            "num_rows": len(self._difficulty),
            "seed": self._seed,
            "epoch": self._epoch,
            "step": self._step,
            "num_early_raises": self._num_early_raises,
            "num_joined": self._num_joined,
            "drawn": np.packbits(self._is_drawn).tobytes().hex(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a position exactly.

        Raises ValueError if the state has another number of rows or another seed.
        """
        expected = {"num_rows": len(self._difficulty), "seed": self._seed}
        for name, value in expected.items():
            if state_dict[name] != value:
                raise ValueError(
                    f"the state has {name}={state_dict[name]}, this sampler {value}: use the rows "
                    "and the seed of the state"
                )
        self._epoch = state_dict["epoch"]
        self._step = state_dict["step"]
        self._num_early_raises = state_dict["num_early_raises"]
        self._reset_epoch()
        bits = np.frombuffer(bytes.fromhex(state_dict["drawn"]), dtype=np.uint8)
        self._is_drawn = np.unpackbits(bits, count=len(self._difficulty)).astype(bool)
        self._num_left -= int(self._is_drawn.sum())
        self._join(state_dict["num_joined"])

    def _reset_epoch(self) -> None:
        """Make all rows of the present epoch available and none eligible."""
        row_ids = np.arange(len(self._difficulty))
        hashes = _row_hashes(row_ids, self._seed, self._epoch)
        self._by_hash = np.argsort(hashes, kind="stable").astype(np.int64)
        self._hash_position = np.empty_like(self._by_hash)
        self._hash_position[self._by_hash] = np.arange(len(self._by_hash))
        self._is_drawn = np.zeros(len(self._difficulty), dtype=bool)
        self._num_left = len(self._difficulty)
        self._num_joined = 0
        # A heap of positions in `_by_hash`: the drawing order does not depend on when rows joined.
        self._eligible: list[int] = []

    def _join(self, num_joined: int) -> None:
        """Make the first `num_joined` rows by difficulty eligible, except those drawn already."""
        if num_joined <= self._num_joined:
            return
        rows = self._by_difficulty[self._num_joined : num_joined]
        self._num_joined = num_joined
        positions = self._hash_position[rows[~self._is_drawn[rows]]].tolist()
        if len(positions) > len(self._eligible) // 16:
            self._eligible += positions
            heapq.heapify(self._eligible)
        else:
            for position in positions:
                heapq.heappush(self._eligible, position)

    def _raise_difficulty(self, num_missing: int, scheduled: float) -> None:
        """Make at least `num_missing` more rows eligible, and all others of their difficulty."""
        # Rows beyond the eligible ones have not been drawn.
        required = self._sorted_difficulty[self._num_joined + num_missing - 1]
        self._join(int(np.searchsorted(self._sorted_difficulty, required, side="right")))
        self._num_early_raises += 1
        # A schedule that ends below the largest difficulty raises it on very many steps.
        if self._num_early_raises.bit_count() > 1:
            return
        logger.warning(
            "step %d raised the difficulty from %g to %g, since too few rows were left "
            "(%d such steps so far)",
            self._step,
            scheduled,
            required,
            self._num_early_raises,
        )


def _checked_difficulty(difficulty: np.ndarray) -> np.ndarray:
    """Return `difficulty` as float64 [N]; raises ValueError unless all are finite."""
    values = np.asarray(difficulty, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(f"difficulty has shape {values.shape}: give [N]")
    if not np.isfinite(values).all():
        row = int(np.argmin(np.isfinite(values)))
        raise ValueError(f"row {row} has difficulty {values[row]}: give a finite number")
    return values


def _row_hashes(row_ids: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Hash the seed, the epoch and each row id, integers [n]; uint64 [n], distinct per row."""
    salt = _mix(np.array([seed % 2**64], dtype=np.uint64))
    salt = _mix(salt ^ np.uint64(epoch))
    # `_mix` is bijective, so different rows have different hashes.
    return _mix(salt ^ row_ids.astype(np.uint64))


def _mix(values: np.ndarray) -> np.ndarray:
    """Hash uint64 [N] bijectively: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
