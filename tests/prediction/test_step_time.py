"""Costs fitted to recorded steps, and steps drawn from recorded lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.data.planning.prefixes import SharedPrefixes
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.prediction.step_time import Phase, draw_steps, fit_costs

costs = st.floats(1e-4, 10.0)


@given(
    st.tuples(costs, costs),
    st.integers(0, 2**32 - 1),
    st.integers(3, 30),
    st.floats(0.0, 1.0),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_steps_that_follow_the_model_are_predicted(
    true: tuple[float, float], seed: int, num_steps: int, spread: float, is_one: bool
) -> None:
    rng = np.random.default_rng(seed)
    features = np.stack(
        [
            rng.uniform(1.0 - spread / 2, 1.0 + spread / 2, num_steps) * 1000.0,
            rng.integers(2, 3 + round(10 * spread), num_steps),
        ],
        axis=1,
    )
    if is_one:
        features = features[:, :1]
    seconds = features @ np.array(true[: features.shape[1]])
    shares = (1.0,) if is_one else (0.9, 0.1)
    phase = Phase("a", "", seconds, features, features, shares)
    assert phase.predicted_s == pytest.approx(seconds.mean(), rel=0.02)
    # Three times as many rows and microbatches, whatever the division of the time among them.
    larger = Phase("a", "", seconds, features, 3 * features, shares)
    assert larger.predicted_s == pytest.approx(3 * seconds.mean(), rel=0.02)
    assert (phase.costs >= 0).all()


def test_features_that_differ_give_their_costs() -> None:
    features = np.array([[10.0, 1], [10.0, 8], [40.0, 2], [20.0, 6], [30.0, 3]])
    found = fit_costs(features, 0.5 * features[:, 0] + 3.0 * features[:, 1], (0.9, 0.1))
    assert found == pytest.approx([0.5, 3.0], rel=0.02)


def test_features_that_do_not_differ_have_the_assumed_shares() -> None:
    features = np.tile([50.0, 4.0], (6, 1))
    found = fit_costs(features, np.full(6, 2.0), (0.75, 0.25))
    assert found * [50.0, 4.0] == pytest.approx([1.5, 0.5])
    # A feature that is 0 in every recorded step has no cost.
    features[:, 1] = 0.0
    assert fit_costs(features, np.full(6, 2.0), (0.75, 0.25)) == pytest.approx(
        [0.04, 0.0], rel=0.01
    )


def test_no_cost_is_negative() -> None:
    # Steps with more microbatches took less time.
    features = np.array([[10.0, 8], [10.0, 4], [10.0, 2], [10.0, 1]])
    found = fit_costs(features, np.array([1.0, 2.0, 3.0, 4.0]), (0.9, 0.1))
    assert found[1] == 0.0 and found[0] == pytest.approx(0.25, rel=0.05)


@st.composite
def steps_of_groups(draw: st.DrawFn) -> tuple[list[TokenCounts], int]:
    size = draw(st.integers(1, 4))
    steps = []
    for num_groups in draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)):
        prompts = draw(st.lists(st.integers(1, 9), min_size=num_groups, max_size=num_groups))
        num_rows = num_groups * size
        trained = np.array(draw(st.lists(st.integers(1, 20), min_size=num_rows, max_size=num_rows)))
        own = np.repeat(prompts, size)
        prefixes = SharedPrefixes.of_groups(np.repeat(np.arange(num_groups), size), own)
        steps.append(TokenCounts(own + trained, trained, prefixes if size > 1 else None))
    return steps, size


def values(steps: list[TokenCounts]) -> list[tuple[list[int], list[int]]]:
    found = []
    for counts in steps:
        assert counts.num_trained is not None
        found.append((counts.lengths.tolist(), counts.num_trained.tolist()))
    return found


@given(steps_of_groups(), st.integers(1, 12), st.integers(1, 6), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_the_order_of_rows_does_not_matter(
    recorded: tuple[list[TokenCounts], int], num_groups: int, new_size: int, seed: int
) -> None:
    steps, size = recorded
    rng = np.random.default_rng(seed)
    permuted = []
    for counts in steps:
        groups = np.arange(len(counts.lengths)).reshape(-1, size)
        permuted.append(counts.take(rng.permuted(rng.permutation(groups), axis=1).ravel()))
    assert values(draw_steps(steps, size)) == values(draw_steps(permuted, size))
    drawn = draw_steps(steps, size, num_groups, new_size, max_trained=10)
    again = draw_steps(permuted, size, num_groups, new_size, max_trained=10)
    assert values(drawn) == values(again)
    known = {}
    for counts in steps:
        assert counts.num_trained is not None
        for length, trained in zip(counts.lengths, counts.num_trained, strict=True):
            known.setdefault(length - trained, set()).add(min(trained, 10))
    for counts in drawn:
        assert counts.num_trained is not None
        assert len(counts.lengths) == num_groups * new_size
        prompts = (counts.lengths - counts.num_trained).reshape(num_groups, new_size)
        # One prompt per group, with lengths of rows that exist.
        assert (prompts == prompts[:, :1]).all()
        for prompt, trained in zip(prompts.ravel(), counts.num_trained, strict=True):
            assert trained in known[prompt]
        if counts.prefixes is not None:
            counts.prefixes.check(counts.lengths)


def test_steps_keep_their_rows_without_another_size() -> None:
    lengths = [np.array([5, 3, 9, 9]), np.array([4, 7])]
    drawn = draw_steps([TokenCounts(each) for each in lengths], 1)
    assert [sorted(each.lengths.tolist()) for each in drawn] == [[3, 5, 9, 9], [4, 7]]


def test_rows_repeat_only_where_there_are_too_few() -> None:
    counts = TokenCounts(np.arange(1, 9))
    (drawn,) = draw_steps([counts], 1, num_groups=20)
    repeats = np.bincount(drawn.lengths)[1:]
    assert repeats.sum() == 20 and set(repeats.tolist()) == {2, 3}


def test_a_smaller_group_has_short_and_long_rows() -> None:
    # Groups of a short and a long row; the mean of many groups of one row is near 50.5.
    counts = TokenCounts(np.tile([1, 100], 400) + 1, np.tile([1, 100], 400))
    (drawn,) = draw_steps([counts], 2, 400, 1)
    assert drawn.num_trained is not None
    assert float(drawn.num_trained.mean()) == pytest.approx(50.5, abs=10.0)
