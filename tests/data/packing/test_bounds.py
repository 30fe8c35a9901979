"""Lower bounds: equal to their definitions, and below the best there is on instances small enough
to try everything.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.packing.bounds import l2_bound, lockstep_bound, rank_bound
from nemo_like.data.planning.spec import CostModel


def l2_by_definition(lengths: list[int], capacity: int) -> int:
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [x for x in lengths if x > capacity - threshold]
        large = [x for x in lengths if capacity // 2 < x <= capacity - threshold]
        small = [x for x in lengths if threshold <= x <= capacity // 2]
        missing = sum(small) - (len(large) * capacity - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-missing // capacity)))
    return best


def fewest_bins(lengths: list[int], capacity: int) -> int:
    """By trying: rows longest first, each to every bin of a different load or to a new one."""

    def place(i: int, loads: tuple[int, ...], best: int) -> int:
        if len(loads) >= best or i == len(lengths):
            return min(best, len(loads))
        for load in set(loads):
            if load + ordered[i] <= capacity:
                rest = list(loads)
                rest.remove(load)
                best = place(i + 1, tuple(sorted([*rest, load + ordered[i]])), best)
        return place(i + 1, tuple(sorted([*loads, ordered[i]])), best)

    ordered = sorted(lengths, reverse=True)
    return place(0, (), len(lengths))


@given(
    st.integers(1, 40).flatmap(
        lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))
    )
)
@settings(max_examples=200, deadline=None)
def test_l2_is_its_definition_and_at_least_the_tokens_over_the_capacity(case):
    capacity, lengths = case
    assert (
        l2_bound(lengths, capacity)
        == l2_by_definition(lengths, capacity)
        >= math.ceil(sum(lengths) / capacity)
    )


@given(st.lists(st.integers(1, 10), max_size=8))
@settings(max_examples=100, deadline=None)
def test_no_packing_has_fewer_bins_than_l2(lengths):
    assert l2_bound(lengths, 10) <= fewest_bins(lengths, 10)


def test_the_example_of_the_docstring():
    assert l2_bound([6, 6, 6, 5, 5], 10) == 4


@pytest.mark.parametrize("lengths", [[0, 3], [11]])
def test_a_length_outside_the_capacity_is_refused(lengths):
    with pytest.raises(ValueError, match="capacity 10"):
        l2_bound(lengths, 10)


def all_plans(
    lengths: np.ndarray, work: np.ndarray, max_tokens: int, num_bins: int
) -> tuple[np.ndarray, np.ndarray]:
    """Every way to put the rows in bins under the cap: (work of each bin, rows of each bin), both
    [plans, num_bins].
    """
    bins = np.stack(
        np.unravel_index(np.arange(num_bins ** len(lengths)), (num_bins,) * len(lengths))
    )
    is_in = bins[:, :, None] == np.arange(num_bins)
    is_in = is_in[:, (np.einsum("nak,n->ak", is_in, lengths) <= max_tokens).all(axis=1)]
    return np.einsum("nak,n->ak", is_in, work), is_in.sum(axis=0)


SMALL_CASES = {
    "lengths": st.lists(st.integers(1, 12), min_size=1, max_size=6),
    "shape": st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 1)]),
    "seed": st.integers(0, 99),
    "is_convex": st.booleans(),
}


def work_of(lengths: np.ndarray, seed: int, is_convex: bool) -> np.ndarray:
    random_work = np.random.default_rng(seed).integers(0, 30, len(lengths)).astype(float)
    return CostModel(linear=3, quadratic=1).of(lengths) if is_convex else random_work


@given(**SMALL_CASES)
@settings(max_examples=150, deadline=None)
def test_no_plan_takes_less_lockstep_work_than_the_bound(lengths, shape, seed, is_convex):
    array = np.array(lengths)
    work = work_of(array, seed, is_convex)
    bin_work, _ = all_plans(array, work, 12, shape[0] * shape[1])
    lockstep = np.sort(bin_work)[:, ::-1][:, :: shape[0]].sum(
        axis=1
    )  # bins of like work together are the best lockstep
    assert lockstep_bound(array, work, 12, *shape) <= lockstep.min(initial=np.inf) * (1 + 1e-9)


@given(**SMALL_CASES, may_be_empty=st.booleans())
@settings(max_examples=250, deadline=None)
def test_no_plan_has_a_max_loaded_rank_below_the_bound(
    lengths, shape, seed, is_convex, may_be_empty
):
    array = np.array(lengths)
    work = work_of(array, seed, is_convex)
    bin_work, num_rows = all_plans(array, work, 12, shape[0] * shape[1])
    is_allowed = np.ones(len(bin_work), dtype=bool) if may_be_empty else (num_rows > 0).all(axis=1)
    max_work = bin_work[is_allowed].reshape(-1, *shape).sum(axis=2).max(axis=1)
    assert rank_bound(array, work, 12, *shape, may_be_empty=may_be_empty) <= max_work.min(
        initial=np.inf
    ) * (1 + 1e-9)


def test_a_rank_that_must_fill_its_other_bin_raises_the_bound():
    lengths, work = np.array([10, 3, 3, 3]), np.array([100.0, 3.0, 3.0, 3.0])
    assert rank_bound(lengths, work, 10, 2, 2, may_be_empty=True) == 100.0
    assert (
        rank_bound(lengths, work, 10, 2, 2, may_be_empty=False) == 103.0
    )  # no bin is empty, so 10 has a 3 beside it


def test_rows_above_half_the_cap_raise_the_bound():
    # 4 long rows take a bin each, so on 2 ranks the second microbatch holds one as well: 10 + 8,
    # and tokens alone give a lower bound.
    lengths, work = np.array([10, 9, 8, 7]), np.array([10.0, 9.0, 8.0, 7.0])
    assert (
        lockstep_bound(lengths, work, 100, 2, 2) == 17.0
    )  # all of them fit in one bin: only the mean of the ranks
    assert lockstep_bound(lengths, work, 12, 2, 2) == 18.0


@pytest.mark.filterwarnings("error")
def test_rows_without_tokens_of_their_own_change_nothing():
    lengths, work = np.array([5, 4, 3]), np.array([25.0, 16.0, 9.0])
    expected = rank_bound(lengths, work, 8, 2, 1, may_be_empty=True)
    for at in range(4):
        inserted = np.insert(lengths, at, 0), np.insert(work, at, 0.0)
        assert rank_bound(*inserted, 8, 2, 1, may_be_empty=True) == expected


def test_no_rows_need_nothing():
    assert l2_bound([], 10) == 0
    assert (
        lockstep_bound([], np.empty(0), 10, 4, 0)
        == rank_bound([], np.empty(0), 10, 4, 0, may_be_empty=True)
        == 0.0
    )
