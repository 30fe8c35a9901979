"""Run pytest, and once more the tests that failed.

`python -m tests.repeat_failed ARGUMENTS OF PYTEST`: up to five failed tests are run again, in one
process with nothing beside them. The exit status is that of pytest; it is 0 only if each test
passed in one of the two runs. A run that was interrupted, or in which a test process crashed, fails
without a repetition.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

_MAX_REPEATED = 5


class _Failures:
    """Plugin: the tests that failed, and whether a process of xdist ended before its tests."""

    def __init__(self) -> None:
        self.tests: dict[str, None] = {}
        self.has_crash = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests[report.nodeid] = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object, error: Any) -> None:
        self.has_crash |= error is not None


def main(arguments: Sequence[str]) -> int:
    """Return the exit status of pytest with `arguments`, after a repetition where there was one."""
    failures = _Failures()
    status = int(pytest.main(list(arguments), plugins=[failures]))
    if failures.has_crash:
        return status or pytest.ExitCode.INTERNAL_ERROR
    failed = list(failures.tests)
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed) <= _MAX_REPEATED:
        return status
    sys.stdout.flush()
    again = subprocess.run([sys.executable, "-m", "pytest", "-rA", *failed], check=False).returncode
    if again == 0:
        noun = "test" if len(failed) == 1 else "tests"
        print(f"{len(failed)} {noun} failed in the first run and passed alone")
    # A process that a signal ended has a negative status.
    return again if again >= 0 else 128 - again


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
