"""Rewards for generated Python code, which is run with the row's tests in the sandbox, and an
environment in which the model writes a program, sees how its tests end, and tries again.

See docs/sandbox.md for the forms of tests, the limits, and what a program can do to a test.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from nemo_like.config.errors import shown_value
from nemo_like.environments.environment import Conversation, State, StepResult
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.sandbox.sandbox import (
    Requirement,
    Sandbox,
    SandboxLimits,
    SandboxResult,
)

logger = logging.getLogger(__name__)

_PYTHON_TAGS = ("python", "python3", "py")
_RUNNER = Path(__file__).with_name("code_runner.py")
_OVER_LIMIT = ("timeout", "memory", "output", "disk", "signal", "left_processes")
_VALUE_MARGIN = 1000
"""Characters by which a value may be longer than ten times the expected one."""
_NO_CODE = "Write the complete program in one block that begins with ```python and ends with ```."


@dataclass(frozen=True, slots=True)
class InputOutput:
    """A test of a complete program: its output for an input."""

    input: str
    output: str

    def is_passed(self, stdout: str) -> bool:
        """Return True if the output is equal, except for white space at the ends of lines."""
        return _lines(stdout) == _lines(self.output)


@dataclass(frozen=True, slots=True, eq=False)
class CodeTest:
    """One statement of the tests, which the sandbox executes after the program.

    `value`: `source` is an expression, whose value is compared outside of the sandbox, which
    never has the expected value. `statement`: passed if it raises nothing. `setup`: the same, but
    it does not count as a test.
    """

    kind: Literal["value", "statement", "setup"]
    source: str
    token: str
    """A random text that the sandbox reports for a statement that raised nothing."""
    expected: Any = None
    must_be_same: bool = False
    """For a value: compare with `is` instead of `==`."""

    def is_passed(self, report: Mapping[str, Any]) -> bool:
        """Return True if the line that the sandbox reported for this test states success."""
        if self.kind != "value":
            return report.get("token") == self.token
        text = report.get("value")
        limit = 10 * len(repr(self.expected)) + _VALUE_MARGIN
        if not isinstance(text, str) or len(text) > limit:
            return False
        try:
            value = ast.literal_eval(text)
            if self.must_be_same:
                return value is self.expected
            return bool(value == self.expected)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            # The text comes from an untrusted program.
            return False


Tests = Sequence[InputOutput] | Sequence[CodeTest]


@dataclass(frozen=True, slots=True)
class CodeScore:
    """The tests of one program.

    Example: `CodeScore(num_passed=2, num_tests=3, problem="test 2: AssertionError")`.
    """

    num_passed: int
    num_tests: int
    problem: str
    """The first problem in words; "" if every test passed."""
    output: str = field(default="", compare=False)
    """Stdout and stderr of the program, or of its first run that failed."""
    is_over_limit: bool = field(default=False, compare=False)
    """A run exceeded a limit, ended by a signal or left processes."""

    @property
    def share(self) -> float:
        """Share of the tests that passed."""
        return self.num_passed / self.num_tests


async def code_reward(
    sample: RewardSample,
    *,
    time_limit_s: float = 10.0,
    memory_mb: int = 512,
    require: Requirement = "isolated",
    python_path: Sequence[str] = (),
) -> float:
    """Return 1 if the completion's code passes every test of the row, else 0.

    The code is the last block of Python in the completion; the tests are the column `tests`, or
    else `answer`. Raises ValueError for a row without tests, and SandboxError if this machine does
    not permit the isolation that `require` names.
    """
    sandbox = code_sandbox(time_limit_s, memory_mb, require, tuple(python_path))
    return float((await score_code(sample, sandbox)).share == 1.0)


async def code_share_reward(
    sample: RewardSample,
    *,
    time_limit_s: float = 10.0,
    memory_mb: int = 512,
    require: Requirement = "isolated",
    python_path: Sequence[str] = (),
) -> float:
    """Return the share of the row's tests that the completion's code passes; see `code_reward`."""
    sandbox = code_sandbox(time_limit_s, memory_mb, require, tuple(python_path))
    return (await score_code(sample, sandbox)).share


async def score_code(sample: RewardSample, sandbox: Sandbox) -> CodeScore:
    """Run the completion's code with the row's tests; see `code_reward`."""
    tests = row_tests(sample.row, sample.answer)
    code = extract_code(sample.completion)
    if code is None:
        num_tests = sum(not isinstance(test, CodeTest) or test.kind != "setup" for test in tests)
        return CodeScore(0, num_tests, "the completion has no complete block of Python code")
    return await check_code(code, tests, sandbox)


class CodeTests:
    """Runs the code of each turn with the tests of the row and answers with the problem.

    The conversation ends when all tests pass. Its reward is the largest share of the tests that a
    turn passed, or with `partial` False 1 for all of them. Tests and sandbox are as in
    `code_reward`.
    """

    def __init__(
        self,
        time_limit_s: float = 10.0,
        memory_mb: int = 512,
        require: Requirement = "isolated",
        python_path: Sequence[str] = (),
        partial: bool = True,
        max_output_chars: int = 2000,
    ) -> None:
        """`max_output_chars` limits the output of the program that the model sees.

        Raises ValueError for a limit below 1, and SandboxError if this machine does not permit the
        isolation that `require` names.
        """
        if max_output_chars < 1:
            raise ValueError(f"max_output_chars is {max_output_chars}; it must be at least 1")
        self._sandbox = code_sandbox(time_limit_s, memory_mb, require, tuple(python_path))
        self._partial = partial
        self._max_output_chars = max_output_chars

    def reset(self, row: Mapping[str, Any]) -> State:
        """Return the best share of passed tests so far, 0. Raises ValueError without tests."""
        row_tests(row, row.get("answer"))
        return {"best": 0.0}

    async def step(self, conversation: Conversation) -> StepResult:
        """Test the code of the last turn."""
        code = extract_code(conversation.completion)
        if code is None:
            return StepResult(observation=_NO_CODE, reward={"tests": 0.0})
        tests = row_tests(conversation.row, conversation.row.get("answer"))
        score = await check_code(code, tests, self._sandbox)
        is_passed = score.share == 1.0
        best = float(conversation.state["best"])
        value = score.share if self._partial else float(is_passed)
        return StepResult(
            observation=None if is_passed else self._describe(score),
            # The rewards of the turns are summed.
            reward={"tests": max(0.0, value - best)},
            done=is_passed,
            state={"best": max(best, value)},
            metrics={"programs": 1.0, "programs_over_limit": float(score.is_over_limit)},
        )

    def _describe(self, score: CodeScore) -> str:
        text = f"{score.num_passed} of {score.num_tests} tests passed. {score.problem}"
        output = score.output.strip()
        if output:
            # The end, which has the traceback.
            text += f"\nOutput of the program:\n{output[-self._max_output_chars :]}"
        return text


def row_tests(row: Mapping[str, Any], answer: str | None) -> Tests:
    """Return the tests of a row: its column `tests`, or else its answer. Raises ValueError."""
    column = row.get("tests")
    if column is None:
        column = answer
    if column is None:
        raise ValueError("the row has no tests; code rewards need a column `tests` or `answer`")
    return parse_tests(column)


def extract_code(completion: str) -> str | None:
    """Return the last closed block of Python code between ``` lines, or None.

    A block without a language counts if no block is marked as Python.
    """
    marked = None
    unmarked = None
    tag = None
    lines: list[str] = []
    # Not `splitlines`, which splits at form feeds and other characters that a text may contain.
    for line in completion.replace("\r\n", "\n").split("\n"):
        fence = line.strip()
        if not fence.startswith("```") or _is_inline(fence):
            lines.append(line)
        elif tag is None:
            tag = fence.strip("`").strip().lower()
            lines = []
        else:
            text = "\n".join(lines) + "\n"
            if tag in _PYTHON_TAGS:
                marked = text
            elif not tag:
                unmarked = text
            tag = None
    return unmarked if marked is None else marked


