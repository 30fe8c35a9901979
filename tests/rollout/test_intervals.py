"""Confidence intervals equal their definitions, and have the coverage that they state."""

from __future__ import annotations

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.rollout.answers import (
    PromptMeans,
    ScoredAnswers,
    answer_means,
    bootstrap_intervals,
    estimates,
    wilson_interval,
)


def means_of(totals: list[float], weights: list[float] | None = None) -> PromptMeans:
    weights = weights or [1.0] * len(totals)
    return PromptMeans(totals=np.array(totals), weights=np.array(weights))


@given(
    counts=st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    confidence=st.sampled_from([0.8, 0.95, 0.99]),
)
def test_a_wilson_bound_is_where_the_score_test_has_its_level(counts, confidence):
    """The definition: the share that was found is z standard errors of the bound away from it."""
    num_correct, num_trials = counts
    share = num_correct / num_trials
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    low, high = wilson_interval(num_correct, num_trials, confidence)
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        error = z * math.sqrt(bound * (1 - bound) / num_trials)
        assert abs(share - bound) == pytest.approx(error, abs=1e-7)


def test_wilson_intervals_of_tables():
    # Newcombe 1998, Table I: 81/263, 15/148, 0/20 and 1/29.
    table = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0.0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (num_correct, num_trials), expected in table.items():
        found = wilson_interval(num_correct, num_trials, 0.95)
        assert found == pytest.approx(expected, abs=5e-5)


def test_a_bootstrap_is_the_distribution_over_all_resamples():
    totals = [0.0, 2.0, 3.0, 7.0, 1.0]
    weights = [1.0, 2.0, 1.0, 3.0, 1.0]
    exact = []
    for draws in itertools.product(range(5), repeat=5):
        exact.append(sum(totals[i] for i in draws) / sum(weights[i] for i in draws))
    means = {"ratio": means_of(totals, weights)}
    found = bootstrap_intervals(means, 0.9, seed=0, num_resamples=40_000)["ratio"]
    assert found == pytest.approx(np.quantile(exact, [0.05, 0.95]).tolist(), abs=0.03)
    assert bootstrap_intervals(means, 0.9, seed=0, num_resamples=40_000)["ratio"] == found
    assert estimates(means)["ratio"].value == 13 / 8


def test_prompts_and_not_answers_are_resampled():
    """Of eight answers to each of 40 prompts; those of a prompt are all right or mostly wrong."""
    generator = np.random.default_rng(3)
    num_simulations, num_prompts, num_samples = 300, 40, 8
    num_covered = 0
    num_covered_by_answers = 0
    for seed in range(num_simulations):
        chances = generator.choice([0.1, 0.9], num_prompts)
        correct = generator.random((num_prompts, num_samples)) < chances[:, None]
        shares = PromptMeans(totals=correct.mean(axis=1), weights=np.ones(num_prompts))
        low, high = bootstrap_intervals({"avg": shares}, 0.95, seed, num_resamples=400)["avg"]
        num_covered += low <= 0.5 <= high
        low, high = wilson_interval(correct.sum(), correct.size, 0.95)
        num_covered_by_answers += low <= 0.5 <= high
    assert 0.91 <= num_covered / num_simulations <= 0.98
    assert num_covered_by_answers / num_simulations < 0.7


def test_the_method_follows_from_the_values():
    def method_of(totals: list[float], *, is_share: bool) -> tuple[str, float | None]:
        means = PromptMeans(
            totals=np.array(totals), weights=np.ones(len(totals)), is_share=is_share
        )
        estimate = estimates({"mean": means})["mean"]
        return estimate.method, estimate.low

    assert method_of([0.0, 1.0, 1.0], is_share=True)[0] == "wilson"
    assert method_of([0.0, 0.5, 1.0], is_share=True)[0] == "bootstrap"
    assert method_of([0.0, 1.0, 1.0], is_share=False)[0] == "bootstrap"
    assert method_of([0.5], is_share=True) == ("none", None)
    # No prompt differs, so a bootstrap would give [2, 2].
    assert method_of([2.0, 2.0, 2.0], is_share=False)[0] == "none"
    # All ten prompts right: a bootstrap would give [1, 1].
    method, low = method_of([1.0] * 10, is_share=True)
    assert method == "wilson" and low == pytest.approx(0.7225, abs=1e-4)
    empty = means_of([0.0, 0.0], [0.0, 0.0])
    assert estimates({"empty": empty}) == {}
    with pytest.raises(ValueError, match="the confidence is 95; it must be between 0 and 1"):
        estimates({"empty": empty}, confidence=95)


def test_means_of_answers():
    generator = np.random.default_rng(0)
    rewards = generator.choice([0.0, 0.5, 1.0], (30, 8))
    is_scored = generator.random((30, 8)) < 0.9
    answers = ScoredAnswers(
        rewards=rewards,
        is_scored=is_scored,
        lengths=generator.integers(1, 9, (30, 8)),
        is_truncated=generator.random((30, 8)) < 0.2,
        components={"digits": rewards * 2},
    )
    means = answer_means(answers, pass_reward=1.0)
    values = {name: mean.value for name, mean in means.items()}
    is_correct = is_scored & (rewards >= 1.0)
    assert values["avg_at_8"] == values["pass_at_1"] == pytest.approx(is_correct.mean())
    assert values["pass_at_8"] == pytest.approx(is_correct.any(axis=1).mean())
    assert values["reward_mean"] == pytest.approx(rewards[is_scored].mean())
    assert values["digits_mean"] == pytest.approx(2 * rewards[is_scored].mean())
    assert values["generation_completion_length_mean"] == pytest.approx(answers.lengths.mean())
    found = estimates(means)
    for name, estimate in found.items():
        assert estimate.low is not None and estimate.high is not None, name
        assert estimate.low <= estimate.value <= estimate.high, name
    shares = [found[f"pass_at_{k}"].value for k in (1, 2, 4, 8)]
    assert shares == sorted(shares)
