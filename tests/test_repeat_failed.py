"""Failed tests run once more; the exit status is that of pytest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_FLAKY = """
from pathlib import Path
def test_passes(): assert True
def test_flaky():
    path = Path("was_here")
    was_here = path.exists()
    path.touch()
    assert was_here, "THE FIRST FAILURE"
"""
_FLAKY_FIXTURE = """
import pytest
from pathlib import Path
@pytest.fixture
def flaky():
    yield
    path = Path("was_here")
    was_here = path.exists()
    path.touch()
    assert was_here, "THE FIRST FAILURE"
def test_whose_teardown_fails(flaky): pass
"""
_BROKEN = "def test_broken(): assert False, 'THE FIRST FAILURE'\n"
_SIX = "import pytest\n@pytest.mark.parametrize('i', range(6))\ndef test(i): assert False\n"
_CRASHES = """
import os
from pathlib import Path
def test_that_ends_its_process():
    if not Path("was_here").exists():
        Path("was_here").touch()
        os._exit(3)
"""
_INTERRUPTED = _FLAKY + "def test_interrupts(): raise KeyboardInterrupt\n"


@pytest.mark.parametrize(
    ("text", "options", "status", "num_runs"),
    [
        ("def test_passes(): pass", [], 0, 1),
        (_FLAKY, ["-p", "xdist", "-n", "1"], 0, 2),
        (_FLAKY_FIXTURE, [], 0, 2),
        (_BROKEN, [], 1, 2),
        (_SIX, [], 1, 1),
        (_INTERRUPTED, [], 2, 1),
        ("import no_such_module", [], 2, 1),
        ("", [], 5, 1),
        (_CRASHES, ["-p", "xdist", "-n", "1"], 1, 1),
    ],
    ids=[
        "passes",
        "flaky",
        "flaky fixture",
        "fails",
        "six",
        "interrupt",
        "import",
        "none",
        "crash",
    ],
)
def test_the_exit_status_is_that_of_pytest(
    text: str, options: list[str], status: int, num_runs: int, tmp_path: Path
) -> None:
    (tmp_path / "test_one.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    run = subprocess.run(
        [sys.executable, "-m", "tests.repeat_failed", "-p", "no:cacheprovider", *options],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == status, run.stdout + run.stderr
    assert run.stdout.count("test session starts") == num_runs, run.stdout
    repeated_line = "1 test failed in the first run and passed alone"
    assert (run.stdout.splitlines()[-1:] == [repeated_line]) == (status == 0 and num_runs == 2)
    assert ("THE FIRST FAILURE" in run.stdout) == ("THE FIRST FAILURE" in text)
