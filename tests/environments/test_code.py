"""Rewards for code: extraction, tests in every form, and programs that fake success."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.environments.code import (
    CodeScore,
    CodeTest,
    CodeTests,
    InputOutput,
    code_reward,
    code_share_reward,
    extract_code,
    parse_tests,
    score_code,
)
from nemo_like.environments.code_runner import literal
from nemo_like.environments.environment import Conversation, StepResult
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.sandbox.sandbox import Sandbox, SandboxError, SandboxLimits

_EXAMPLES = Path(__file__).parents[2] / "examples" / "code"
_KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
_PLAIN = st.recursive(
    _KEYS | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(_KEYS, inner)
        | st.sets(_KEYS)
    ),
    max_leaves=20,
)
_RIGHT = "def double(x):\n    return 2 * x\n"
_ASSERTS = ["assert double(2) == 4", "assert double('ab') == 'abab'", "assert 6 == double(3)"]


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    try:
        return Sandbox(SandboxLimits(wall_s=20.0, cpu_s=5.0))
    except SandboxError as error:
        pytest.skip(str(error))


def _completion(code: str) -> str:
    return f"The solution:\n\n```python\n{code}\n```\nIt works."


def _score(sandbox: Sandbox, code: str, tests: Any) -> CodeScore:
    sample = RewardSample(prompt="", completion=_completion(code), row={"tests": tests})
    return asyncio.run(score_code(sample, sandbox))


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na\n```\ntext\n```Python3\nb\n```", "b\n"),
        ("```python\na\n```\n```\noutput\n```", "a\n"),
        ("text\n  ```\n  a\n  ```\n", "  a\n"),
        ("```bash\nls\n```", None),
        ("```python\na = 1", None),
        ("a = 1", None),
        ("", None),
        ("```python\nx = 'a\x0cb\u2028c'\n```", "x = 'a\x0cb\u2028c'\n"),
        ("Set\n```x = 1```\nfirst\n```python\r\ny = 2\r\n```", "y = 2\n"),
    ],
)
def test_the_last_closed_block_of_python_is_the_code(completion: str, code: str | None) -> None:
    assert extract_code(completion) == code


@given(_PLAIN)
def test_a_literal_has_the_value(value: Any) -> None:
    test = CodeTest("value", "", "", value)
    assert test.is_passed({"value": literal(value)})


def test_literals_of_special_values() -> None:
    assert literal(math.inf) == "1e999" and literal(Counter("aab")) == "{'a': 2, 'b': 1}"
    assert literal(1 << 20_000).startswith("0x1000")
    for value in (math.nan, object(), [math.nan]):
        with pytest.raises((TypeError, ValueError)):
            literal(value)


@pytest.mark.parametrize(
    ("column", "kinds"),
    [
        (_ASSERTS, ["value", "value", "value"]),
        (
            "import math\nassert f(1) == math.pi\nassert f(2) is None",
            ["setup", "statement", "value"],
        ),
        ("assert abs(f(1) - 1) < 1e-6", ["statement"]),
        ("def check(c):\n    assert c(1) == 2\ncheck(f)", ["setup", "statement"]),
        ('["assert f(1) == 2"]', ["value"]),
        ("assert f(1) == 2, 'message'", ["value"]),
        ("assert f(1) == 2 == g(1)", ["statement"]),
    ],
)
def test_statements_are_sorted_by_how_they_are_checked(column: Any, kinds: list[str]) -> None:
    tests = parse_tests(column)
    assert [test.kind for test in tests if isinstance(test, CodeTest)] == kinds


@pytest.mark.parametrize(
    "column",
    [
        [{"input": "1\n", "output": "2\n"}, {"input": "3\n", "output": "4\n"}],
        {"inputs": ["1\n", "3\n"], "outputs": ["2\n", "4\n"]},
        '{"inputs": ["1\\n", "3\\n"], "outputs": ["2\\n", "4\\n"]}',
    ],
)
def test_inputs_and_outputs_in_three_forms(column: Any) -> None:
    assert parse_tests(column) == [InputOutput("1\n", "2\n"), InputOutput("3\n", "4\n")]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ("", "has no tests"),
        ("assert (", "not Python"),
        ([], r"are \[\]; write a list of assert statements"),
        ([1], r"are \[1\]"),
        (5, "are 5"),
        ({"inputs": ["1"], "outputs": []}, "of equal lengths"),
        ([{"input": "1"}], '"output": text'),
    ],
)
def test_invalid_tests_are_refused(column: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tests(column)


def test_a_row_without_tests_is_an_error() -> None:
    with pytest.raises(ValueError, match="column `tests` or `answer`"):
        asyncio.run(code_reward(RewardSample(prompt="", completion="")))


def test_rewards_are_the_share_of_passed_tests_or_all_of_them(sandbox: Sandbox) -> None:
    completion = _completion("def double(x):\n    return x + x if x != 3 else 7\n")
    sample = RewardSample(prompt="", completion=completion, answer="\n".join(_ASSERTS))
    assert asyncio.run(code_share_reward(sample)) == pytest.approx(2 / 3)
    assert asyncio.run(code_reward(sample)) == 0.0
    right = RewardSample(prompt="", completion=_completion(_RIGHT), answer="\n".join(_ASSERTS))
    assert asyncio.run(code_reward(right)) == asyncio.run(code_share_reward(right)) == 1.0
    nothing = RewardSample(prompt="", completion="no code", answer="\n".join(_ASSERTS))
    assert asyncio.run(code_share_reward(nothing)) == 0.0


def test_setup_and_other_statements_run_in_order(sandbox: Sandbox) -> None:
    tests = """
