"""The calculator, its arithmetic, and the guessing game."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.environments.environment import Conversation, StepResult
from nemo_like.environments.included import (
    MAX_BITS,
    BadExpression,
    Calculator,
    GuessingGame,
    evaluate,
    shown,
)


def _step(environment: Calculator | GuessingGame, completion: str, **state: int) -> StepResult:
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": completion})
    return environment.step(Conversation(messages=messages, state=state))


@st.composite
def _expressions(draw: st.DrawFn) -> tuple[str, Fraction]:
    """An expression in full parentheses and its value."""
    if draw(st.booleans()):
        number = draw(st.integers(0, 99))
        return str(number), Fraction(number)
    left, left_value = draw(_expressions())
    right, right_value = draw(_expressions())
    operator = draw(st.sampled_from("+-*/"))
    if operator == "/" and right_value == 0:
        operator = "*"
    value = {
        "+": left_value + right_value,
        "-": left_value - right_value,
        "*": left_value * right_value,
        "/": left_value / (right_value or 1),
    }[operator]
    return f"({left} {operator} {right})", value


@settings(max_examples=40)
@given(_expressions())
def test_values_are_exact(expression: tuple[str, Fraction]) -> None:
    text, value = expression
    try:
        assert evaluate(text) == value
    except BadExpression:
        # Long texts and large numbers are refused.
        assert len(text) > 200 or max(value.numerator, value.denominator).bit_length() > 32


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*7", "84"),
        ("-(1+2)**2", "-9"),
        ("0.1+0.2", "0.3"),
        ("7//2*2+7%2", "7"),
        ("1/3", "0.333333333333"),
        ("2**-1", "0.5"),
        ("1e3", "1000"),
    ],
)
def test_what_the_calculator_shows(text: str, value: str) -> None:
    assert shown(evaluate(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9**9**9**9",
        "(-2)**(10**9)",
        "1" * 201,
        "1" * 199,
        "1/0",
        "0**-1",
        "2**0.5",
        "__import__('os')",
        "(1).real",
        "[1][0]",
        "1 if 1 else 2",
        "True+1",
        "1j",
        "'a'*9",
        "1e999",
        "1\n+1",
        "(" * 150 + "1" + ")" * 150,
    ],
)
def test_what_the_calculator_refuses(text: str) -> None:
    with pytest.raises(BadExpression):
        evaluate(text)


def test_powers_of_one_and_zero_are_small() -> None:
    exponent = "9" * 30
    assert evaluate(f"1**{exponent}") == 1
    assert evaluate(f"(-1)**{exponent}") == -1
    assert evaluate(f"0**{exponent}") == 0
    assert evaluate("2**200").numerator.bit_length() <= MAX_BITS


def test_the_last_call_of_a_turn_is_answered_and_a_turn_without_one_ends() -> None:
    calculator = Calculator()
    called = _step(calculator, "<tool>1+1</tool> or <tool> <tool>12*7</tool>")
    assert called.observation == [{"role": "user", "content": "84"}]
    assert called.metrics == {"tool_calls": 1.0, "tool_errors": 0.0} and called.reward == {}
    ended = _step(calculator, "#### 84 </tool>")
    assert ended.done and ended.observation is None
    wrong = _step(Calculator("[", "]", role="tool", error_reward=-0.5), "[1/0]")
    assert wrong.observation == [{"role": "tool", "content": "error: division by zero"}]
    assert wrong.reward == {"tool_errors": -0.5} and wrong.metrics["tool_errors"] == 1.0
    with pytest.raises(ValueError, match="both need at least one character"):
        Calculator(opening="")


def test_a_game_with_hints_and_a_cost_per_guess() -> None:
    game = GuessingGame(guess_cost=0.25)
    state = dict(game.reset({"answer": 37}))
    observations = []
    for turn in ("it is 50", "no idea", "20 or 30"):
        result = _step(game, turn, **state)
        assert not result.done and result.state is not None
        state = dict(result.state)
        observations.append(result.observation)
    assert observations == ["lower", "answer with one number", "higher"]
    found = _step(game, "37", **state)
    assert found.done and found.reward == 0.25 and found.metrics == {"found": 1.0}
    with pytest.raises(ValueError, match="an integer in the column 'answer'"):
        game.reset({"answer": "many"})
