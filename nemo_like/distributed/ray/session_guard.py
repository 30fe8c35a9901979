"""Removes the Ray session that a run starts for itself, also when the driver is killed.

The session has a directory of its own. `_guard` runs in a process that waits for the end of the
driver, then kills every process of the session and removes the directory. The driver and its guard
share a lock on the directory, so that the next run recognizes a directory whose owner is gone.

This file runs as a script and uses the standard library only.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PREFIX = "nemo_like_ray_"
_LOCK = "lock"
_TEMP_DIR = "ray"
_POLL_S = 1.0
_END_S = 10.0
"""How long processes may take to disappear after SIGKILL."""
_MAX_LOG_BYTES = 2**20
_ENDED = (
    "error: the driver ended without closing its Ray: it was killed, or Ray ended it because the"
    " raylet or the head (GCS) ended. The processes of Ray are stopped. No checkpoint is lost: the"
    " same command with resume=true continues from the latest one, if there is one."
)


_open_sessions: set[SessionDirectory] = set()
"""Sessions that this process started and did not close."""


class SessionDirectory:
    """The directory of one Ray session, guarded by a process until `close`.

    Only this user can read it. Ray makes its own directory readable and writable by all users, so
    it gets `temp_dir`, inside.
    """

    def __init__(self) -> None:
        """Create the directory and start its guard; remove directories of runs that are gone."""
        base = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
        base.mkdir(parents=True, exist_ok=True)
        remove_stale(base)
        self.path = base / f"{_PREFIX}{secrets.token_hex(3)}"
        self.temp_dir = self.path / _TEMP_DIR
        # `remove_stale` of another run sees only the final name, so the directory gets it with
        # its lock taken.
        created = Path(tempfile.mkdtemp(prefix="new_", dir=base))
        self._lock = os.open(created / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        created.rename(self.path)
        self._guard = _start_guard(self.path, self._lock)
        _open_sessions.add(self)

    def close(self, keep_logs: Path | None = None) -> None:
        """Kill the session's processes, copy its logs to `keep_logs`, and remove the directory."""
        self.end(keep_logs)
        _open_sessions.discard(self)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        os.close(self._lock)

    def end(self, keep_logs: Path | None = None) -> None:
        """End the session as `close` does, in a process that ends next."""
        # First the guard, which would report the end of the driver.
        self._guard.kill()
        self._guard.wait()
        remove_session(self.path, keep_logs)


def remove_session(directory: Path, keep_logs: Path | None = None) -> None:
    """Kill every process that belongs to the session in `directory`, and remove the directory."""
    deadline = time.monotonic() + _END_S
    # Repeated: a process can start others between the listing and its end.
    while (pids := list(_session_pids(directory))) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended since
                continue
        time.sleep(0.05)
    if keep_logs is not None:
        _copy_logs(directory, keep_logs)
    shutil.rmtree(directory, ignore_errors=True)
    # A process that ends may have created a file meanwhile.
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(directory, ignore_errors=True)


def remove_all_sessions() -> None:
    """Kill the processes of every session that this process started; remove their directories."""
    for session in list(_open_sessions):
        session.end()


def remove_stale(base: Path) -> None:
    """Remove the sessions in `base` whose driver and guard are gone, for example after a reboot."""
    for directory in base.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, or being removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_session(directory)
        except BlockingIOError:  # its owner is alive
            continue
        finally:
            os.close(lock)


def _start_guard(directory: Path, lock: int) -> subprocess.Popen[bytes]:
    # -I and -S: independent of the environment and of site-packages, and started sooner.
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(directory)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(lock,),
        start_new_session=True,  # signals of the driver's terminal do not reach it
        cwd="/",
    )


def _session_pids(directory: Path) -> Iterator[int]:
    """Yield the pids of the session's processes, except this one.

    These are Ray processes with the directory in their command line or with an open file of it, and
    all processes whose output goes into it.
    """
    prefix = f"{directory}/"
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = Path(entry.path, "cmdline").read_bytes()
            files = dict(_open_files(entry.path))
        except OSError:  # it has ended, or belongs to another user
            continue
        # Descriptors 1 and 2: standard output and error.
        writes_here = any(files.get(number, "").startswith(prefix) for number in (1, 2))
        has_file_here = any(name.startswith(prefix) for name in files.values())
        names_directory = prefix.encode() in command
        # Ray's agents replace their command line by a title such as `ray::DashboardAgent`; they
        # keep their log open.
        is_of_ray = command.startswith(b"ray::") or b"/ray/" in command
        if writes_here or (is_of_ray and (names_directory or has_file_here)):
            yield int(entry.name)


def _open_files(process: str) -> Iterator[tuple[int, str]]:
    """Yield descriptor and name of each open file of a process, given as its path in /proc."""
    for entry in os.scandir(f"{process}/fd"):
        with suppress(FileNotFoundError):  # closed since
            yield int(entry.name), os.readlink(entry.path)


def _copy_logs(directory: Path, target: Path) -> None:
    """Copy the last megabyte of every log that is not empty. Ignores a full disk."""
    for log in directory.glob(f"{_TEMP_DIR}/session_2*/logs/*.*"):
        try:
            if log.suffix not in (".err", ".out", ".log") or log.stat().st_size == 0:
                continue
            target.mkdir(parents=True, exist_ok=True)
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _MAX_LOG_BYTES))
                (target / log.name).write_bytes(file.read())
        except OSError:
            # The removal of the session is more important than its logs.
            continue


def _guard(driver_pid: int, directory: Path) -> None:
    """Wait for the end of the driver, remove its session, and report it on standard error."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The pipe closes at the driver's end, unless a process that the driver forked still has it
    # open; so the parent is checked as well.
    while os.getppid() == driver_pid:
        if select.select([0], [], [], _POLL_S)[0]:
            break
    remove_session(directory)
    with suppress(OSError):  # the terminal is closed
        print(_ENDED, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Path(sys.argv[2]))