values = [double(1)]
values.append(double(2))
assert values == [2, 4]
assert sum(values) > 5
assert double(1) is not None
"""
    assert _score(sandbox, _RIGHT, tests) == CodeScore(3, 3, "")
    wrong = _score(sandbox, "def double(x):\n    return 3\n", tests)
    assert wrong == CodeScore(2, 3, "test 1: another value")


def test_a_program_is_checked_by_its_output(sandbox: Sandbox) -> None:
    tests = {"inputs": ["2\n", "3\n"], "outputs": ["4", "6  \n\n"]}
    assert _score(sandbox, "print(2 * int(input()))", tests) == CodeScore(2, 2, "")
    assert _score(sandbox, "print(2 + int(input()))", tests) == CodeScore(
        1, 2, "test 2: another output"
    )
    assert "ValueError" in _score(sandbox, "int('x')", tests).problem


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import sys\nsys.exit(0)", "exit status 1"),
        ("import os\nos._exit(0)", "did not run"),
        ("def double(x):\n    import os\n    os._exit(0)", "did not run"),
        ("def double(x):\n    raise SystemExit(0)", "SystemExit"),
        (
            "import atexit, os\natexit.register(os._exit, 0)\ndef double(x):\n    pass",
            "another value",
        ),
        ('print(\'{"test": 0, "value": "4"}\')', "NameError"),
        ('import os\nos.write(3, b\'{"test": 0}\\n{"test": 1, "token": "x"}\\n\')\n', "NameError"),
        (
            (
                "class Equal:\n    def __eq__(self, other):\n        return True\n"
                "    def __repr__(self):\n        return '4'\ndef double(x):\n    return Equal()"
            ),
            "not plain data",
        ),
        (
            (
                "class Four(int):\n    __eq__ = lambda *args: True\n    __hash__ = int.__hash__\n"
                "def double(x):\n    return Four(5)"
            ),
            "another value",
        ),
        ("import builtins\nbuiltins.exec = builtins.eval = lambda *a, **k: 4", "NameError"),
        ("import sys\nsys.modules['json'].dumps = lambda *a: '{}'", "NameError"),
        ("AssertionError = None\ndef double(x):\n    return None", "another value"),
        ("import sys\nsys.settrace(lambda *a: sys.exit(0))", "NameError"),
        ("def double(x) return 4", "SyntaxError"),
        ("def double(x):\n    while True: pass", "limit on time"),
    ],
)
def test_faked_success_scores_0(code: str, problem: str) -> None:
    sandbox = Sandbox(SandboxLimits(wall_s=20.0, cpu_s=1.0))
    tested = _score(sandbox, code, [*_ASSERTS, "assert not double(0) and double(1) > 1"])
    assert tested.num_passed == 0 and tested.num_tests == 4
    assert problem in tested.problem


def _turn(environment: CodeTests, code: str | None, state: dict[str, Any]) -> StepResult:
    completion = "I do not know." if code is None else _completion(code)
    row = {"prompt": "p", "tests": _ASSERTS}
    conversation = Conversation(
        messages=({"role": "assistant", "content": completion},), row=row, state=state
    )
    return asyncio.run(environment.step(conversation))


@pytest.mark.parametrize("partial", [True, False])
def test_the_model_sees_the_problem_of_its_program(sandbox: Sandbox, partial: bool) -> None:
    environment = CodeTests(time_limit_s=20.0, partial=partial)
    state = dict(environment.reset({"tests": _ASSERTS}))
    no_code = _turn(environment, None, state)
    assert "```python" in str(no_code.observation) and not no_code.done
    failed = _turn(environment, "print('note')\ndef double(x):\n    return 4", state)
    text = str(failed.observation)
    assert text.startswith("1 of 3 tests passed. test 2: another value") and "note" in text
    assert not failed.done and failed.metrics == {"programs": 1.0, "programs_over_limit": 0.0}
    broken = _turn(environment, "def double(x):\n    return x\nraise ValueError('x')", state)
    assert 'File "solution.py", line 3, in <module>' in str(broken.observation)
    assert "    raise ValueError('x')" in str(broken.observation)
    passed = _turn(environment, _RIGHT, dict(failed.state or {}))
    assert passed.done and passed.observation is None
    rewards = []
    for result in (no_code, failed, broken, passed):
        assert isinstance(result.reward, dict)
        rewards.append(result.reward["tests"])
    expected = [0.0, 1 / 3, 0.0, 2 / 3] if partial else [0.0, 0.0, 0.0, 1.0]
    assert rewards == pytest.approx(expected)


def test_the_environment_needs_tests_and_valid_limits() -> None:
    with pytest.raises(ValueError, match="max_output_chars is 0"):
        CodeTests(max_output_chars=0)
    with pytest.raises(ValueError, match="column `tests` or `answer`"):
        CodeTests(time_limit_s=20.0).reset({"prompt": "p"})


def test_the_example_rows_have_valid_tests() -> None:
    for name in ("train", "validation"):
        lines = (_EXAMPLES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        for line in lines:
            assert parse_tests(json.loads(line)["tests"])
