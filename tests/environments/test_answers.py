"""Where answers are found in texts of the forms that models write, at which cost, and that no text
raises.
"""

from __future__ import annotations

import time
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.environments.answers import (
    Quantity,
    as_quantity,
    bare,
    final_answer,
    marked_answer,
    normalize,
    num_marked_answers,
)
from nemo_like.environments.math import answer_reward, format_reward
from nemo_like.environments.reward import RewardSample

# text, final answer, number of marked answers; written by hand
ANSWERS = [
    # four hashes, as in GSM8K
    ("He sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "72", 1),
    ("#### $1,234.50", "$1,234.50", 1),
    ("He has 3.\n#### 1,234 apples", "1,234 apples", 1),
    ("#### -7", "-7", 1),
    ("#### \u22127", "-7", 1),
    ("#### 50%", "50%", 1),
    ("#### 3/4", "3/4", 1),
    ("#### $x = 5$", "$x = 5$", 1),
    ("#### 6.02e23", "6.02e23", 1),
    ("#### (1, 2)", "(1, 2)", 1),
    ("#### B", "B", 1),
    ("It is the capital of France.\n#### Paris", "Paris", 1),
    ("#### \\boxed{42}", "42", 1),
    ("#### 2\nNo, that is wrong.\n#### 3", "3", 2),
    # headings
    ("#### Step 1: add\n40+2\n#### Step 2: done\nThe answer is 42", "42", 0),
    ("\\boxed{42}\n\n#### Check\n6*7 = 42.", "42", 1),
    ("\\boxed{42}\n\n#### 3. Verify the result\nIt holds for 7.", "42", 1),
    ("#### 1. Setup\nx = 2\n#### 2. Result\nWe get **14**", "14", 0),
    ("#### 2 Check the sum\n6+1 = 7", "7", 0),
    ("##### 5\nso it is 6", "6", 0),
    ("#### Conclusion\nShe pays $18.", "$18", 0),
    # boxes
    ("so it is \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", 1),
    ("\\boxed{\\sqrt{\\frac{a^{2}}{b}}}", "\\sqrt{\\frac{a^{2}}{b}}", 1),
    ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", 1),
    ("\\boxed{1} or rather \\boxed {x^{2}}", "x^{2}", 2),
    ("\\boxed{1}, and again \\boxed{4", "1", 1),
    ("so \\boxed{42", "42", 0),
    ("\\boxed{}", None, 0),
    ("\\fbox{9}", "9", 1),
    ("\\boxed{\\boxed{5}}", "5", 1),
    ("\\boxed{1{,}234}", "1,234", 1),
    ("\\boxed{1\\,234}", "1,234", 1),
    ("\\boxed{-\\$5}", "-$5", 1),
    ("\\boxed{ 42 \\text{ km} }", "42 \\text{ km}", 1),
    # tags
    ("<think>so 3</think><answer> 42 </answer>", "42", 1),
    ("<answer>\\boxed{42}</answer>", "42", 1),
    ("<answer>41</answer> no, <answer>42</answer>", "42", 2),
    ("<answer>42", "42", 0),
    # sentences
    ("**Answer:** 42", "42", 0),
    ("**Answer**: $42$", "42", 0),
    ("### Final Answer\n\n42 apples", "42 apples", 0),
    ("The answer is 42.", "42", 0),
    ("The answer is 42 because 6*7 = 42, not 41.", "42", 0),
    ("The answer is 5 or 6.", "5 or 6", 0),
    ("The answer is 2x + 3.", "2x + 3", 0),
    ("The answer is not clear. It may be 7", "7", 0),
    ("The answer is no. There are 2 left.", "no", 0),
    ("The final answer is: $\\frac{1}{2}$.", "\\frac{1}{2}", 0),
    ("the answer is (B). 12 others are wrong.", "(B)", 0),
    ("The answer is that Janet makes $18 every day.", "$18", 0),
    ("So the answer to the first question is 12. There are 7 days.", "12", 0),
    ("Answer: 3:45 PM", "3:45 PM", 0),
    ("The answer is 6.02 \\times 10^{23}.", "6.02 \\times 10^{23}", 0),
    # numbers only
    ("no mark, only 12", "12", 0),
    ("so 1,200 of 3 kg", "3", 0),
    ("it costs $1,200.50.", "$1,200.50", 0),
    ("5-42", "42", 0),
    ("pages 5\u201342", "42", 0),
    ("x = -7", "-7", 0),
    ("f(3)-4", "4", 0),
    ("so it is 3/4", "3/4", 0),
    ("$$x = \\frac{3}{4}$$", "\\frac{3}{4}", 0),
    ("due on 2024-01-15", "2024-01-15", 0),
    ("due on 5/6/2024", "5/6/2024", 0),
    ("at 10:30", "10:30", 0),
    ("12,34", "34", 0),
    ("about 1.5e-3", "1.5e-3", 0),
    ("none", None, 0),
    ("", None, 0),
]

# gold, completion, whether the reward is 1; written by hand
REWARDS = [
    ("so\n#### 1,234", "#### $1,234.00", True),
    ("42", "#### 42 apples", True),
    ("42", "\\boxed{42 \\text{ km}}", True),
    ("5 km", "The answer is 5 hours.", False),
    ("5 km", "The answer is 5 km.", True),
    ("50%", "\\boxed{50\\%}", True),
    ("0.5", "\\boxed{50\\%}", True),
    ("0.5", "\\boxed{5\\%}", False),
    ("-5", "The answer is \u22125.", True),
    ("42", "5-42", True),
    ("-42", "5-42", False),
    ("602000000000000000000000", "\\boxed{6.02 \\times 10^{23}}", True),
    ("2000000", "The answer is 2 million.", True),
    ("5", "\\boxed{x = 5}", True),
    ("Paris", "The answer is Paris.", True),
    ("dog", "The answer is god.", False),
    ("2.5", "The answer is 2 1/2 hours.", True),
    ("2.5", "In all 2½ cups", True),
    ("90", "The angle is \\boxed{90^{\\circ}}.", True),
    ("90^\\circ", "The answer is 90 degrees.", True),
    ("2024-01-15", "It is due on 2024-01-15", True),
    ("2008", "\\boxed{2024-01-15}", False),
    ("7", "#### Step 1: add\n3+4\n#### Step 2: done\nSo 7", True),
    ("2", "#### Step 1: add\n3+4\n#### Step 2: done\nSo 7", False),
]


@pytest.mark.parametrize(("text", "answer", "num_marked"), ANSWERS)
def test_the_final_answer_of_a_text(text: str, answer: str | None, num_marked: int) -> None:
    assert final_answer(text) == answer
    assert num_marked_answers(text) == num_marked
    assert (marked_answer(text) is not None) == (num_marked > 0)


@pytest.mark.parametrize(("gold", "completion", "is_right"), REWARDS)
def test_the_reward_of_a_text(gold: str, completion: str, is_right: bool) -> None:
    assert answer_reward(RewardSample(prompt="?", completion=completion, answer=gold)) == is_right


@pytest.mark.parametrize(
    ("text", "quantity"),
    [
        ("-1,234.50", Quantity(Decimal("-1234.5"), "")),
        ("$18 per day", Quantity(Decimal(18), "dollar per day")),
        ("42 Apples", Quantity(Decimal(42), "Apples")),
        ("€1.2 million", Quantity(Decimal(1_200_000), "euro")),
        ("x = 5", Quantity(Decimal(5), "")),
        ("5km", Quantity(Decimal(5), "km")),
        ("1.5 \\times 10^{3}", Quantity(Decimal(1500), "")),
        ("90^\\circ", Quantity(Decimal(90), "°")),
        ("5x", None),
        ("5m", None),
        ("5 thirds", None),
        ("2 and 3", None),
        ("1/2", None),
        ("", None),
    ],
)
def test_quantities(text: str, quantity: Quantity | None) -> None:
    assert as_quantity(text) == quantity


def test_numbers_of_any_length_are_compared_exactly() -> None:
    """Python refuses to convert texts of more than 4,300 digits to integers."""
    digits = "7" * 20_000
    assert (
        answer_reward(RewardSample(prompt="?", completion=f"#### {digits}.0", answer=digits)) == 1.0
    )
    assert (
        answer_reward(RewardSample(prompt="?", completion=f"#### {digits}1", answer=digits)) == 0.0
    )
    assert (
        answer_reward(RewardSample(prompt="?", completion="#### 1e999999999", answer=digits)) == 0.0
    )
    assert (
        answer_reward(RewardSample(prompt="?", completion="#### 1e" + "9" * 5000, answer="5"))
        == 0.0
    )


PIECES = [
    "\\boxed{", "\\boxed ", "{", "}", "\\", "#", "#### ", "#### 1 ", "<answer>", "</answer>",
    "answer is ", "answer: 4 ", "answer to x ", "answer\n", "1", "111,", "1-", "1/", "1:", "1e",
    ".1", "1 x 10^1", "\\text{", "\\frac{1}{2}", "$", "*", "-", " ", "\n", "a ", "\ud83d", "\0",
    "\u2212", "\u00bd", "\u00b2", "^\\circ", "1 1/", "\\,", "1\\frac",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_extraction_is_linear_in_the_length(piece: str) -> None:
    """Four times the text takes about four times as long; a quadratic pass over 200,000 characters
    takes many minutes.

    The bound is CPU time and generous: these take at most 0.8 s.
    """
    text = "\\boxed{" + piece * (200_000 // len(piece))
    start = time.process_time()
    final_answer(text)
    num_marked_answers(text)
    as_quantity(text)
    assert time.process_time() - start < 10


texts = st.text() | st.lists(st.sampled_from([*PIECES, "4", "x", "is", "="]), max_size=40).map(
    "".join
)


@settings(max_examples=300, deadline=None)
@given(text=texts, gold=st.text(max_size=20))
def test_no_text_raises(text: str, gold: str) -> None:
    answer = final_answer(text)
    assert answer is None or answer in normalize(text)
    bare(text)
    as_quantity(text)
    format_reward(RewardSample(prompt="?", completion=text, answer=gold))


@settings(max_examples=200, deadline=None)
@given(before=st.text(alphabet="ab {}\n#=5-"), inside=st.text(alphabet="ab{}5", max_size=10))
def test_a_box_is_found_as_by_counting_braces(before: str, inside: str) -> None:
    depths = [
        inside[: end + 1].count("{") - inside[: end + 1].count("}") for end in range(len(inside))
    ]
    is_balanced = all(depth >= 0 for depth in depths) and depths[-1:] in ([], [0])
    if is_balanced and inside.strip():
        assert marked_answer(f"{before}\\boxed{{{inside}}}") == inside.strip()
