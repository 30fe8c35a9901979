"""The processes that a command starts, directly or not, and what they leave behind. Linux only.

They inherit one environment variable, so that they are found in `/proc/<pid>/environ` whatever
their parent is by now.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARK = "NEMO_LIKE_MARK"
"""The environment variable."""


class Process(NamedTuple):
    """A process; its start time distinguishes it from a later one with the same pid."""

    pid: int
    start_time: int
    """Clock ticks since boot."""
    program: str
    """File name of what it executes, e.g. `raylet`."""

    @property
    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.start_time

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal if it is still this process; return whether it was."""
        if not self.is_alive:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def marked(mark: str) -> list[Process]:
    """Return the living processes whose `MARK` is `mark`, or `mark` with a suffix `/...`."""
    wanted = re.compile(rf"(^|\0){MARK}={re.escape(mark)}(/[^\0]*)?(\0|$)".encode())
    found = []
    for path in Path("/proc").iterdir():
        with suppress(OSError):
            if not path.name.isdigit() or not wanted.search((path / "environ").read_bytes()):
                continue
            pid = int(path.name)
            program = (path / "cmdline").read_bytes().split(b"\0")[0].split(b" ")[0]
            start_time = _start_time(pid)
            if start_time is not None:
                found.append(Process(pid, start_time, os.path.basename(program.decode())))
    return found


def wait_gone(mark: str, timeout_s: float) -> list[Process]:
    """Return the marked processes that still live after `timeout_s`, or an empty list earlier."""
    deadline = time.monotonic() + timeout_s
    while left := marked(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def shared_memory(processes: Iterable[Process]) -> set[str]:
    """Return the files in /dev/shm that the processes have mapped or open, or that carry the pid of
    one of them in the name.
    """
    found = set()
    pids = {process.pid for process in processes}
    for pid in pids:
        with suppress(OSError):
            found |= set(re.findall(r"(/dev/shm/\S+)$", _read(pid, "maps"), re.MULTILINE))
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if (name := os.readlink(link)).startswith("/dev/shm/"):
                        found.add(name)
    for path in Path("/dev/shm").iterdir():
        if pids & {int(number) for number in re.findall(r"\d+", path.name)}:
            found.add(str(path))
    return found


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace")


def _start_time(pid: int) -> int | None:
    """Return None if there is no such process, or only its entry, waiting to be reaped."""
    with suppress(OSError):
        fields = _read(pid, "stat").rsplit(")", 1)[1].split()
        return None if fields[0] == "Z" else int(fields[19])
    return None