def _is_inline(line: str) -> bool:
    """Return True for a line such as "```x = 1```", which begins and ends a piece of code."""
    return bool(line.strip("`")) and "`" in line.lstrip("`")


async def check_code(code: str, tests: Tests, sandbox: Sandbox) -> CodeScore:
    """Run `code` with `tests`. A program that exceeds a limit passes no test."""
    pairs = [test for test in tests if isinstance(test, InputOutput)]
    if pairs:
        return await _check_outputs(code, pairs, sandbox)
    return await _check_statements(code, [t for t in tests if isinstance(t, CodeTest)], sandbox)


async def _check_outputs(code: str, pairs: Sequence[InputOutput], sandbox: Sandbox) -> CodeScore:
    """Run the program once per pair."""
    runs = [sandbox.run_async(code, stdin=pair.input) for pair in pairs]
    num_passed = 0
    problem = ""
    output = ""
    results = await asyncio.gather(*runs)
    for index, result in enumerate(results):
        if result.is_ok and pairs[index].is_passed(result.stdout):
            num_passed += 1
            continue
        is_wrong = result.is_ok
        text = "another output" if is_wrong else result.summary()
        if not problem:
            problem = f"test {index + 1}: {text}"
            output = _output(result)
    is_over_limit = False
    for result in results:
        is_over_limit |= _report_excess(result)
    return CodeScore(num_passed, len(pairs), problem, output, is_over_limit)


