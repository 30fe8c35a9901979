"""Only one driver uses a run's directory, whatever happened to the one before."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.run import lock as run_lock
from nemo_like.run.lock import LOCK_NAME, LockOwner, locked

HOLD = """
import sys, time
from pathlib import Path
from nemo_like.run.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(120)
"""
RACE = """
import sys
from pathlib import Path
from nemo_like.config.errors import ConfigError
from nemo_like.run.lock import locked
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


def leave(directory: Path, owner: LockOwner) -> None:
    (directory / LOCK_NAME).write_text(json.dumps(asdict(owner)))


def test_a_second_driver_is_refused_and_a_killed_one_leaves_a_stale_lock(tmp_path: Path) -> None:
    with driver(tmp_path) as process:
        with (
            pytest.raises(
                ConfigError, match=rf"in use by process {process.pid} on host .* since 20"
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


@pytest.mark.parametrize("has_flock", [True, False])
def test_stale_locks(tmp_path: Path, has_flock: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_flock:

        def refusing(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

        monkeypatch.setattr(fcntl, "flock", refusing)
    here = LockOwner.this_process()
    stale = [
        replace(here, pid=2**22 + 1),  # above the largest process id
        replace(here, start_ticks=here.start_ticks + 1),  # the id was used again by another process
        replace(here, pid=1, boot_id="an earlier boot", start_ticks=1),
    ]
    for owner in stale:
        leave(tmp_path, owner)
        with locked(tmp_path):
            pass
        assert list(tmp_path.iterdir()) == []
    for owner, match in (
        (here, "in use by process"),
        (
            replace(here, host="node7", boot_id="another machine"),
            rf"host node7 .* cannot check\. .* remove {tmp_path}/run\.lock",
        ),
    ):
        leave(tmp_path, owner)
        with pytest.raises(ConfigError, match=match), locked(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000, '{"host": "a"}'])
def test_a_damaged_lock_without_an_owner_is_taken_over(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK_NAME).write_text(content)
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / LOCK_NAME).symlink_to(victim)
    with pytest.raises(ConfigError, match="is not a regular file"), locked(tmp_path):
        pass
    assert victim.read_text() == "precious"


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(run_lock.os, "link", refusing)
    with locked(tmp_path):
        with pytest.raises(ConfigError, match="in use by process"), locked(tmp_path):
            pass
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("start", ["free", "stale"])
def test_of_several_drivers_that_start_together_one_wins(tmp_path: Path, start: str) -> None:
    if start == "stale":
        leave(tmp_path, replace(LockOwner.this_process(), pid=2**22 + 1))
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
