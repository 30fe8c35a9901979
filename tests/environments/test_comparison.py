"""Symbolic comparison within limits: hostile answers are unequal after a bounded time, in every
thread.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.environments.math import AnswerComparer, answers_equal
from nemo_like.environments.sandbox import linux

HOSTILE = [
    "9**9**9**9", "100000!!", "(" * 140 + "1" + ")" * 140, "\\frac{" * 40 + "1" + "}{2}" * 40,
    "(x+1)^{99999}", "\ud83d", "\0", "{" * 200, "1e999999999x",
    "5 m^9 m^9 m^9 m^9", "\\frac{1}{2} m^{99999999}", "1/2 " + "kg/" * 99,
]  # fmt: skip


@pytest.mark.exhaustive
def test_hostile_answers_are_unequal_within_the_limit() -> None:
    """Without the child process the first of them does not return at all."""
    done: list[str] = []

    def compare() -> None:
        for answer in HOSTILE:
            assert not answers_equal("\\sqrt{3}", answer)
            done.append(answer)
        assert answers_equal("\\frac{1}{3}", "2/6")
        done.append("and goes on")

    thread = threading.Thread(target=compare, daemon=True)
    thread.start()
    thread.join(timeout=30 * len(HOSTILE))
    assert done == [*HOSTILE, "and goes on"]


def test_a_verdict_is_cached() -> None:
    assert not answers_equal("\\sqrt{3}", "9**9**9**8")
    start = time.process_time()
    for _ in range(1000):
        assert not answers_equal("\\sqrt{3}", "9**9**9**8")
    assert time.process_time() - start < 1


def test_a_child_that_was_killed_is_replaced() -> None:
    comparer = AnswerComparer()
    before = set(linux.descendants(os.getpid()))
    try:
        assert comparer.is_equal("1/2", "0.5")
        (child,) = set(linux.descendants(os.getpid())) - before
        os.kill(child, signal.SIGKILL)
        # The first request may reach the child before it has ended.
        comparer.is_equal("1/2", "0.5")
        assert comparer.is_equal("1/2", "0.5")
        assert child not in linux.descendants(os.getpid())
    finally:
        comparer.close()


def test_a_child_that_cannot_start_is_an_error_and_not_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="import math_verify"):
        AnswerComparer().is_equal("1/2", "0.5")


def test_answers_are_compared_below_a_lower_limit_of_the_user() -> None:
    script = (
        "from nemo_like.environments.math import AnswerComparer as A;"
        " from nemo_like.environments.sandbox.sandbox import SandboxLimits as L;"
        " from nemo_like.environments.sandbox.sandbox import Sandbox as S;"
        " assert A().is_equal('1/2', '0.5');"
        " assert S(L(memory_mb=4096)).run('print(1)').reason == 'ok'"
    )
    command = f'ulimit -v 3000000 && exec {sys.executable} -c "{script}"'
    subprocess.run(command, shell=True, check=True)


def test_the_child_ends_with_its_parent() -> None:
    script = (
        "import os, signal; from nemo_like.environments.math import AnswerComparer as A;"
        "from nemo_like.environments.sandbox.linux import descendants;"
        "a = A(); a.is_equal('1/2', '0.5'); print(*descendants(os.getpid()), flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL
    child = int(done.stdout)
    deadline = time.monotonic() + 60
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_symbolic_libraries_are_not_imported_with_the_rewards() -> None:
    script = (
        "import sys, nemo_like.environments.math as m; m.answers_equal('2', '2.0');"
        " m.answers_equal('a b', 'A b');"
        "print([n for n in ('sympy', 'math_verify', 'pint') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@settings(max_examples=60, deadline=None)
@given(answer=st.text(alphabet="0123456789+-*/^!(){}\\xfracsqt.,= ", max_size=30))
def test_no_answer_raises(answer: str) -> None:
    assert answers_equal("\\sqrt{3}", answer) in (True, False)
