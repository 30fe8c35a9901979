"""Tests of a data row for generated code: assert statements, or inputs and outputs."""

from __future__ import annotations

import ast
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

_VALUE_MARGIN = 1000
"""Characters by which a value may be longer than ten times the expected one."""


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
    it is no test.
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


def parse_tests(column: Any) -> Tests:
    """Return the tests of a row's column, at least one.

    A text is Python source, or JSON of one of the other forms: a list of assert statements; a list
    of `{"input": ..., "output": ...}`; or `{"inputs": [...], "outputs": [...]}`. Raises ValueError
    for anything else, and for statements that are no Python.
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
        f"the tests of the row are {_shown(column)}; write a list of assert statements, or a list"
        ' of {"input": text, "output": text}'
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
            f"the tests of the row are {_shown(column)}; a mapping needs the lists inputs and"
            " outputs, of equal lengths"
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
        raise ValueError(f"the tests of the row are no Python: {error}") from error
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


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
