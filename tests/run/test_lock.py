"""Only one driver uses a run's directory, whatever happened to the one before."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.run.directory import LOCK_NAME, locked

HOLD = """
import sys, time
from pathlib import Path
from nemo_like.run.directory import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(120)
"""
RACE = """
import sys
from pathlib import Path
from nemo_like.config.errors import ConfigError
from nemo_like.run.directory import locked
sys.stdin.readline()
try:
    with locked(Path(sys.argv[1])):
        print("won", flush=True)
        sys.stdin.readline()
except ConfigError as error:
    print("refused", flush=True)
"""


@contextmanager
def driver(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "locked\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_driver_is_refused_and_a_killed_one_leaves_a_stale_lock(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        with (
            pytest.raises(
                ConfigError, match=rf"run_name: .* in use by process {process.pid} on host "
            ),
            locked(tmp_path),
        ):
            pass
        assert (tmp_path / LOCK_NAME).exists(), "a refusal leaves the lock"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / LOCK_NAME).exists()
        with locked(tmp_path):
            assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_the_lock_is_released_by_an_exception(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_same_process_is_refused_too(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(ConfigError, match=f"process {os.getpid()}"), locked(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"host": "a"}'])
def test_a_damaged_lock_without_an_owner_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("start", ["free", "stale"])
def test_of_several_drivers_that_start_together_one_wins(tmp_path: Path, start: str) -> None:
    if start == "stale":
        owner = {"host": socket.gethostname(), "pid": 2**22 + 1}  # above the largest process id
        (tmp_path / LOCK_NAME).write_text(json.dumps(owner))
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    answers = [racer.stdout.readline() for racer in racers if racer.stdout is not None]
    for racer in racers:
        racer.communicate("done\n")
    assert sorted(answers) == ["refused\n"] * 4 + ["won\n"]
    assert list(tmp_path.iterdir()) == []
