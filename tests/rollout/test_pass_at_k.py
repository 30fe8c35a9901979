"""pass@k against all subsets of the samples, and the metrics of answers against plain loops."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.rollout.answers import ScoredAnswers, answer_means, pass_at_k, powers_of_two


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.lists(st.booleans(), min_size=n, max_size=n), st.integers(1, n))
    )
)
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(
    case: tuple[list[bool], int],
) -> None:
    samples, k = case
    subsets = list(combinations(samples, k))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    num_correct = np.array([sum(samples)])
    assert pass_at_k(len(samples), num_correct, k)[0] == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="k is 5; pass@k of 4 samples"):
        pass_at_k(4, np.array([1]), 5)


@given(num_samples=st.integers(2, 9), num_prompts=st.integers(1, 5), seed=st.integers(0, 99))
def test_metrics_are_means_over_prompts(num_samples: int, num_prompts: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    is_correct = generator.random((num_prompts, num_samples)) < 0.4
    answers = ScoredAnswers(
        rewards=is_correct.astype(np.float64),
        is_scored=np.ones_like(is_correct),
        lengths=np.ones(is_correct.shape, dtype=np.int64),
        is_truncated=~is_correct,
        components={},
    )
    means = answer_means(answers, pass_reward=1.0)
    values = {name: mean.value for name, mean in means.items() if "_at_" in name}
    assert values[f"avg_at_{num_samples}"] == pytest.approx(is_correct.mean())
    assert values["pass_at_1"] == pytest.approx(is_correct.mean())
    expected = {f"avg_at_{num_samples}"} | {
        f"pass_at_{k}" for k in (1, 2, 4, 8) if k <= num_samples
    }
    assert set(values) == expected
    shares = [values[f"pass_at_{k}"] for k in powers_of_two(num_samples)]
    assert shares == sorted(shares)
    if num_samples in (2, 4, 8):
        solved = is_correct.any(axis=1)
        assert values[f"pass_at_{num_samples}"] == pytest.approx(solved.mean())
