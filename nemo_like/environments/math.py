"""Rewards for problems whose answer can be checked: is the stated answer right, and is one stated
at all.

Numbers are compared exactly; anything else (fractions, roots, expressions, sets) goes to the
math-verify library.
"""

from __future__ import annotations

import re
from decimal import Decimal
from functools import lru_cache

from nemo_like.environments.answers import (
    Quantity,
    as_number,
    as_quantity,
    bare,
    final_answer,
    last_number,
    marked_answer,
    normalize,
    num_marked_answers,
)
from nemo_like.environments.comparison import shared_comparer
from nemo_like.environments.reward import RewardSample

__all__ = [
    "answer_reward",
    "answers_equal",
    "as_number",
    "final_answer",
    "format_reward",
    "last_number",
    "marked_answer",
]

_MAX_ANSWER_CHARACTERS = 300
"""A longer "answer" is a text that never got to one."""
_WORDS = re.compile(
    r"(?!.*\b(?:sin|cos|tan|log|exp|sqrt|inf|infinity)\b)(?=.*[^\W\d_]{3})[^\W\d_]+(?:["
    r" '.-]+[^\W\d_]+)*"
)
_DATE = re.compile(r"\d+(?:-\d+){2,}|\d+(?:/\d+){2,}|\d+:\d+.*")


def answer_reward(sample: RewardSample) -> float:
    r"""1 if the completion's answer equals the row's, else 0. Raises ValueError for a row without
    an answer.

    The completion's answer is the last one marked by `\boxed{}`, `<answer></answer>` or `####`, or
    else what follows "the answer is" or "Answer:", or else the last number. A row's answer without
    a mark is taken whole.
    """
    if sample.answer is None:
        raise ValueError("the row has no answer; answer_reward needs data with an `answer` column")
    gold = marked_answer(sample.answer) or sample.answer.strip()
    predicted = final_answer(sample.completion)
    return float(predicted is not None and answers_equal(gold, predicted))


def format_reward(sample: RewardSample) -> float:
    r"""1 if the completion states exactly one marked answer (`#### x`, `\boxed{x}`,
    `<answer>x</answer>`), else 0.
    """
    return float(num_marked_answers(sample.completion) == 1)


def answers_equal(gold: str, predicted: str) -> bool:
    r"""Whether two answers mean the same. Example: "1,000" and "1000.0"; "\frac{1}{2}" and "0.5";
    "(1,2)" and "(1, 2)".

    Two numbers are equal if their values are and no units differ; `50%` equals `50` and `0.5`.
    Words are compared as text, without regard to case. The rest goes to math-verify, in a process
    with limits on time and memory (see `comparison`); an answer that exceeds them is unequal. Works
    in any thread.
    """
    gold, predicted = bare(normalize(gold)), bare(normalize(predicted))
    if gold == predicted:
        return True
    gold_quantity, predicted_quantity = as_quantity(gold), as_quantity(predicted)
    if gold_quantity is not None and predicted_quantity is not None:
        return _quantities_equal(gold_quantity, predicted_quantity)
    if max(len(gold), len(predicted)) > _MAX_ANSWER_CHARACTERS:
        return False
    if any(_WORDS.fullmatch(answer) or _DATE.fullmatch(answer) for answer in (gold, predicted)):
        return gold.casefold() == predicted.casefold()
    return _is_equal_expression(gold, predicted)


def _quantities_equal(gold: Quantity, predicted: Quantity) -> bool:
    if gold.unit and predicted.unit and gold.unit != predicted.unit:
        return False
    if gold.value == predicted.value:
        return True
    if "%" not in (gold.unit, predicted.unit) or gold.unit == predicted.unit:
        return False
    percent, other = (gold, predicted) if gold.unit == "%" else (predicted, gold)
    return _hundredth(percent.value) == other.value


def _hundredth(value: Decimal) -> Decimal:
    """Exact: arithmetic on a Decimal would round it to the precision of the context."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int), "a Decimal made from digits is finite"
    return Decimal((sign, digits, exponent - 2))


@lru_cache(maxsize=4096)
def _is_equal_expression(gold: str, predicted: str) -> bool:
    return shared_comparer.is_equal(gold, predicted)