async def _check_statements(code: str, tests: Sequence[CodeTest], sandbox: Sandbox) -> CodeScore:
    """Run the program and all statements in one process."""
    program = code.encode("utf-8", "surrogatepass")
    statements = []
    for test in tests:
        statements.append({"kind": test.kind, "source": test.source, "token": test.token})
    message = f"{len(program)}\n{code}{json.dumps(statements)}"
    result = await sandbox.run_async(_runner(), message=message)
    reports = _reports(result.report, len(tests))
    num_tests = 0
    num_passed = 0
    problem = "" if result.is_ok else result.summary()
    for test, report in zip(tests, reports, strict=True):
        if test.kind == "setup":
            continue
        num_tests += 1
        if test.is_passed(report):
            num_passed += 1
        elif not problem:
            text = report.get("error", "another value" if report else "did not run")
            problem = f"test {num_tests}: {text}"
    if not result.is_ok:
        num_passed = 0
    is_over_limit = _report_excess(result)
    return CodeScore(num_passed, num_tests, problem, _output(result), is_over_limit)


def _report_excess(result: SandboxResult) -> bool:
    """Log a program that exceeded a limit, and return whether it did."""
    is_over_limit = result.reason in _OVER_LIMIT
    if is_over_limit:
        logger.info("generated program: %s", result.summary())
    return is_over_limit


def _output(result: SandboxResult) -> str:
    return f"{result.stdout}{result.stderr}"


def _reports(text: str, num_tests: int) -> list[dict[str, Any]]:
    """Return the reported line of each test, {} where there is none; the program may forge them.

    Further lines are those of a program that writes to the report itself. They are not parsed,
    because a million of them would take seconds.
    """
    reports: list[dict[str, Any]] = [{} for _ in range(num_tests)]
    for line in text.split("\n", num_tests)[:num_tests]:
        try:
            report = json.loads(line)
        except (ValueError, RecursionError):
            continue
        index = report.get("test") if isinstance(report, dict) else None
        if isinstance(index, int) and 0 <= index < num_tests:
            reports[index] = report
    return reports


@cache
def _runner() -> str:
    return _RUNNER.read_text(encoding="utf-8")


