"""Part A: kernels, log-probs and training steps against references; the tests of tests/gpu."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
_MAX_PROCESSES = 6
_OUTCOMES = "PASSED|FAILED|ERROR|SKIPPED"
_LINES = (
    # With xdist, and without.
    re.compile(rf"^\[gw\d+\] \[ *\d+%\] (?P<outcome>{_OUTCOMES}) (?P<name>\S.*?) *$", re.MULTILINE),
    re.compile(rf"^(?P<name>\S+::.+?) (?P<outcome>{_OUTCOMES})\b.*\[ *\d+%\]$", re.MULTILINE),
)
"""Lines of pytest's verbose output that have the outcome of a test."""


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
        measure=partial(run_pytest, ROOT / "tests" / "gpu", arguments.out / "pytest.log"),
        expected_s=120.0 if arguments.is_cuda else 5.0,
        limit_s=_PYTEST_LIMIT_S + 20,
    )
    # Last: on the CPU Megatron-Core needs changes of its modules that stay in the process.
    yield from step_cells(arguments.device, arguments.work, "megatron", is_tiny=is_tiny)


def run_pytest(tests: Path, log: Path) -> Mapping[str, Any]:
    """Run a folder of tests in processes of their own; return the outcome of each test.

    The output goes to `log`. After a time limit the outcomes so far are returned.
    """
    require_modules("pytest", "xdist")
    command = [sys.executable, "-m", "pytest", str(tests), f"--confcutdir={tests}", "-v"]
    command += ["--tb=short", "-p", "no:cacheprovider"]
    num_processes = min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2)
    if num_processes > 1:
        command += ["-p", "xdist", "-n", str(num_processes)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Each process computes references on the CPU with several threads.
    environment = os.environ | {"PYTHONPATH": path, "OMP_WAIT_POLICY": "PASSIVE"}
    is_complete = True
    with log.open("wb") as file:
        try:
            # A crash in one test must not hide the others.
            subprocess.run(
                command,
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                timeout=_PYTEST_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            is_complete = False
    text = log.read_text(encoding="utf-8", errors="replace")
    outcomes = parse_outcomes(text)
    if not outcomes:
        raise RuntimeError(f"pytest ran no test: {text[-1500:]}")
    counts: dict[str, int] = {}
    for outcome in outcomes.values():
        counts[outcome] = counts.get(outcome, 0) + 1
    return {
        "passed": is_complete and not {"FAILED", "ERROR"} & counts.keys(),
        "is_complete": is_complete,
        "counts": counts,
        "failed": [name for name, found in outcomes.items() if found in ("FAILED", "ERROR")],
    }


def parse_outcomes(text: str) -> dict[str, str]:
    """Return test -> outcome from the verbose output of pytest, with or without xdist."""
    outcomes = {}
    for line in _LINES:
        for match in line.finditer(text):
            outcomes[match["name"]] = match["outcome"]
    return outcomes
