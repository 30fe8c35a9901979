"""The worked examples of ODB, with the documented deviations of `online` batches."""

from __future__ import annotations

import pytest

from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.streaming.alignment import AlignedPlanner, SingleCoordinator
from nemo_like.data.streaming.planner import StreamingPlanner
from nemo_like.data.streaming.spec import StreamSpec

BUDGET = 8192


def spec(microbatches: int = 1, max_tokens: int = BUDGET, **changes: object) -> StreamSpec:
    plan = PlanSpec(layout="padded", max_tokens=max_tokens, oversize="singleton")
    return StreamSpec(
        plan=plan,
        microbatches_per_step=microbatches,
        window_rows=64,
        **changes,  # pyright: ignore[reportArgumentType]
    )


def groups_of(lengths: list[int], settings: StreamSpec) -> list[list[int]]:
    """The lengths of every microbatch of a stream of these rows."""
    planner = StreamingPlanner(settings)
    for row, length in enumerate(lengths):
        planner.push(row, length)
    planner.close()
    groups = []
    while (step := planner.next_step()) is not None:
        for microbatch in step.plan.ranks[0]:
            groups.append(sorted(lengths[step.rows[row]] for row in microbatch.rows))
    return groups


@pytest.mark.parametrize(
    ("length", "num_rows"), [(1024, 8), (2048, 4), (4096, 2), (100, 81), (8192, 1), (16384, 1)]
)
@pytest.mark.filterwarnings("ignore::nemo_like.data.planning.oversize.OversizeWarning")
def test_a_group_has_as_many_rows_of_one_length_as_fit(length: int, num_rows: int) -> None:
    groups = groups_of([length] * num_rows * 2, spec())
    assert groups == [[length] * num_rows] * 2


def test_a_row_without_tokens_is_an_error_and_not_dropped_silently() -> None:
    with pytest.raises(ValueError, match="length of row 3 is 0"):
        StreamingPlanner(spec()).push(3, 0)


def test_groups_partition_the_rows_and_stay_within_the_padded_budget() -> None:
    lengths = [100, 200, 500, 1000, 2000, 4000, 8000]
    groups = groups_of(lengths, spec())
    assert sorted(length for group in groups for length in group) == lengths
    assert all(len(group) * max(group) <= BUDGET for group in groups)
    # As many as the reference's [[100, 200, 500], [1000, 2000], [4000], [8000]].
    assert len(groups) <= 4


def test_rows_above_two_groups_are_deferred_and_none_is_lost() -> None:
    lengths = [8000, 7000, 6000, 5000, 4000]
    planner = AlignedPlanner(spec(microbatches=2), SingleCoordinator())
    for row, length in enumerate(lengths):
        planner.push(row, length)
    planner.close()
    first = planner.next_step()
    assert first is not None
    assert first.own.plan.num_microbatches == 2
    assert (len(first.own.rows), first.own.num_deferred) == (2, 3)
    rows = list(first.own.rows)
    while (step := planner.next_step()) is not None:
        rows += step.own.rows
    assert sorted(rows) == [0, 1, 2, 3, 4]


def test_equal_rows_need_no_more_groups_than_the_budget_requires() -> None:
    # The reference sizes a group by the one before it and forms 4 + 3 + 1.
    assert groups_of([10] * 8, spec(max_tokens=40)) == [[10] * 4, [10] * 4]


def test_a_second_resource_limits_a_group() -> None:
    planner = StreamingPlanner(spec(max_extra=100))
    for row in range(6):
        planner.push(row, 100, extra=40)
    planner.close()
    sizes = []
    while (step := planner.next_step()) is not None:
        sizes.append(len(step.rows))
    assert sizes == [2, 2, 2]
