"""Which rank sits where on the axes pp, dp, cp and tp. Pure arithmetic: no process groups, no Ray.

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
    """A rank's place along each axis."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """The degrees of the four axes.

    Example: `Topology(dp=2, tp=2)` has 4 ranks; rank 3 is dp 1, tp 1; the tp groups are (0, 1) and
    (2, 3), the dp groups (0, 2) and (1, 3); ranks 0 and 2 are the output ranks of dp 0 and dp 1.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            degree = getattr(self, axis)
            if degree < 1:
                raise ValueError(
                    f"{axis} is {degree}; every axis has a degree of at least 1 (1 turns it off)"
                )

    @classmethod
    def from_world_size(cls, world_size: int, *, pp: int = 1, cp: int = 1, tp: int = 1) -> Topology:
        """The topology of `world_size` ranks in which dp takes what the other axes leave.

        Raises ValueError, with the product spelled out and the nearest legal sizes, if they do not
        divide it.
        """
        replica_size = pp * cp * tp
        num_replicas, remainder = divmod(world_size, replica_size)
        if remainder or num_replicas == 0:
            nearest = [
                size
                for size in (num_replicas * replica_size, (num_replicas + 1) * replica_size)
                if size > 0
            ]
            raise ValueError(
                f"{world_size} workers cannot be split into whole replicas of"
                f" pp {pp} x cp {cp} x tp {tp} = {replica_size} workers; use"
                f" {' or '.join(map(str, nearest))} workers"
            )
        return cls(pp=pp, dp=num_replicas, cp=cp, tp=tp)

    @property
    def shape(self) -> Coordinates:
        return Coordinates(self.pp, self.dp, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def rank(self, *, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The global rank at these coordinates; raises ValueError outside the topology."""
        for axis, coordinate, degree in zip(AXES, (pp, dp, cp, tp), self.shape, strict=True):
            if not 0 <= coordinate < degree:
                raise ValueError(f"{axis} {coordinate} is outside the axis, which has {degree}")
        return ((pp * self.dp + dp) * self.cp + cp) * self.tp + tp

    def coordinates(self, rank: int) -> Coordinates:
        """The inverse of `rank`; raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside the world of {self.world_size} = {self}")
        rank, tp = divmod(rank, self.tp)
        rank, cp = divmod(rank, self.cp)
        pp, dp = divmod(rank, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def dp_rank(self, rank: int) -> int:
        """Which shard of the data `rank` works on."""
        return self.coordinates(rank).dp

    def is_output_rank(self, rank: int) -> bool:
        """Whether this rank speaks for its dp rank: the last pipeline stage, first of cp and tp."""
        place = self.coordinates(rank)
        return place.pp == self.pp - 1 and place.cp == 0 and place.tp == 0

    def output_rank(self, dp_rank: int) -> int:
        """The one output rank of a dp rank."""
        return self.rank(pp=self.pp - 1, dp=dp_rank)

    def replicas(self, dp_rank: int) -> tuple[int, ...]:
        """All ranks that work on the shard of `dp_rank`, in rank order."""
        return tuple(rank for rank in range(self.world_size) if self.dp_rank(rank) == dp_rank)

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """The ranks that differ only along `axes`, one tuple per place on the other axes; every
        rank is in exactly one.

        Example: `Topology(dp=2, tp=2).groups("tp") == ((0, 1), (2, 3))`; `.groups("dp", "tp") ==
        ((0, 1, 2, 3),)`.
        """
        fixed = [axis for axis in AXES if axis not in axes]
        groups: dict[tuple[int, ...], list[int]] = {}
        for coordinates in itertools.product(*map(range, self.shape)):
            place = Coordinates(*coordinates)
            groups.setdefault(tuple(getattr(place, axis) for axis in fixed), []).append(
                self.rank(**place._asdict())
            )
        return tuple(tuple(ranks) for ranks in groups.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {degree}" for axis, degree in zip(AXES, self.shape, strict=True))
