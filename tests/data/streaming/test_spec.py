from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.streaming.spec import WarmupBudget


def test_example_of_veomni() -> None:
    budget = WarmupBudget(max_tokens=1000, init_tokens=200, num_steps=10)
    assert [budget.at(step) for step in (0, 1, 5, 10, 11)] == [200, 280, 600, 1000, 1000]


def test_no_steps_are_no_warmup() -> None:
    assert WarmupBudget(1000, 200, 0).at(0) == 1000


@given(
    init_tokens=st.integers(1, 10**6),
    growth=st.integers(0, 10**6),
    num_steps=st.integers(0, 10**4),
    step=st.integers(0, 2 * 10**4),
)
def test_the_budget_grows_from_the_initial_one_to_the_maximum(
    init_tokens: int, growth: int, num_steps: int, step: int
) -> None:
    budget = WarmupBudget(init_tokens + growth, init_tokens, num_steps)
    assert init_tokens <= budget.at(step) <= budget.at(step + 1) <= budget.max_tokens
    assert budget.at(num_steps) == budget.max_tokens
    if num_steps:
        assert budget.at(0) == init_tokens
        exact = init_tokens + growth * min(step, num_steps) / num_steps
        assert exact - 1 < budget.at(step) <= exact + 1e-6


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((1000, 0, 10), "init_tokens is 0"),
        ((1000, 1001, 10), "max_tokens = 1000"),
        ((1000, 200, -1), "num_steps is -1"),
    ],
)
def test_invalid_settings_are_refused(arguments: tuple[int, int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        WarmupBudget(*arguments)


def test_a_negative_step_is_refused() -> None:
    with pytest.raises(ValueError, match="step is -1"):
        WarmupBudget(1000, 200, 10).at(-1)
