"""Group advantages against their definitions."""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.grpo.advantage_config import AdvantageConfig
from nemo_like.algorithms.grpo.advantages import EPS, group_advantages
from nemo_like.metrics import metric_values
from nemo_like.rollout.rows import reward_metrics


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.integers(1, 5),
    size=st.integers(2, 6),
    seed=st.integers(0, 999),
    baseline=st.sampled_from(["group_mean", "leave_one_out"]),
)
def test_each_group_is_centred_whatever_the_order_of_rows(prompts, size, seed, baseline):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(prompts) * 7, size)
    rewards = rng.normal(size=prompts * size).astype(np.float32)
    config = AdvantageConfig(baseline=baseline, normalize="none")
    advantages = group_advantages(rewards, groups, config)
    for group in np.unique(groups):
        own = rewards[groups == group].astype(np.float64)
        others = (own.sum() - own) / (size - 1)
        expected = own - (own.mean() if baseline == "group_mean" else others)
        np.testing.assert_allclose(advantages[groups == group], expected, atol=1e-6)
    order = rng.permutation(len(groups))
    np.testing.assert_allclose(
        group_advantages(rewards[order], groups[order], config), advantages[order], atol=1e-6
    )


def test_group_std_is_the_sample_standard_deviation():
    rewards = np.array([0.0, 1.0, 1.0, 0.0, 5.0, 5.0], dtype=np.float32)
    groups = np.array([0, 0, 0, 0, 1, 1])
    advantages = group_advantages(rewards, groups, AdvantageConfig())
    np.testing.assert_allclose(
        advantages[:4], np.array([-0.5, 0.5, 0.5, -0.5]) / np.std([0, 1, 1, 0], ddof=1), rtol=1e-5
    )
    assert (advantages[4:] == 0).all(), "a group without spread teaches nothing"


def test_constant_rewards_that_do_not_sum_exactly_give_exact_zeros():
    advantages = group_advantages(
        np.full(7, 0.1, dtype=np.float32), np.zeros(7, dtype=int), AdvantageConfig()
    )
    assert (advantages == 0).all()


def test_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="num_generations_per_prompt"):
        group_advantages(np.ones(3, dtype=np.float32), np.array([0, 0, 1]), AdvantageConfig())


def test_reward_metrics_tell_flat_groups_apart():
    rewards = np.array([1, 1, 0, 0, 0, 1], dtype=np.float32)
    values = metric_values(
        reward_metrics(
            rewards, np.array([0, 0, 1, 1, 2, 2]), {"format": np.ones(6, dtype=np.float32)}
        )
    )
    assert values["reward/mean"] == 0.5
    assert values["reward/frac_groups_zero_std"] == pytest.approx(2 / 3)
    assert values["reward/frac_groups_all_best"] == pytest.approx(1 / 3)
    assert values["reward/frac_groups_all_worst"] == pytest.approx(1 / 3)
    assert values["reward/frac_groups_all_zero"] == pytest.approx(1 / 3)
    assert values["reward/format_mean"] == 1.0


@pytest.mark.parametrize(
    ("rewards", "zero_std", "best", "worst", "zero"),
    [
        ([0, 0, 0, 0], 1.0, 0.0, 0.0, 1.0),
        ([1, 1, 1, 1], 1.0, 0.0, 0.0, 0.0),
        ([1, 1, 1, 0], 0.5, 0.5, 0.0, 0.0),
        ([-1, -1, 0, 0], 1.0, 0.5, 0.5, 0.5),
        ([0.5, 0.5, 0, 1], 0.5, 0.0, 0.0, 0.0),
    ],
)
def test_groups_without_spread_are_told_apart(rewards, zero_std, best, worst, zero) -> None:
    """Two groups of two. One reward in the batch is neither the best nor the worst."""
    metrics = reward_metrics(np.array(rewards, dtype=np.float32), np.array([0, 0, 1, 1]), {})
    values = metric_values(metrics)
    assert values["reward/frac_groups_zero_std"] == zero_std
    assert values["reward/frac_groups_all_best"] == best
    assert values["reward/frac_groups_all_worst"] == worst
    assert values["reward/frac_groups_all_zero"] == zero


