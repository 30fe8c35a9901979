"""REINFORCE++, GDPO, batch standard deviation and overlong penalty against their definitions.

The expected values are computed one completion, and one token, at a time in Python's float64.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.grpo.advantage_config import AdvantageConfig
from nemo_like.algorithms.grpo.advantages import (
    EPS,
    group_advantages,
    kl_to_go,
    overlong_penalty,
    separate_advantages,
    whitened,
)
from nemo_like.algorithms.grpo.rollouts import KeptGroups, rows_with_spread
from nemo_like.data.jagged import Jagged
from tests.recipe import Recipe
from tests.rollout.test_selection import rollout_of

REWARDS = st.sampled_from([0.0, 0.1, 0.25, 1.0, -3.0, 7.5])
GROUPS = st.lists(st.lists(REWARDS, min_size=2, max_size=5), min_size=1, max_size=4)


def flat(groups: list[list[float]]) -> tuple[np.ndarray, np.ndarray]:
    """The rewards [B] and groups [B] of nested lists."""
    rewards = np.array([reward for group in groups for reward in group])
    return rewards, np.repeat(np.arange(len(groups)), [len(group) for group in groups])


@given(GROUPS)
def test_batch_std_divides_the_centred_reward_by_the_std_of_all_rewards(groups) -> None:
    rewards, ids = flat(groups)
    divisor = statistics.stdev(rewards.tolist()) + 1e-6
    expected = []
    for group in groups:
        for reward in group:
            expected.append((reward - statistics.fmean(group)) / divisor)
            if len(set(group)) == 1:
                expected[-1] = 0.0
    found = group_advantages(rewards, ids, AdvantageConfig(normalize="batch_std"))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_without_a_baseline_the_advantage_is_the_reward_also_in_groups_of_one() -> None:
    config = AdvantageConfig(baseline="none", normalize="none")
    rewards = np.array([0.5, 0.0, 3.0])
    assert group_advantages(rewards, np.array([0, 1, 2]), config).tolist() == [0.5, 0.0, 3.0]


@given(st.lists(st.tuples(REWARDS, st.integers(0, 5)), min_size=1, max_size=12))
def test_whitening_counts_every_trained_token_once(rows) -> None:
    tokens = [value for value, count in rows for _ in range(count)]
    values = np.array([value for value, _ in rows])
    counts = np.array([count for _, count in rows], dtype=np.float64)
    found = whitened(values, counts, 1e-6)
    if len(set(tokens)) < 2:
        assert (found == 0).all()
        return
    mean = statistics.fmean(tokens)
    std = statistics.pstdev(tokens) + 1e-6
    np.testing.assert_allclose(
        found, [(value - mean) / std for value, _ in rows], rtol=1e-5, atol=1e-12
    )
    # The same with one value per token.
    by_token = whitened(np.array(tokens), np.ones(len(tokens)), 1e-6)
    np.testing.assert_allclose(
        by_token, np.repeat(found, counts.astype(int)), rtol=1e-6, atol=1e-12
    )
    assert abs(by_token.sum()) < 1e-4 * len(tokens)


@given(
    st.lists(
        st.lists(
            st.tuples(st.floats(-30, 0), st.floats(-30, 0), st.booleans()), min_size=1, max_size=6
        ),
        min_size=1,
        max_size=4,
    ),
    st.floats(0, 2),
)
def test_the_advantage_of_a_token_is_its_reward_to_go(rows, penalty) -> None:
    """REINFORCE++ sums token rewards: R at the end, minus penalty x KL at every trained token."""
    lengths = np.array([len(row) for row in rows])
    policy = Jagged.from_rows([[token[0] for token in row] for row in rows], np.float32)
    reference = Jagged.from_rows([[token[1] for token in row] for row in rows], np.float32)
    trained = np.array([token[2] for row in rows for token in row])
    advantages = np.arange(len(rows)) - 0.5
    k1, sums = kl_to_go(policy, reference, trained)
    found = np.repeat(advantages, lengths) - penalty * sums
    position = 0
    for row, reward in zip(rows, advantages, strict=True):
        kl = []
        for logprob, reference_logprob, is_trained in row:
            difference = float(np.float32(logprob)) - float(np.float32(reference_logprob))
            kl.append(min(max(difference, -20.0), 20.0) * is_trained)
        for index in range(len(row)):
            assert k1[position] == pytest.approx(kl[index], abs=1e-9)
            expected = reward - penalty * math.fsum(kl[index:])
            assert found[position] == pytest.approx(expected, abs=1e-9)
            position += 1


@given(
    st.lists(st.lists(st.tuples(REWARDS, REWARDS), min_size=2, max_size=5), min_size=1, max_size=4),
    st.floats(-2, 2),
)
def test_separate_components_are_normalized_before_they_are_added(groups, weight) -> None:
    config = AdvantageConfig(components="separate")
    first, ids = flat([[pair[0] for pair in group] for group in groups])
    second, _ = flat([[pair[1] for pair in group] for group in groups])
    weights = {"first": 1.0, "second": weight}
    components = {"first": first, "second": second}
    found = separate_advantages(components, weights, ids, config)
    expected = []
    for group in groups:
        for pair in group:
            total = 0.0
            for index, factor in ((0, 1.0), (1, weight)):
                values = [other[index] for other in group]
                if len(set(values)) > 1:
                    centred = pair[index] - statistics.fmean(values)
                    total += factor * centred / (statistics.stdev(values) + EPS)
            expected.append(total)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_component_without_a_weight_is_an_error() -> None:
    config = AdvantageConfig(components="separate")
    with pytest.raises(ValueError, match=r"parts turns .*components to sum"):
        separate_advantages({"turns": np.zeros(2)}, {}, np.zeros(2, dtype=int), config)


@given(st.lists(st.integers(0, 40), min_size=1), st.integers(1, 20), st.floats(0.1, 3))
def test_the_overlong_penalty_has_three_parts(lengths, buffer, factor) -> None:
    limit = 30
    found = overlong_penalty(np.array(lengths), limit, buffer, factor)
    for length, value in zip(lengths, found, strict=True):
        if length <= limit - buffer:
            expected = 0.0
        elif length <= limit:
            expected = factor * (limit - buffer - length) / buffer
        else:
            expected = -factor
        assert value == pytest.approx(expected, abs=1e-12)


def test_no_buffer_is_no_penalty() -> None:
    assert (overlong_penalty(np.array([1, 99]), 30, 0, 1.0) == 0).all()


@given(GROUPS, st.floats(-1e3, 1e3))
def test_groups_with_unequal_rewards_are_those_with_advantages(groups, shift) -> None:
    rewards, ids = flat(groups)
    rewards = (rewards + shift).astype(np.float32)
    is_kept = rows_with_spread(rewards, ids, np.ones(len(ids), dtype=bool))
    for group in np.unique(ids):
        own = rewards[ids == group]
        assert is_kept[ids == group].all() == (len(set(own.tolist())) > 1)
        assert is_kept[ids == group].any() == (len(set(own.tolist())) > 1)


def test_a_row_without_a_reward_does_not_make_its_group_unequal() -> None:
    rewards = np.array([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    groups = np.array([0, 0, 0, 1, 1, 1])
    has_reward = np.array([True, True, False, True, True, False])
    is_kept = rows_with_spread(rewards, groups, has_reward)
    assert is_kept.tolist() == [False] * 3 + [True] * 3


def test_a_token_without_a_log_prob_of_the_sampler_has_no_kl() -> None:
    """With `bypass` the policy's log-probs are the sampler's, whose NaN the loss gives weight 0."""
    policy = Jagged.from_rows([[-1.0, np.nan], [-1.0, -np.inf, -2.0]], np.float32)
    reference = Jagged.from_rows([[-2.0, -1.0], [-1.5, -1.0, -2.5]], np.float32)
    k1, sums = kl_to_go(policy, reference, np.ones(5, dtype=bool))
    assert k1.tolist() == [1.0, 0.0, 0.5, -20.0, 0.5]
    np.testing.assert_allclose(sums, [1.0, 0.0, -19.0, -19.5, 0.5])


def test_a_group_with_one_unequal_component_is_kept_with_separate_components(
    recipe: Recipe,
) -> None:
    options = (
        "grpo.dynamic_sampling.enabled=true",
        "grpo.num_prompts_per_step=4",
        "reward.functions.brevity.path=tests.algorithms.rewards.digit_share",
        "reward.functions.unused={path: tests.algorithms.rewards.digit_share, weight: 0}",
    )
    rollout = rollout_of(0, [1] * 8)
    digits = np.array([1, 0, 1, 1, 1, 1, 1, 0], dtype=np.float32)
    brevity = np.array([0, 1, 0, 0, 1, 1, 1, 1], dtype=np.float32)
    rollout.batch["reward"] = digits + brevity
    rollout.components.clear()
    rollout.components.update(digits=digits, brevity=brevity, unused=np.arange(8.0))
    locations = ["a", "b", "c", "d"]
    for overrides, expected in (([], ["d"]), (["grpo.advantage.components=separate"], ["a", "d"])):
        kept = KeptGroups(recipe.grpo(*options, *overrides))
        kept.add(rollout, locations)
        assert kept.result().locations == expected
