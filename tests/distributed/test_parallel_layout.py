from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.distributed.parallel_layout import AXES, Axis, Topology

DEGREES = st.integers(1, 4)
TOPOLOGIES = st.builds(Topology, pp=DEGREES, dp=DEGREES, cp=DEGREES, tp=DEGREES)


@given(TOPOLOGIES)
@settings(max_examples=60)
def test_coordinates_and_rank_are_inverse(topology: Topology) -> None:
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert len(set(places)) == topology.world_size
    for rank, place in enumerate(places):
        assert topology.rank(**place._asdict()) == rank
        assert all(
            0 <= coordinate < degree
            for coordinate, degree in zip(place, topology.shape, strict=True)
        )


@given(TOPOLOGIES)
@settings(max_examples=60)
def test_tp_varies_fastest_then_cp_then_dp_then_pp(topology: Topology) -> None:
    # As an order of tuples (pp, dp, cp, tp): ranks count up in it.
    places = [topology.coordinates(rank) for rank in range(topology.world_size)]
    assert places == sorted(places)


@given(TOPOLOGIES, st.lists(st.sampled_from(AXES), unique=True))
@settings(max_examples=80)
def test_groups_partition_the_world_and_vary_only_along_their_axes(
    topology: Topology, axes: list[Axis]
) -> None:
    groups = topology.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        for axis in AXES:
            values = {getattr(topology.coordinates(rank), axis) for rank in group}
            assert len(values) == (getattr(topology, axis) if axis in axes else 1)


@given(TOPOLOGIES)
@settings(max_examples=60)
def test_each_dp_rank_has_its_replicas_and_one_output_rank(topology: Topology) -> None:
    for dp_rank in range(topology.dp):
        replicas = topology.replicas(dp_rank)
        assert len(replicas) == topology.pp * topology.cp * topology.tp
        assert topology.output_rank(dp_rank) in replicas
        output = topology.coordinates(topology.output_rank(dp_rank))
        assert (output.pp, output.cp, output.tp) == (topology.pp - 1, 0, 0)
    assert sorted(rank for dp in range(topology.dp) for rank in topology.replicas(dp)) == list(
        range(topology.world_size)
    )


def test_the_documented_example() -> None:
    topology = Topology(dp=2, tp=2)
    assert topology.world_size == 4
    assert topology.coordinates(3) == (0, 1, 0, 1)
    assert topology.groups("tp") == ((0, 1), (2, 3))
    assert topology.groups("dp") == ((0, 2), (1, 3))
    assert topology.groups("dp", "tp") == ((0, 1, 2, 3),)
    assert [topology.output_rank(dp_rank) for dp_rank in range(2)] == [0, 2]
    assert str(topology) == "pp 1 x dp 2 x cp 1 x tp 2"


def test_dp_takes_what_the_other_axes_leave() -> None:
    assert Topology.from_world_size(12, pp=3, tp=2) == Topology(pp=3, dp=2, tp=2)
    assert Topology.from_world_size(5) == Topology(dp=5)


@pytest.mark.parametrize(
    ("world_size", "nearest"),
    [(8, "use 6 or 12 workers"), (3, "use 6 workers"), (0, "use 6 workers")],
)
def test_a_world_that_does_not_divide_shows_the_product_and_the_nearest_sizes(
    world_size: int, nearest: str
) -> None:
    with pytest.raises(
        ValueError, match=rf"{world_size} workers .* pp 1 x cp 3 x tp 2 = 6 workers; {nearest}"
    ):
        Topology.from_world_size(world_size, cp=3, tp=2)


def test_wrong_degrees_ranks_and_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match="cp is 0"):
        Topology(cp=0)
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4"):
        Topology(dp=4).coordinates(4)
    with pytest.raises(ValueError, match="tp 1 is outside the axis, which has 1"):
        Topology(dp=4).rank(tp=1)
