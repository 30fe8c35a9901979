"""The processes of one run of the fault-injection benchmark, and what they leave behind.

Every process that an attempt starts inherits one environment variable, so the attempt's processes
are known from `/proc/<pid>/environ` whatever their parent is by now. Nothing else is ever
signalled. Linux only.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MARK = "NEMO_LIKE_FAULT_INJECTION"


class Process(NamedTuple):
    """A process; its start time tells it from a later one with the same pid."""

    pid: int
    start_time: int
    """Clock ticks since boot."""
    command: str

    @property
    def is_alive(self) -> bool:
        return _start_time(self.pid) == self.start_time

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal if it is still this process; returns whether it was."""
        if not self.is_alive:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def marked(mark: str) -> list[Process]:
    """Living processes whose environment has `MARK=<mark>`."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for pid in _pids():
        with suppress(OSError):
            if wanted not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                continue
            start_time = _start_time(pid)
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_bytes()
                .replace(b"\0", b" ")
                .decode(errors="replace")
                .strip()
            )
            if start_time is not None:
                found.append(Process(pid, start_time, command))
    return found


def of_target(
    target: str, driver_pid: int, processes: Iterable[Process], log: str
) -> list[Process]:
    """The processes among `processes` that are the target.

    `log` is the text of the run's `logs/driver.log`, which has the pids of the workers.
    """
    if target == "driver":
        return [process for process in processes if process.pid == driver_pid]
    if target in ("raylet", "gcs"):
        program = {"raylet": "raylet", "gcs": "gcs_server"}[target]
        return [
            process
            for process in processes
            if Path(process.command.split(" ", 1)[0]).name == program
        ]
    pids = {int(pid) for pid in re.findall(rf"worker \d+ of the {target} group: pid (\d+)", log)}
    return [process for process in processes if process.pid in pids]


def wait_gone(mark: str, timeout_s: float) -> list[Process]:
    """The marked processes that still live after `timeout_s`; returns early once there are none."""
    deadline = time.monotonic() + timeout_s
    while left := marked(mark):
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []


def shared_memory(processes: Iterable[Process]) -> set[str]:
    """Files in /dev/shm that the processes have mapped or open, or that carry the pid of one of
    them in the name.
    """
    found = set()
    pids = {process.pid for process in processes}
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                found |= set(re.findall(r"(/dev/shm/\S+)$", line))
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if (name := os.readlink(link)).startswith("/dev/shm/"):
                        found.add(name)
    for path in Path("/dev/shm").iterdir():
        if pids & {int(number) for number in re.findall(r"\d+", path.name)}:
            found.add(str(path))
    return found


def _pids() -> Iterator[int]:
    return (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit())


def _start_time(pid: int) -> int | None:
    """None if there is no such process, or only its entry, waiting to be reaped."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return None if fields[0] == "Z" else int(fields[19])
    return None
