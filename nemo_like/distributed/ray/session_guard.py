"""Cleans up the Ray session that a run starts for itself, also when the driver is killed.

The session has a folder of its own. `guard` starts a process that waits for the end of the driver
and then ends every process of the session and removes the folder. A lock on the folder is held
while the driver or its guard lives, so that a folder whose owner is gone is recognized by the next
run.

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
_POLL_S = 1.0
_END_S = 10.0
"""How long processes may take to disappear after SIGKILL."""
_MAX_LOG_BYTES = 2**20
_RAYLET_ENDED = (
    "error: the raylet (pid {pid}), the Ray process that runs the workers of this machine, ended"
    " unexpectedly, so the run cannot continue. The same command with resume=true continues from"
    " the latest checkpoint, if there is one."
)


_open_sessions: set[SessionFolder] = set()
"""Sessions that this process started and did not close."""


class SessionFolder:
    """The folder of one Ray session; `close` ends the session's processes and removes the
    folder.
    """

    def __init__(self) -> None:
        """Make the folder and start its guard; folders of runs that are gone are removed first."""
        base = Path(os.environ.get("RAY_TMPDIR") or "/tmp")
        base.mkdir(parents=True, exist_ok=True)
        remove_stale(base)
        self.path = base / f"{_PREFIX}{secrets.token_hex(3)}"
        made = Path(tempfile.mkdtemp(prefix="new_", dir=base))
        self._lock = os.open(made / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        made.rename(
            self.path
        )  # only now can `remove_stale` of another run see it, and it is locked
        self._guard = _start_guard(self.path, self._lock)
        _open_sessions.add(self)

    def close(self, keep_logs: Path | None = None) -> None:
        """End the session's processes, copy its logs to `keep_logs` if given, and remove the
        folder.
        """
        remove_session(self.path, keep_logs)
        _open_sessions.discard(self)
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        os.close(self._lock)

    def watch_raylet(self, pid: int) -> None:
        """Have the guard report the end of the raylet `pid` on standard error, until `unwatch`.

        Ray ends this process within milliseconds of the raylet's end and without a message, so a
        thread of this process might not get to write one.
        """
        self._send(f"watch {pid}\n")

    def unwatch(self) -> None:
        """Have the guard expect the end of the raylet."""
        self._send("unwatch\n")

    def _send(self, command: str) -> None:
        assert self._guard.stdin is not None
        with suppress(OSError, ValueError):  # the guard was killed, or the session is closed
            self._guard.stdin.write(command.encode())
            self._guard.stdin.flush()


def remove_session(folder: Path, keep_logs: Path | None = None) -> None:
    """Kill every process that belongs to the session in `folder`, and remove the folder."""
    deadline = time.monotonic() + _END_S
    while (pids := list(_session_pids(folder))) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it ended meanwhile
                continue
        time.sleep(0.05)
    if keep_logs is not None:
        _copy_logs(folder, keep_logs)
    shutil.rmtree(folder, ignore_errors=True)


def remove_all_sessions() -> None:
    """Kill the processes of every session that this process started, and remove their folders."""
    for session in list(_open_sessions):
        session.unwatch()
        remove_session(session.path)


def gcs_pid(folder: Path) -> int | None:
    """The pid of the head process (GCS) of the session in `folder`; None if it does not run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:  # it ended
            continue
        if b"gcs_server" in command.partition(b"\0")[0] and str(folder).encode() in command:
            return int(path.parent.name)
    return None


def remove_stale(base: Path) -> None:
    """Remove the sessions in `base` whose driver and guard are gone, for example after a reboot."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # of another user, or being removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_session(folder)
        except BlockingIOError:  # its owner lives
            continue
        finally:
            os.close(lock)


def _start_guard(folder: Path, lock: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(lock,),
        start_new_session=True,  # signals of the driver's terminal do not reach it
        cwd="/",
    )


def _session_pids(folder: Path) -> Iterator[int]:
    """Ray processes with the folder in their command line or a file of it open, and those whose
    output goes into it.

    Ray's agents replace their command line by a title such as `ray::DashboardAgent`; they keep
    their log open.
    """
    inside = f"{folder}/"
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = Path(entry.path, "cmdline").read_bytes()
            files = dict(_open_files(entry.path))
        except OSError:  # it ended, or belongs to another user
            continue
        is_of_ray = command.startswith(b"ray::") or b"/ray/" in command
        uses_folder = inside.encode() in command or any(
            name.startswith(inside) for name in files.values()
        )
        if (is_of_ray and uses_folder) or any(
            files.get(number, "").startswith(inside) for number in (1, 2)
        ):
            yield int(entry.name)


def _open_files(process: str) -> Iterator[tuple[int, str]]:
    """Descriptor and name of each open file of a process, given as its folder in /proc."""
    for entry in os.scandir(f"{process}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            yield int(entry.name), os.readlink(entry.path)


def _copy_logs(folder: Path, target: Path) -> None:
    """Copy the last megabyte of every log that is not empty; a full disk does not stop the
    cleanup.
    """
    for log in folder.glob("session_2*/logs/*.*"):
        try:
            if log.suffix not in (".err", ".out", ".log") or log.stat().st_size == 0:
                continue
            target.mkdir(parents=True, exist_ok=True)
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - _MAX_LOG_BYTES))
                (target / log.name).write_bytes(file.read())
        except OSError:
            continue


def _guard(driver_pid: int, folder: Path) -> None:
    """Return when the driver is gone, after its session has been removed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raylet: int | None = None
    raylet_pid = ""
    # The pipe closes at the driver's end, unless a process that the driver forked still holds it.
    while os.getppid() == driver_pid:
        watched = [0] if raylet is None else [0, raylet]
        ready, _, _ = select.select(watched, [], [], _POLL_S)
        commands = os.read(0, 4096).decode() if 0 in ready else ""
        # First, because the driver announces that it is about to end the raylet.
        for command in commands.splitlines():
            verb, _, raylet_pid = command.partition(" ")
            raylet = _open_process(int(raylet_pid)) if verb == "watch" else None
        if raylet is not None and raylet in ready:
            print(_RAYLET_ENDED.format(pid=raylet_pid), file=sys.stderr, flush=True)
            raylet = None
        if 0 in ready and not commands:
            break
    remove_session(folder)


def _open_process(pid: int) -> int | None:
    """A file descriptor that is readable once the process has ended; None if it has already."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Path(sys.argv[2]))
