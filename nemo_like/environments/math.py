"""Rewards for problems whose answer can be checked: is the stated answer right, and is one stated at all.

Numbers are compared exactly; anything else (fractions, roots, expressions, sets) goes to the math-verify library.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction

from math_verify import parse, verify

from nemo_like.environments.interface import RewardSample

_HASH_ANSWER = re.compile(r"####[ \t]*([^\n]*)")
_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")
_TIMEOUT_S = 5
_MAX_ANSWER_CHARACTERS = 300
"""A longer "answer" is a text that never got to one; parsing it could take the whole time limit."""


def answer_reward(sample: RewardSample) -> float:
    """1 if the completion's answer equals the row's, else 0. Raises ValueError for a row without an answer.

    An answer is what follows `####` or is inside `\\boxed{}` (of several, the last), or else the text's last number.
    A row's answer without such a mark is taken whole.
    """
    if sample.answer is None:
        raise ValueError("the row has no answer; answer_reward needs data with an `answer` column")
    gold = marked_answer(sample.answer) or sample.answer.strip()
    predicted = marked_answer(sample.completion) or last_number(sample.completion)
    return float(predicted is not None and answers_equal(gold, predicted))


def format_reward(sample: RewardSample) -> float:
    """1 if the completion states exactly one marked answer (`#### x` or `\\boxed{x}`), else 0."""
    return float(len(_marked_answers(sample.completion)) == 1)


def marked_answer(text: str) -> str | None:
    """The last answer marked by `####` or `\\boxed{}`, without the mark; None without any."""
    answers = _marked_answers(text)
    return max(answers)[1] if answers else None


def last_number(text: str) -> str | None:
    """The last number written in the text. Example: "so 1,200 of 3 kg" gives "3"."""
    numbers = _NUMBER.findall(text)
    return numbers[-1] if numbers else None


def answers_equal(gold: str, predicted: str) -> bool:
    """Whether two answers mean the same. Example: "1,000" and "1000.0"; "\\frac{1}{2}" and "0.5"; "(1,2)" and "(1, 2)".

    A comparison is given up as unequal after 5 s. The limit rests on a signal and so holds in a main thread only, where
    reward workers run; called in another thread it has no limit.
    """
    gold_number, predicted_number = as_number(gold), as_number(predicted)
    if gold_number is not None and predicted_number is not None:
        return gold_number == predicted_number
    if gold.strip() == predicted.strip():
        return True
    if max(len(gold), len(predicted)) > _MAX_ANSWER_CHARACTERS:
        return False
    timeout_s = _TIMEOUT_S if threading.current_thread() is threading.main_thread() else 0
    gold_values, predicted_values = (parse(f"\\boxed{{{answer}}}", parsing_timeout=timeout_s) for answer in (gold, predicted))
    return verify(gold_values, predicted_values, timeout_seconds=timeout_s)


def as_number(text: str) -> Fraction | None:
    """The exact value of a plain number ("-1,234.50", "$7", "72."); None for anything else."""
    text = text.strip().removesuffix(".")
    if not _NUMBER.fullmatch(text):
        return None
    return Fraction(text.replace(",", "").replace("$", ""))


def _marked_answers(text: str) -> list[tuple[int, str]]:
    """(position, answer) of every marked answer that is not empty."""
    answers = [(match.start(), match.group(1).strip()) for match in _HASH_ANSWER.finditer(text)]
    answers += [(match.start(), _inside_braces(text, match.end())) for match in _BOXED.finditer(text)]
    return [(position, answer) for position, answer in answers if answer]


def _inside_braces(text: str, start: int) -> str:
    """From `start`, just after an opening brace, up to its closing one; empty if it never closes."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return ""
