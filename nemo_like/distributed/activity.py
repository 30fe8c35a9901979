"""The process of a worker: notes of its progress, its state in the kernel, and its end.

Code that makes progress calls `note` for every microbatch, decoding step and reward sample. A
monitor compares the number of notes: a slow worker adds notes, a hung one does not. The state is a
module variable because a process has one worker; a local run has several, but runs one call at a
time.

A worker can also end its process itself, with a reason that the driver reports.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

_imported_s = time.monotonic()


class Activity(NamedTuple):
    """The last note of this process.

    Example: `Activity(17, 1032.5, "train, microbatch 3", 140213)`.
    """

    num_notes: int
    """Notes so far."""
    time_s: float
    """`time.monotonic()` of the last note."""
    text: str
    thread_id: int
    """`threading.get_ident()` of the thread that made it."""


_last = Activity(0, time.monotonic(), "started", threading.get_ident())


def note(text: str) -> None:
    """Record progress. Costs well under a microsecond, so it fits into inner loops."""
    global _last
    # One assignment, so that a reader in another thread sees either the old or the new note.
    _last = Activity(_last.num_notes + 1, time.monotonic(), text, threading.get_ident())


def last() -> Activity:
    """Return the last note."""
    return _last


def active_stack() -> str:
    """Return the Python stack of the thread that made the last note, innermost call last.

    Of the main thread if that thread has ended.
    """
    frames = sys._current_frames()
    frame = frames.get(_last.thread_id, frames.get(threading.main_thread().ident or 0))
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame))


_OOM_KILL_FILES = ("/sys/fs/cgroup/memory.events", "/proc/vmstat")
"""The counter of the control group (a container) first, then of the machine."""


def process_state(pid: int) -> str:
    """Return the state letter of a process (R, S, D, T, Z; see proc(5)); empty if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The state follows the name of the process, in parentheses, which may have spaces.
    return text.rpartition(")")[2].split()[0]


def process_age_s() -> float:
    """Return the seconds since this process was started; since its first import without /proc."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return time.monotonic() - _imported_s
    # Field 22 of proc(5), in clock ticks since the machine was started.
    start_ticks = int(text.rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")


def count_oom_kills() -> int:
    """Return the number of processes that the kernel killed for memory; 0 if it is not reported.

    The count refers to this control group, or else to this machine, since its start.
    """
    for name in _OOM_KILL_FILES:
        path = Path(name)
        if not path.exists():
            continue
        for line in path.read_text().splitlines():
            key, count = line.split()
            if key == "oom_kill":
                return int(count)
    return 0


def machine_id() -> str:
    """Return an identifier of this machine and of this process's pid and mount namespaces.

    Between processes with equal identifiers, process ids and paths have the same meaning.
    """
    # The namespaces differ between containers of one machine.
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    pid_namespace = os.readlink("/proc/self/ns/pid")
    mount_namespace = os.readlink("/proc/self/ns/mnt")
    return f"{boot_id} {pid_namespace} {mount_namespace}"


_MARK = "this worker ends: "
_REASON = re.compile(rf"^{_MARK}(.+)$", re.MULTILINE)


def end_worker(reason: str) -> NoReturn:
    """End this process at once, from any thread.

    The driver raises WorkerDied with `reason`. For a state that a new process would not have, such
    as the loss of a child process; an exception would end the run instead.
    """
    # Not by `print`, whose buffer another thread may have locked. `os._exit` flushes nothing.
    os.write(2, f"{_MARK}{reason}\n".encode())
    os._exit(1)


def reason_of_end(log_tail: str) -> str:
    """Return the reason that `end_worker` wrote to a log; empty if there is none."""
    found = _REASON.search(log_tail)
    return "" if found is None else found.group(1)


def set_variables(environment: Mapping[str, str | None]) -> None:
    """Set variables of this process; None removes a variable."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
