from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.parallel_layout import (
    AXES,
    Axis,
    EngineName,
    LayoutError,
    ParallelLayout,
    RowLayout,
    engine_problems,
)

DEGREES = st.integers(1, 4)
LAYOUTS = st.builds(ParallelLayout, pp=DEGREES, dp=DEGREES, cp=DEGREES, tp=DEGREES)


@given(LAYOUTS)
@settings(max_examples=60)
def test_coordinates_and_rank_are_inverse(parallel_layout: ParallelLayout) -> None:
    places = [parallel_layout.coordinates(rank) for rank in range(parallel_layout.world_size)]
    assert len(set(places)) == parallel_layout.world_size
    for rank, place in enumerate(places):
        assert parallel_layout.rank(**place._asdict()) == rank
        assert all(
            0 <= coordinate < degree
            for coordinate, degree in zip(place, parallel_layout.shape, strict=True)
        )


@given(LAYOUTS)
@settings(max_examples=60)
def test_tp_varies_fastest_then_cp_then_dp_then_pp(parallel_layout: ParallelLayout) -> None:
    # As an order of tuples (pp, dp, cp, tp): ranks count up in it.
    places = [parallel_layout.coordinates(rank) for rank in range(parallel_layout.world_size)]
    assert places == sorted(places)


@given(LAYOUTS, st.lists(st.sampled_from(AXES), unique=True))
@settings(max_examples=80)
def test_groups_partition_the_world_and_vary_only_along_their_axes(
    parallel_layout: ParallelLayout, axes: list[Axis]
) -> None:
    groups = parallel_layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(
        range(parallel_layout.world_size)
    )
    for group in groups:
        assert list(group) == sorted(group)
        for axis in AXES:
            values = {getattr(parallel_layout.coordinates(rank), axis) for rank in group}
            assert len(values) == (getattr(parallel_layout, axis) if axis in axes else 1)


@given(LAYOUTS)
@settings(max_examples=60)
def test_each_dp_rank_has_its_replicas_and_one_output_rank(parallel_layout: ParallelLayout) -> None:
    ranks = range(parallel_layout.world_size)
    for dp_rank in range(parallel_layout.dp):
        replica = [rank for rank in ranks if parallel_layout.dp_rank(rank) == dp_rank]
        assert len(replica) == parallel_layout.pp * parallel_layout.cp * parallel_layout.tp
        assert parallel_layout.output_rank(dp_rank) in replica
        output = parallel_layout.coordinates(parallel_layout.output_rank(dp_rank))
        assert (output.pp, output.cp, output.tp) == (parallel_layout.pp - 1, 0, 0)


def test_the_documented_example() -> None:
    parallel_layout = ParallelLayout(dp=2, tp=2)
    assert parallel_layout.world_size == 4
    assert parallel_layout.coordinates(3) == (0, 1, 0, 1)
    assert parallel_layout.groups("tp") == ((0, 1), (2, 3))
    assert parallel_layout.groups("dp") == ((0, 2), (1, 3))
    assert parallel_layout.groups("dp", "tp") == ((0, 1, 2, 3),)
    assert [parallel_layout.output_rank(dp_rank) for dp_rank in range(2)] == [0, 2]
    assert str(parallel_layout) == "pp 1 x dp 2 x cp 1 x tp 2"


def test_dp_takes_what_the_other_axes_leave() -> None:
    assert ParallelLayout.from_world_size(12, pp=3, tp=2) == ParallelLayout(pp=3, dp=2, tp=2)
    assert ParallelLayout.from_world_size(5) == ParallelLayout(dp=5)


@pytest.mark.parametrize(
    ("world_size", "nearest"),
    [(8, "use 6 or 12 workers"), (3, "use 6 workers"), (0, "use 6 workers")],
)
def test_a_world_that_does_not_divide_shows_the_product_and_the_nearest_sizes(
    world_size: int, nearest: str
) -> None:
    with pytest.raises(
        LayoutError,
        match=rf"parallel.tensor 2 x parallel.context 3 x parallel.pipeline 1 = 6 workers per model"
        rf" replica, and {world_size} workers / 6 = .* replicas, not a whole number: {nearest}",
    ):
        ParallelLayout.from_world_size(world_size, cp=3, tp=2)


def test_wrong_degrees_ranks_and_coordinates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parallel\.context is 0"):
        ParallelLayout(cp=0)
    with pytest.raises(ValueError, match="rank 4 is outside the world of 4"):
        ParallelLayout(dp=4).coordinates(4)
    with pytest.raises(ValueError, match="tp 1 is outside the axis, which has 1"):
        ParallelLayout(dp=4).rank(tp=1)


@st.composite
def layouts_with_experts(draw: st.DrawFn) -> ParallelLayout:
    dp, cp, tp = draw(DEGREES), draw(DEGREES), draw(DEGREES)
    sizes = [size for size in range(1, dp * cp * tp + 1) if dp * cp * tp % size == 0]
    return ParallelLayout(pp=draw(DEGREES), dp=dp, cp=cp, tp=tp, ep=draw(st.sampled_from(sizes)))


@given(layouts_with_experts())
def test_expert_groups_divide_each_pipeline_stage(layout: ParallelLayout) -> None:
    for first in range(0, layout.world_size, layout.ep):
        group = range(first, first + layout.ep)
        assert [layout.ep_rank(rank) for rank in group] == list(range(layout.ep))
        assert len({layout.coordinates(rank).pp for rank in group}) == 1