def advantages_by_definition(rewards: list[float], config: AdvantageConfig) -> list[float]:
    """One group, each completion by itself, in Python's float64."""
    found = []
    for index, reward in enumerate(rewards):
        others = [other for position, other in enumerate(rewards) if position != index]
        baseline = statistics.fmean(rewards if config.baseline == "group_mean" else others)
        advantage = reward - baseline
        if config.normalize == "group_std":
            advantage /= statistics.stdev(rewards) + EPS
        elif config.normalize == "leave_one_out_std" and len(set(others)) > 1:
            advantage /= statistics.stdev(others) + EPS
        found.append(advantage if len(set(rewards)) > 1 else 0.0)
    return found


@settings(max_examples=150, deadline=None)
@given(
    groups=st.lists(
        st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, -3.0, 7.5]), min_size=3, max_size=7),
        min_size=1,
        max_size=4,
    ),
    baseline=st.sampled_from(["group_mean", "leave_one_out"]),
    normalize=st.sampled_from(["group_std", "leave_one_out_std", "none"]),
)
def test_every_combination_equals_its_definition(groups, baseline, normalize) -> None:
    config = AdvantageConfig(baseline=baseline, normalize=normalize)
    rewards = np.array([reward for group in groups for reward in group])
    ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    expected = [value for group in groups for value in advantages_by_definition(group, config)]
    np.testing.assert_allclose(
        group_advantages(rewards, ids, config), expected, rtol=1e-5, atol=1e-6
    )


def test_the_std_of_the_others_needs_three_completions() -> None:
    config = AdvantageConfig(baseline="leave_one_out", normalize="leave_one_out_std")
    with pytest.raises(ValueError, match="num_generations_per_prompt to 3 or more"):
        group_advantages(np.array([0.0, 1.0]), np.array([0, 0]), config)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5), st.booleans()), min_size=1),
    st.sampled_from(["group_std", "leave_one_out_std", "none"]),
)
def test_rows_without_a_reward_are_no_part_of_their_group(rows, normalize) -> None:
    # At least one row has no reward; without any, a group that is too small is an error.
    rows = [(9, 1.0, False), *rows]
    groups = np.array([group for group, _, _ in rows])
    rewards = np.array([reward for _, reward, _ in rows], dtype=np.float32)
    mask = np.array([has_reward for _, _, has_reward in rows])
    config = AdvantageConfig(normalize=normalize)
    advantages = group_advantages(rewards, groups, config, mask)
    assert advantages.dtype == np.float32 and not advantages[~mask].any()
    min_size = 3 if normalize == "leave_one_out_std" else 2
    for group in np.unique(groups):
        kept = np.flatnonzero(mask & (groups == group))
        if len(kept) < min_size:
            assert not advantages[kept].any()
        else:
            alone = group_advantages(rewards[kept], groups[kept], config)
            np.testing.assert_array_equal(advantages[kept], alone)


def test_batch_std_counts_rewards_of_groups_that_became_too_small() -> None:
    """The standard deviation is that of 0, 1 and 10, although the last one has no group left."""
    mask = np.array([True, True, True, False])
    config = AdvantageConfig(normalize="batch_std")
    rewards = np.array([0.0, 1.0, 10.0, 0.0])
    advantages = group_advantages(rewards, np.array([0, 0, 1, 1]), config, mask)
    value = 0.5 / (statistics.stdev([0.0, 1.0, 10.0]) + EPS)
    np.testing.assert_allclose(advantages, [-value, value, 0.0, 0.0], rtol=1e-6)
    assert value == pytest.approx(0.0908, abs=1e-4)
