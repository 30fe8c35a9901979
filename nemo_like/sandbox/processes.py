"""Descendants of a process: their number, their memory, and their end."""

from __future__ import annotations

import os
import time

from nemo_like.sandbox.linux import SIGKILL, SIGSTOP

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_END_LIMIT_S = 20.0


def descendants(pid: int) -> list[int]:
    """Return the process ids of the living descendants of `pid`, zombies included."""
    found: list[int] = []
    open_ids = [pid]
    while open_ids:
        children = _children(open_ids.pop())
        found += children
        open_ids += children
    return found


def resident_bytes(pids: list[int]) -> int:
    """Return the sum of the resident memory of processes; ended ones count 0."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                total += int(file.read().split()[1])
        except (OSError, IndexError):
            continue
    return total * _PAGE_BYTES


def num_tasks(user_id: int) -> int:
    """Return the number of processes and threads of a user."""
    count = 0
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"/proc/{name}").st_uid == user_id:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            # It ended meanwhile.
            continue
    return count


def has_children_after(seconds: float) -> bool:
    """Return True if this process has children after waiting this long for their end.

    Orphaned descendants are children of a subreaper, and of the first process of a PID namespace.
    """
    deadline = time.monotonic() + seconds
    while _reap():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.005)
    return False


def end_descendants() -> None:
    """Kill all descendants of this process, a subreaper, and wait for their end.

    They are stopped first: a process that forks faster than its children are killed would not be
    caught otherwise. Stopped processes still count towards the limit of processes, so a pass finds
    no new ones in the end. Raises TimeoutError if one does not end.
    """
    deadline = time.monotonic() + _END_LIMIT_S
    me = os.getpid()
    while True:
        stopped: set[int] = set()
        while new := set(descendants(me)) - stopped:
            for pid in new:
                _send(pid, SIGSTOP)
            stopped |= new
        for pid in stopped:
            _send(pid, SIGKILL)
        if not _reap():
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(descendants(me))} did not end when killed")
        time.sleep(0.002)


def _children(pid: int) -> list[int]:
    children = []
    try:
        # A child belongs to the thread that forked it.
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children += [int(child) for child in file.read().split()]
    except OSError:
        # It ended meanwhile; its children are those of the subreaper now.
        pass
    return children


def _reap() -> bool:
    """Collect ended children; return True if there are others."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It ended meanwhile.
        return
