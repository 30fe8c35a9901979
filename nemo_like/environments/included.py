"""Included environments: a calculator that the model calls in its text, and a guessing game.

The arithmetic of the calculator is exact and limited in size. An expression of the model is parsed
to a syntax tree, of which only numbers and arithmetic operators are evaluated. Nothing of it is
executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from nemo_like.environments.environment import Conversation, State, StepResult

MAX_CHARACTERS = 200
MAX_BITS = 256
"""Max size of every numerator and denominator, so that no power fills the memory."""
_MAX_DIGITS_SHOWN = 12
_EXPRESSION = re.compile(r"[0-9eE.+\-*/%() ]+")
"""The parser warns about, and prints, some texts with other characters."""
_INTEGER = re.compile(r"-?\d{1,18}(?!\d)")

_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
}


class Calculator:
    """Answers a turn with `<tool>12*7</tool>` by the value; a turn without a call is the answer.

    Only the last call of a turn is answered. The answer has no reward here: name a reward function,
    which gets the last turn, for example `nemo_like.environments.math.answer_reward`.
    """

    def __init__(
        self,
        opening: str = "<tool>",
        closing: str = "</tool>",
        role: str = "user",
        error_reward: float = 0.0,
    ) -> None:
        """`opening` and `closing` are the texts around an expression.

        The message with the value has `role`, and `error_reward` is the reward of a call that
        cannot be evaluated, usually negative. Raises ValueError for an empty text.
        """
        if not opening or not closing:
            raise ValueError(
                f"opening is {opening!r} and closing {closing!r}; both need at least one character"
            )
        # Without the characters of another opening, so that the last call is found.
        inside = f"(?:(?!{re.escape(opening)}).)*?"
        self._call = re.compile(f"{re.escape(opening)}({inside}){re.escape(closing)}", re.DOTALL)
        self._role = role
        self._error_reward = error_reward

    def reset(self, row: Mapping[str, Any]) -> State:
        """Return no state: every call is independent of the others."""
        return {}

    def step(self, conversation: Conversation) -> StepResult:
        """Evaluate the call of the last turn, or end the conversation."""
        calls = self._call.findall(conversation.completion)
        if not calls:
            return StepResult(reward={}, done=True)
        metrics = {"tool_calls": 1.0, "tool_errors": 0.0}
        reward: float | dict[str, float] = {}
        try:
            text = shown(evaluate(calls[-1]))
        except BadExpression as error:
            text = f"error: {error}"
            metrics["tool_errors"] = 1.0
            if self._error_reward:
                reward = {"tool_errors": self._error_reward}
        return StepResult(
            observation=[{"role": self._role, "content": text}], reward=reward, metrics=metrics
        )


class GuessingGame:
    """Rewards the guess that equals the row's `answer`, and gives hints for all others.

    The guess is the last integer of a turn. The reward is 1 for the number, less `guess_cost` for
    each wrong guess before it.
    """

    def __init__(self, guess_cost: float = 0.0) -> None:
        self._guess_cost = guess_cost

    def reset(self, row: Mapping[str, Any]) -> State:
        """Return the number and the guesses so far. Raises ValueError for a row without number."""
        answer = str(row.get("answer", "")).strip()
        if _INTEGER.fullmatch(answer) is None:
            raise ValueError(
                f"the row's answer is {answer!r}; the guessing game needs rows with an integer in"
                " the column 'answer'"
            )
        return {"number": int(answer), "num_wrong": 0}

    def step(self, conversation: Conversation) -> StepResult:
        """Compare the guess with the number."""
        number = conversation.state["number"]
        num_wrong = conversation.state["num_wrong"]
        guesses = _INTEGER.findall(conversation.completion)
        if not guesses:
            return StepResult(
                observation="answer with one number",
                state={"number": number, "num_wrong": num_wrong + 1},
                metrics={"invalid_guesses": 1.0, "found": 0.0},
            )
        guess = int(guesses[-1])
        if guess == number:
            reward = 1.0 - self._guess_cost * num_wrong
            return StepResult(reward=reward, done=True, metrics={"found": 1.0})
        return StepResult(
            observation="higher" if number > guess else "lower",
            state={"number": number, "num_wrong": num_wrong + 1},
            metrics={"invalid_guesses": 0.0, "found": 0.0},
        )


class BadExpression(ValueError):
    """An expression cannot be evaluated; `str()` is the reason, in a few words for the model."""


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression. Raises BadExpression.

    Numbers, parentheses and the operators `+ - * / // % **` are understood. Example:
    `evaluate("(1+2)*3/2")` is `Fraction(9, 2)`.
    """
    if len(expression) > MAX_CHARACTERS:
        raise BadExpression(f"longer than {MAX_CHARACTERS} characters")
    if _EXPRESSION.fullmatch(expression.strip()) is None:
        raise BadExpression("not an arithmetic expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except BadExpression:
        raise
    except ZeroDivisionError as error:
        raise BadExpression("division by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise BadExpression("not an arithmetic expression") from error


def shown(value: Fraction) -> str:
    """Return an integer exactly, and any other value as a decimal of up to 12 digits."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.{_MAX_DIGITS_SHOWN}g}"


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return _bounded(_number(node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](left, right))
    raise BadExpression("not an arithmetic expression")


def _number(node: ast.Constant) -> Fraction:
    value = node.value
    # bool is a subclass of int; complex numbers and texts do not count as numbers.
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadExpression("not an arithmetic expression")
    if isinstance(value, int):
        return Fraction(value)
    try:
        # The decimal that was written, not its binary approximation.
        return Fraction(repr(value))
    except ValueError as error:
        raise BadExpression("a number is too large") from error


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise BadExpression("an exponent is not an integer")
    num_bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    # Before the power is computed, which could take all memory.
    if num_bits > 1 and abs(exponent.numerator) * (num_bits - 1) > MAX_BITS:
        raise BadExpression("a number is too large")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise BadExpression("a number is too large")
    return value
