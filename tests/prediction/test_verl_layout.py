"""The layout of verl: the partitions of its own code, and the rules of its balancing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.plan import PlanSpec
from nemo_like.prediction.comparison import karmarkar_karp, plan_verl

# What `get_seqlen_balanced_partitions` of verl b178a3cd5 returned.
OF_VERL = [
    ([8, 7, 6, 5, 4], 2, False, [[1, 3, 4], [0, 2]]),
    (
        [58, 72, 60, 58, 66, 76, 25, 24, 66, 61, 81],
        3,
        False,
        [[0, 1, 4, 6], [3, 5, 7, 9], [2, 8, 10]],
    ),
    (
        [79, 24, 13, 58, 39, 19, 12, 69, 89, 82, 6, 77],
        4,
        True,
        [[7, 10, 11], [0, 3, 6], [2, 4, 9], [1, 5, 8]],
    ),
    ([51, 58, 84, 95, 79, 84, 21, 80], 2, True, [[0, 1, 2, 5], [3, 4, 6, 7]]),
    ([2, 68, 9, 8, 5, 25, 31, 77, 4], 5, False, [[7], [1], [6], [0, 5], [2, 3, 4, 8]]),
]


@pytest.mark.parametrize(("work", "num_parts", "equal_size", "expected"), OF_VERL)
def test_the_partition_is_that_of_verl(
    work: list[int], num_parts: int, equal_size: bool, expected: list[list[int]]
) -> None:
    assert karmarkar_karp(work, num_parts, equal_size=equal_size) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(400, 900),
    st.sampled_from([1, 2]),
)
def test_ranks_have_equally_many_rows_and_as_many_microbatches_as_their_tokens_need(
    lengths: list[int], num_ranks: int, max_tokens: int, microbatch_multiple: int
) -> None:
    spec = PlanSpec(
        max_tokens=max_tokens, num_ranks=num_ranks, microbatch_multiple=microbatch_multiple
    )
    plan = plan_verl(np.array(lengths), spec)
    assert sorted(plan.rows.tolist()) == list(range(len(lengths)))
    rows = [plan.rows_of_rank(rank).tolist() for rank in range(num_ranks)]
    if len(lengths) % num_ranks == 0:
        assert {len(own) for own in rows} == {len(lengths) // num_ranks}
    tokens = max(sum(lengths[row] for row in own) for own in rows)
    needed = -(-tokens // max_tokens)
    assert plan.num_microbatches == -(-needed // microbatch_multiple) * microbatch_multiple
    for rank in plan.ranks:
        is_empty = [microbatch.is_dummy for microbatch in rank]
        # Dummies only where there are fewer rows than microbatches, and last.
        num_rows = sum(len(microbatch.rows) for microbatch in rank)
        assert is_empty == sorted(is_empty)
        assert is_empty.count(False) == min(num_rows, plan.num_microbatches)
