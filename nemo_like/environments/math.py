"""Rewards for problems with verifiable answers: a correct answer, and a marked answer.

Numbers are compared exactly; anything else (fractions, roots, expressions, sets) goes to the
math-verify library, in a child process: math-verify and sympy may run without end, use all memory
or raise on an answer such as `9**9**9**9`, and nothing in a process interrupts arithmetic on big
integers. This process imports neither library.
"""

from __future__ import annotations

import atexit
import logging
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from types import FrameType

from nemo_like.environments.answers import (
    Quantity,
    as_quantity,
    bare,
    final_answer,
    marked_answer,
    normalize,
    num_marked_answers,
    units_match,
)
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.sandbox.isolation import lower_limit
from nemo_like.environments.user_process import Handler, ProcessEnded, ProcessHung, UserProcess

_CPU_LIMIT_S = 2.0
"""CPU time of one comparison, after which it counts as unequal."""
_HARD_CPU_LIMIT_S = 3.0
"""CPU time after which the kernel ends the child, also in code that does not return to Python."""
_WALL_LIMIT_S = 30.0
_MEMORY_LIMIT_BYTES = 4 * 2**30
_MAX_ANSWER_CHARACTERS = 300
"""A longer text has no answer, and would take math-verify long."""
_WORDS = re.compile(
    r"(?!.*\b(?:sin|cos|tan|log|exp|sqrt|inf|infinity)\b)(?=.*[^\W\d_]{3})[^\W\d_]+(?:["
    r" '.-]+[^\W\d_]+)*"
)
_DATE = re.compile(r"\d+(?:-\d+){2,}|\d+(?:/\d+){2,}|\d+:\d+.*")


def answer_reward(sample: RewardSample) -> float:
    r"""Return 1 if the completion's answer equals the row's, else 0.

    The completion's answer is the last one marked by `\boxed{}`, `<answer></answer>` or `####`, or
    else the text after "the answer is" or "Answer:", or else the last number. A row's answer
    without a mark is used unchanged. Raises ValueError for a row without an answer.
    """
    if sample.answer is None:
        raise ValueError("the row has no answer; answer_reward needs data with an `answer` column")
    gold = marked_answer(sample.answer) or sample.answer.strip()
    predicted = final_answer(sample.completion)
    return float(predicted is not None and answers_equal(gold, predicted))


def format_reward(sample: RewardSample) -> float:
    r"""Return 1 if the completion has exactly one marked answer, else 0.

    The marks are `#### x`, `\boxed{x}` and `<answer>x</answer>`.
    """
    return float(num_marked_answers(sample.completion) == 1)


def answers_equal(gold: str, predicted: str) -> bool:
    r"""Return True if two answers have the same meaning.

    Examples: "1,000" and "1000.0"; "\frac{1}{2}" and "0.5"; "(1,2)" and "(1, 2)".

    Two numbers are equal if their values are and no units differ; `50%` equals `50` and `0.5`.
    Words are compared as text, without regard to case. The rest goes to math-verify, in a process
    with limits on time and memory; an answer that exceeds them is unequal. Works in any thread.
    """
    gold = bare(normalize(gold))
    predicted = bare(normalize(predicted))
    if gold == predicted:
        return True
    gold_quantity = as_quantity(gold)
    predicted_quantity = as_quantity(predicted)
    if gold_quantity is not None and predicted_quantity is not None:
        return _quantities_equal(gold_quantity, predicted_quantity)
    if max(len(gold), len(predicted)) > _MAX_ANSWER_CHARACTERS:
        return False
    # math-verify would read words as products of letters, and dates as differences.
    if _is_text(gold) or _is_text(predicted):
        return gold.casefold() == predicted.casefold()
    return _is_equal_expression(gold, predicted)


def _is_text(answer: str) -> bool:
    """Return True for words and dates."""
    return bool(_WORDS.fullmatch(answer) or _DATE.fullmatch(answer))


def _quantities_equal(gold: Quantity, predicted: Quantity) -> bool:
    units = (gold.unit, predicted.unit)
    is_equal = gold.value == predicted.value
    # Exactly one is a percentage: 50% equals 0.5.
    if units == ("%", ""):
        is_equal |= _hundredth(gold.value) == predicted.value
    elif units == ("", "%"):
        is_equal |= _hundredth(predicted.value) == gold.value
    if not is_equal or units_match(*units):
        return is_equal
    return _is_equal_expression(f"1 {gold.unit}", f"1 {predicted.unit}")


def _hundredth(value: Decimal) -> Decimal:
    """Divide by 100 exactly: Decimal arithmetic rounds to the precision of the context."""
    sign, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int), "a Decimal made from digits is finite"
    return Decimal((sign, digits, exponent - 2))


# Completions of one prompt often give the same answer, and a comparison is slow.
@lru_cache(maxsize=4096)
def _is_equal_expression(gold: str, predicted: str) -> bool:
    return _comparer.is_equal(gold, predicted)


class AnswerComparer:
    """Compares answers with math-verify in one child process, which is started on demand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The libraries log and warn about answers that they cannot read.
        self._process = UserProcess(_prepare_comparison, is_quiet=True)

    def is_equal(self, gold: str, predicted: str) -> bool:
        """Return True if math-verify finds the answers equal.

        A comparison that fails, or exceeds a limit on time or memory, returns False. Raises
        RuntimeError if the child process cannot be started.
        """
        with self._lock:
            try:
                self._process.send((gold, predicted))
                return self._process.receive(_WALL_LIMIT_S)
            except (ProcessHung, ProcessEnded):
                return False
            except RuntimeError as error:
                raise RuntimeError(
                    f"{error}; check that `{sys.executable} -c 'import math_verify'` works"
                ) from error

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._process.close()


class _OutOfTime(BaseException):
    """Raised in a comparison at its CPU limit; not an Exception, so that no library handles it."""


def _prepare_comparison() -> Handler:
    """Limit the child process and import the libraries; it replies whether a pair is equal."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGVTALRM, _raise_out_of_time)
    lower_limit(resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0, 0)
    # Slow, so it is imported before the time of the first comparison starts.
    from nemo_like.environments.expressions import expressions_equal

    logging.disable()

    def handle(pair: tuple[str, str], reply: Callable[[bool], None]) -> None:
        reply(_within_limit(expressions_equal, *pair))

    return handle


def _raise_out_of_time(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def _within_limit(compare: Callable[[str, str], bool], gold: str, predicted: str) -> bool:
    try:
        signal.setitimer(signal.ITIMER_PROF, _HARD_CPU_LIMIT_S)
        # Repeated every 0.5 s, in case a library handles the first exception.
        signal.setitimer(signal.ITIMER_VIRTUAL, _CPU_LIMIT_S, 0.5)
        try:
            return compare(gold, predicted)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except (Exception, _OutOfTime):  # noqa: BLE001
        # An answer that the libraries cannot handle is not the right one.
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


_comparer = AnswerComparer()
"""The comparer of this process."""

atexit.register(_comparer.close)
