"""Answers: where they are found in a text, and when two of them mean the same."""

from __future__ import annotations

import json
import threading
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.environments.answers import Quantity, as_quantity, final_answer, marked_answer
from nemo_like.environments.math import answer_reward, answers_equal, format_reward
from nemo_like.environments.reward import RewardSample


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("He sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "72"),
        ("first #### 3\nno, wait\n#### 4\nthanks", "4"),
        (r"so it is \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} or rather \boxed {x^{2}}", "x^{2}"),
        (r"\boxed{3} and so #### 4", "4"),
        (r"#### 4 and so \boxed{3}", "3"),
        ("no mark, only 12", None),
        (r"\boxed{never closed", None),
        ("####", None),
        ("", None),
    ],
)
def test_the_last_marked_answer_counts(text: str, answer: str | None) -> None:
    assert marked_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 1,200 of 3 kg", "3"),
        ("it costs $1,200.50.", "$1,200.50"),
        ("-7", "-7"),
        ("none", None),
        ("12,34", "34"),
        (".5", ".5"),
    ],
)
def test_the_last_number_counts_without_a_mark(text: str, number: str | None) -> None:
    assert final_answer(text) == number


@pytest.mark.parametrize(
    ("gold", "predicted", "is_equal"),
    [
        ("72", "72", True),
        ("72", "72.00", True),
        ("1,000", "1000", True),
        ("$5", "5.", True),
        ("72", "73", False),
        ("0.1", "0.10000000001", False),
        (r"\frac{1}{2}", "0.5", True),
        ("1/2", "0.5", True),
        (r"\sqrt{2}/2", r"\frac{1}{\sqrt{2}}", True),
        ("x^2+1", "1+x^2", True),
        ("(1,2)", "(1, 2)", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        (r"\text{A}", "A", True),
        ("A", "B", False),
        (r"\frac{1}{2}", "2", False),
        ("5", "nonsense }{", False),
        ("5", "9" * 1000 + "^{", False),
    ],
)
def test_answers_equal(gold: str, predicted: str, is_equal: bool) -> None:
    assert answers_equal(gold, predicted) is is_equal


CASES: dict[str, list[dict]] = {}
for line in Path(__file__).with_name("answer_cases.jsonl").read_text(encoding="utf-8").splitlines():
    case = json.loads(line)
    CASES.setdefault(case["category"], []).append(case)


@pytest.mark.parametrize("category", CASES)
def test_answers_of_a_category(category: str) -> None:
    """The verdicts were written by hand, for spellings that models give and for near misses.

    `math_verify_differs` lists the answers for which math-verify 0.9.0 has the other verdict.
    """
    wrong = []
    for case in CASES[category]:
        for is_equal, key in ((True, "equal"), (False, "unequal")):
            for predicted in case[key]:
                if answers_equal(case["gold"], predicted) is not is_equal:
                    wrong.append((case["gold"], predicted, is_equal))
    assert wrong == []


@pytest.mark.parametrize("category", ["degrees", "units", "percents", "currencies"])
def test_equality_is_symmetric(category: str) -> None:
    for case in CASES[category]:
        for predicted in case["equal"]:
            assert answers_equal(predicted, case["gold"]), (predicted, case["gold"])
        for predicted in case["unequal"]:
            assert not answers_equal(predicted, case["gold"]), (predicted, case["gold"])


@settings(max_examples=50, deadline=None)
@given(value=st.integers(-(10**12), 10**12))
def test_an_integer_equals_itself_in_every_spelling(value: int) -> None:
    for spelling in (str(value), f"{value:,}", f"{value}.0", f" {value}. "):
        assert as_quantity(spelling) == Quantity(Decimal(value), "")
        assert (
            answer_reward(
                RewardSample(prompt="", completion=f"... #### {spelling}", answer=str(value))
            )
            == 1.0
        )
    assert (
        answer_reward(RewardSample(prompt="", completion=f"#### {value + 1}", answer=str(value)))
        == 0.0
    )


def test_answers_are_compared_in_other_threads_too() -> None:
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(answers_equal(r"\frac{1}{2}", "0.5")))
    thread.start()
    thread.join()
    assert results == [True]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so #### 72", "3 * 24 = 72\n#### 72", 1.0),
        ("it must be 72 in all", "72", 1.0),
        ("it must be 72, or 73", "72", 0.0),
        (r"\boxed{\frac12}", "$0.5$", 1.0),
        ("I do not know", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_answer_reward(completion: str, answer: str, reward: float) -> None:
    assert answer_reward(RewardSample(prompt="?", completion=completion, answer=answer)) == reward


def test_answer_reward_needs_an_answer() -> None:
    with pytest.raises(ValueError, match="no answer"):
        answer_reward(RewardSample(prompt="?", completion="#### 1"))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("1+1=2\n#### 2", 1.0),
        (r"thus \boxed{2}", 1.0),
        ("2", 0.0),
        ("#### 2\n#### 3", 0.0),
        ("#### ", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward_requires_one_marked_answer(completion: str, reward: float) -> None:
    assert format_reward(RewardSample(prompt="?", completion=completion, answer="2")) == reward
