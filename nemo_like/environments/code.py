"""Rewards for generated Python code, which is run with the row's tests in the sandbox.

See docs/sandbox.md for the forms of tests, the limits, and what a program can do to a test.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from nemo_like.environments.code_tests import CodeTest, InputOutput, Tests, parse_tests
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
    """Return the reported line of each test, {} where there is none; the program may forge them."""
    reports: list[dict[str, Any]] = [{} for _ in range(num_tests)]
    for line in text.split("\n"):
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