def test_axes_that_do_not_fit_together_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(LayoutError) as refused:
        ParallelLayout(pp=2, dp=3, tp=2, ep=4)
    (problem,) = refused.value.problems
    assert problem.keys[:2] == ("parallel.expert", "parallel.pipeline")
    assert "12 workers / parallel.pipeline 2 = 6, and 6 / 4 = 1.5" in problem.text
    assert problem.text.endswith("set parallel.expert to 3 or 6")
    with pytest.raises(LayoutError, match=r"parallel\.tensor is 1: set it to false"):
        ParallelLayout(dp=2, sequence_parallel=True)
    with pytest.raises(LayoutError, match=r"virtual_pipeline is 2, .* parallel\.pipeline is 1"):
        ParallelLayout(dp=2, vpp=2)
    # Both problems of one layout are reported.
    with pytest.raises(LayoutError) as refused:
        ParallelLayout.from_world_size(3, cp=2, sequence_parallel=True)
    assert len(refused.value.problems) == 2


def test_only_megatron_has_pipelines() -> None:
    assert engine_problems("megatron", pp=4) == []
    assert engine_problems("dtensor", pp=1) == []
    keys = [problem.keys[0] for problem in engine_problems("dtensor", pp=2, vpp=2)]
    assert keys == ["parallel.pipeline", "parallel.virtual_pipeline"]


def test_fsdp_divides_experts_over_the_ranks_of_a_copy_of_the_weights() -> None:
    assert ParallelLayout(dp=4, cp=2, ep=8).engine_problems("dtensor") == []
    layout = ParallelLayout(dp=4, cp=2, tp=2, ep=8, num_replicas=2)
    assert layout.engine_problems("megatron") == []
    (problem,) = layout.engine_problems("dtensor")
    assert problem.keys[0] == "parallel.expert"
    assert "data-parallel size 4 x parallel.context 2 / parallel.replicas 2 = 4" in problem.text
    assert problem.text.endswith("set parallel.expert to 4")


def test_copies_of_the_weights_are_consecutive_data_parallel_ranks() -> None:
    layout = ParallelLayout(dp=4, cp=2, tp=2, num_replicas=2)
    assert layout.num_shards == 4
    for rank in range(layout.world_size):
        assert layout.replica(rank) == rank // 8
    with pytest.raises(LayoutError, match=r"replicas 3 must divide .* 4: set it to 2 or 4"):
        ParallelLayout(dp=4, num_replicas=3)


@given(st.integers(1, 10**12), st.integers(1, 8))
def test_weights_stay_unsharded_as_chosen(num_params: int, tp: int) -> None:
    auto = ParallelLayout(tp=tp)
    assert auto.keeps_unsharded("dtensor", num_params) == (4 * num_params / tp <= 8 << 30)
    assert not replace(auto, reshard=True).keeps_unsharded("dtensor", num_params)
    assert replace(auto, reshard=False).keeps_unsharded("dtensor", num_params)
    assert not replace(auto, reshard=False).keeps_unsharded("megatron", num_params)


@given(
    LAYOUTS,
    st.booleans(),
    st.sampled_from(["packed", "padded"]),
    st.integers(1, 7),
    st.integers(1, 60),
)
def test_padding_lets_every_rank_have_equal_tokens(
    layout: ParallelLayout, sequence: bool, row_layout: RowLayout, rounding: int, length: int
) -> None:
    layout = replace(layout, sequence_parallel=sequence and layout.tp > 1)
    multiples = layout.padding_multiples(row_layout, sequence_length_round=rounding)
    assert multiples.row % rounding == 0
    if layout.cp > 1:
        assert multiples.row % (2 * layout.cp) == multiples.total % (2 * layout.cp) == 0
    if layout.sequence_parallel:
        assert multiples.total % layout.cp == multiples.total // layout.cp % layout.tp == 0
    if row_layout == "padded":
        # A microbatch of any number of rows then has a legal size.
        assert multiples.row % multiples.total == 0
    # The smallest budget that a row fits in, by trying all of them.
    needed = multiples.tokens_of_row(length)
    padded = next(size for size in range(length, 10**6) if size % multiples.row == 0)
    assert multiples.max_row_tokens(needed) >= padded
    assert multiples.max_row_tokens(needed - 1) < padded
    assert multiples.capacity(needed) == needed
    assert multiples.min_tokens == multiples.tokens_of_row(1) <= needed


@pytest.mark.parametrize(
    ("engine", "sizes", "num_params", "sync"),
    [
        ("dtensor", {}, 2**31, "step"),
        ("dtensor", {}, 2**31 + 1, "microbatch"),
        # The limit is for the shard of a tensor-parallel rank.
        ("dtensor", {"tp": 2}, 2**32, "step"),
        ("dtensor", {"dp": 8, "cp": 2}, 2**32, "microbatch"),
        ("megatron", {"dp": 8, "tp": 2, "cp": 2}, 2**40, "step"),
        ("megatron", {"pp": 2}, 1, "microbatch"),
        ("megatron", {"dp": 2, "ep": 2}, 1, "microbatch"),
        ("dtensor", {"dp": 2, "ep": 2}, 1, "microbatch"),
    ],
)
def test_ranks_wait_where_they_exchange_weights_activations_or_tokens(
    engine: EngineName, sizes: dict[str, Any], num_params: int, sync: str
) -> None:
    assert ParallelLayout(**sizes).sync(engine, num_params) == sync
