"""Group advantages against their definitions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.advantages import group_advantages, reward_metrics
from nemo_like.config.schema import AdvantageConfig
from nemo_like.metrics import metric_values


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
    np.testing.assert_allclose(group_advantages(rewards[order], groups[order], config), advantages[order], atol=1e-6)


def test_group_std_is_the_sample_standard_deviation():
    rewards = np.array([0.0, 1.0, 1.0, 0.0, 5.0, 5.0], dtype=np.float32)
    groups = np.array([0, 0, 0, 0, 1, 1])
    advantages = group_advantages(rewards, groups, AdvantageConfig())
    np.testing.assert_allclose(advantages[:4], np.array([-0.5, 0.5, 0.5, -0.5]) / np.std([0, 1, 1, 0], ddof=1), rtol=1e-5)
    assert (advantages[4:] == 0).all(), "a group without spread teaches nothing"


def test_constant_rewards_that_do_not_sum_exactly_give_exact_zeros():
    advantages = group_advantages(np.full(7, 0.1, dtype=np.float32), np.zeros(7, dtype=int), AdvantageConfig())
    assert (advantages == 0).all()


def test_a_group_of_one_is_an_error():
    with pytest.raises(ValueError, match="num_generations_per_prompt"):
        group_advantages(np.ones(3, dtype=np.float32), np.array([0, 0, 1]), AdvantageConfig())


def test_reward_metrics_tell_flat_groups_apart():
    rewards = np.array([1, 1, 0, 0, 0, 1], dtype=np.float32)
    values = metric_values(reward_metrics(rewards, np.array([0, 0, 1, 1, 2, 2]), {"format": np.ones(6, dtype=np.float32)}))
    assert values["reward/mean"] == 0.5
    assert values["reward/frac_groups_zero_std"] == pytest.approx(2 / 3)
    assert values["reward/frac_groups_all_best"] == pytest.approx(1 / 3)
    assert values["reward/format_mean"] == 1.0
