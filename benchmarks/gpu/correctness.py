"""Part A: kernels, log-probs and training steps against references; the tests of tests/gpu."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.arguments import PartArguments
from benchmarks.gpu.attention_check import attention_cells
from benchmarks.gpu.cells import Cell, require_modules
from benchmarks.gpu.logprob_check import logprob_cells
from benchmarks.gpu.machine import ROOT
from benchmarks.gpu.step_check import step_cells

_PYTEST_LIMIT_S = 240.0


def make_cells(arguments: PartArguments) -> tuple[Iterator[Cell], Callable[[], None]]:
    """Return the cells, and a function that releases what they share."""
    return _cells(arguments), lambda: None


def _cells(arguments: PartArguments) -> Iterator[Cell]:
    is_tiny = arguments.size.name == "tiny"
    yield from attention_cells(arguments.device, is_tiny=is_tiny)
    yield from logprob_cells(arguments.device, arguments.size)
    yield from step_cells(arguments.device, arguments.work, "dtensor", is_tiny=is_tiny)
    yield Cell(
        name="pytest tests/gpu",
        measure=partial(run_pytest, ROOT / "tests" / "gpu"),
        expected_s=120.0 if arguments.is_cuda else 5.0,
        limit_s=_PYTEST_LIMIT_S + 20,
    )
    # Last: on the CPU Megatron-Core needs changes of its modules that stay in the process.
    yield from step_cells(arguments.device, arguments.work, "megatron", is_tiny=is_tiny)


def run_pytest(tests: Path) -> Mapping[str, Any]:
    """Run a folder of tests in a process of its own; return the outcome of each test."""
    require_modules("pytest")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", str(tests), f"--confcutdir={tests}", "-q"]
        command += [f"--junitxml={report}", "-p", "no:cacheprovider"]
        # A crash in one test must not hide the others.
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=_PYTEST_LIMIT_S,
            check=False,
        )
        if not report.exists():
            tail = (done.stdout + done.stderr)[-1500:]
            raise RuntimeError(f"pytest ended with exit code {done.returncode}: {tail}")
        outcomes = parse_junit(report)
    counts: dict[str, int] = {}
    for test in outcomes:
        counts[test["outcome"]] = counts.get(test["outcome"], 0) + 1
    not_passed = [test for test in outcomes if test["outcome"] != "passed"]
    return {
        "passed": not {"failed", "error"} & counts.keys() and bool(outcomes),
        "counts": counts,
        "not passed": not_passed,
        "exit code": done.returncode,
    }


def parse_junit(path: Path) -> list[dict[str, Any]]:
    """Return name, outcome, seconds and message of each test of a JUnit XML file."""
    tests = []
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        outcome = "passed"
        message = ""
        for tag, name in (("failure", "failed"), ("error", "error"), ("skipped", "skipped")):
            element = case.find(tag)
            if element is not None:
                outcome = name
                message = (element.get("message") or "")[:500]
        tests.append(
            {
                "name": f"{case.get('classname')}::{case.get('name')}",
                "outcome": outcome,
                "seconds": float(case.get("time") or 0),
                "message": message,
            }
        )
    return tests