@cache
def code_sandbox(
    time_limit_s: float, memory_mb: int, require: Requirement, python_path: tuple[str, ...]
) -> Sandbox:
    """Return the shared sandbox with these settings. Raises SandboxError; see `Sandbox`."""
    limits = SandboxLimits(wall_s=time_limit_s, cpu_s=time_limit_s, memory_mb=memory_mb)
    return Sandbox(limits, require=require, python_path=python_path)


def parse_tests(column: Any) -> Tests:
    """Return the tests of a row's column, at least one.

    A text is Python source, or JSON of one of the other forms: a list of assert statements; a list
    of `{"input": ..., "output": ...}`; or `{"inputs": [...], "outputs": [...]}`. Raises ValueError
    for anything else, and for statements that are not Python.
    """
    if isinstance(column, str):
        column = _from_json(column)
    if isinstance(column, Mapping):
        column = _pairs(column)
    if isinstance(column, str):
        return _statements(column)
    try:
        items = list(column)
    except TypeError:
        items = []
    if items and all(isinstance(item, str) for item in items):
        return _statements("\n".join(items))
    if items and all(_is_pair(item) for item in items):
        return [InputOutput(item["input"], item["output"]) for item in items]
    raise ValueError(
        f"the tests of the row are {shown_value(column, 200)}; write a list of assert statements,"
        ' or a list of {"input": text, "output": text}'
    )


def _from_json(text: str) -> Any:
    """Return the list or mapping that a text is the JSON of, or the text."""
    if text.lstrip()[:1] not in ("[", "{"):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def _pairs(column: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert `{"inputs": [...], "outputs": [...]}` to a list of pairs."""
    inputs = column.get("inputs")
    outputs = column.get("outputs")
    if inputs is None or outputs is None or len(inputs) != len(outputs):
        raise ValueError(
            f"the tests of the row are {shown_value(column, 200)}; a mapping needs the lists inputs"
            " and outputs, of equal lengths"
        )
    return [{"input": text, "output": out} for text, out in zip(inputs, outputs, strict=True)]


def _is_pair(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    return isinstance(item.get("input"), str) and isinstance(item.get("output"), str)


def _statements(source: str) -> list[CodeTest]:
    """Return one test per top-level assert statement; the other statements prepare them.

    Without an assert statement at the top level, for example `check(solution)` after the function
    `check`, the last statement is the test. Raises ValueError.
    """
    try:
        statements = ast.parse(source).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"the tests of the row are not Python: {error}") from error
    if not statements:
        raise ValueError("the row has no tests: its tests are an empty text")
    has_asserts = any(isinstance(statement, ast.Assert) for statement in statements)
    tests = []
    for position, statement in enumerate(statements):
        is_last = position == len(statements) - 1
        if isinstance(statement, ast.Assert):
            tests.append(_value_test(statement) or _test("statement", statement))
        elif is_last and not has_asserts:
            tests.append(_test("statement", statement))
        else:
            tests.append(_test("setup", statement))
    return tests


def _test(kind: Literal["statement", "setup"], statement: ast.stmt) -> CodeTest:
    return CodeTest(kind, ast.unparse(statement), secrets.token_hex(16))


def _value_test(statement: ast.Assert) -> CodeTest | None:
    """Return the test of `assert EXPRESSION == LITERAL`, or with `is`; None for others."""
    comparison = statement.test
    if not isinstance(comparison, ast.Compare) or len(comparison.ops) != 1:
        return None
    operator = comparison.ops[0]
    sides = [(comparison.left, comparison.comparators[0])]
    sides.append((comparison.comparators[0], comparison.left))
    for expected_side, expression in sides:
        try:
            expected = ast.literal_eval(expected_side)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        is_constant = expected is None or isinstance(expected, bool)
        must_be_same = isinstance(operator, ast.Is) and is_constant
        if must_be_same or isinstance(operator, ast.Eq):
            source = ast.unparse(expression)
            return CodeTest("value", source, "", expected, must_be_same)
    return None


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
