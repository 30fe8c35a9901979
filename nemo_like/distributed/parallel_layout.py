"""Rank layout on the axes pp, dp, cp and tp. Pure arithmetic: no process groups, no Ray.

The order is Megatron's "tp-cp-dp-pp": tp varies fastest with the rank, then cp, then dp, and pp is
outermost. So the ranks of one tp group are neighbours and, as workers fill one node after another,
share a node if tp divides its size.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

Axis = Literal["pp", "dp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")
"""Outermost first: the shape of a device mesh whose ranks are in row-major order."""


class Coordinates(NamedTuple):
    """A rank's coordinate along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """The sizes of the four axes.

    Example: `Topology(dp=2, tp=2)` has 4 ranks; rank 3 is dp 1, tp 1; the tp groups are (0, 1) and
    (2, 3), the dp groups (0, 2) and (1, 3); ranks 0 and 2 are the output ranks of dp 0 and dp 1.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if size < 1:
                raise ValueError(
                    f"{axis} is {size}; every axis has a size of at least 1 (1 turns it off)"
                )

    @classmethod
    def from_world_size(cls, world_size: int, *, pp: int = 1, cp: int = 1, tp: int = 1) -> Topology:
        """Return the topology of `world_size` ranks; dp is the number of model replicas.

        Raises ValueError, with the nearest valid world sizes, if pp x cp x tp does not divide it.
        """
        replica_size = pp * cp * tp
        num_replicas, remainder = divmod(world_size, replica_size)
        if remainder or num_replicas == 0:
            smaller = num_replicas * replica_size
            larger = smaller + replica_size
            sizes = f"{smaller} or {larger}" if smaller else str(larger)
            raise ValueError(
                f"{world_size} workers cannot be divided into replicas of"
                f" pp {pp} x cp {cp} x tp {tp} = {replica_size} workers; use {sizes} workers"
            )
        return cls(pp=pp, dp=num_replicas, cp=cp, tp=tp)

    @property
    def shape(self) -> Coordinates:
        return Coordinates(self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Return the global rank at these coordinates. Raises ValueError outside the topology."""
        for axis, coordinate, size in zip(AXES, (pp, dp, cp, tp), self.shape, strict=True):
            if not 0 <= coordinate < size:
                raise ValueError(f"{axis} {coordinate} is outside the axis, which has {size}")
        # Row-major order of [pp, dp, cp, tp].
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size} = {self}")
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def dp_rank(self, rank: int) -> int:
        """Return the data-parallel rank of a global rank."""
        return self.coordinates(rank).dp

    def output_rank(self, dp_rank: int) -> int:
        """Return the rank that returns the results of a dp rank: last pp stage, cp 0, tp 0."""
        # Only the last pipeline stage computes the loss and the log-probs.
        return self.rank(pp=self.pp - 1, dp=dp_rank)

    def replicas(self, dp_rank: int) -> tuple[int, ...]:
        """Return the ranks that get the shard of `dp_rank`, in rank order."""
        ranks = range(self.world_size)
        return tuple(rank for rank in ranks if self.dp_rank(rank) == dp_rank)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """Return the process groups along `axes`: ranks whose other coordinates are equal.

        Every rank is in exactly one group.

        Example: `Topology(dp=2, tp=2).groups("tp") == ((0, 1), (2, 3))`; `.groups("dp", "tp") ==
        ((0, 1, 2, 3),)`.
        """
        # Ranks of one group agree on the coordinates of all other axes, which identify the group.
        fixed = [axis for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for coordinates in itertools.product(*map(range, self.shape)):
            values = Coordinates(*coordinates)._asdict()
            key = tuple(values[axis] for axis in fixed)
            groups.setdefault(key, []).append(self.rank(**values))
        return tuple(tuple(ranks) for ranks in groups.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, self.shape, strict=True))
