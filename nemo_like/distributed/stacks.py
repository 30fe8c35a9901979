"""Stacks of worker processes that hang, and the collective in which others wait for them."""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SIGNAL = signal.SIGUSR2
_PY_SPY_S = 10.0
_FAULTHANDLER_S = 2.0
_FRAMES = (
    # py-spy, innermost first: all_reduce (torch/distributed/distributed_c10d.py:3077)
    re.compile(r"^ {4}(?P<name>[^\s(][^(]*) \((?P<path>[^()]+):(?P<line>\d+)\)$", re.MULTILINE),
    # faulthandler, innermost first, and traceback, innermost last.
    re.compile(r'^ *File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)', re.MULTILINE),
)


def register() -> None:
    """Write the stacks of this process to its standard error when `stack_of` requests them."""
    faulthandler.register(_SIGNAL, all_threads=True)


def py_spy() -> str | None:
    """Return the path of py-spy, on PATH or beside this Python; None where it is not installed."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=os.path.dirname(sys.executable))


def py_spy_dump(program: str, pid: int) -> str:
    """Return the Python stacks of a process, or why there are none."""
    # Without a pause of the process, which a stopped one would not confirm.
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PY_SPY_S
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {_PY_SPY_S:g} s"
    return done.stdout or done.stderr


def stack_of(pid: int, log_path: str) -> str:
    """Return the Python stacks of a worker on this machine that does not respond; empty if unknown.

    `log_path` has its standard error. Without py-spy a stopped process is continued, and must be
    killed next.
    """
    program = py_spy()
    if program is not None and innermost(text := py_spy_dump(program, pid)):
        return text
    log = Path(log_path)
    try:
        size = log.stat().st_size
        os.kill(pid, _SIGNAL)
        os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + _FAULTHANDLER_S
        while not innermost(text := _tail(log, size)) and time.monotonic() < deadline:
            time.sleep(0.05)
    except OSError:  # the process or its log is gone
        return ""
    return text


def innermost(stack: str) -> str:
    """Return the innermost call of the main thread, e.g. `all_reduce (distributed_c10d.py:3077)`.

    `stack` is of py-spy, faulthandler or traceback; empty for another text.
    """
    # faulthandler writes the main thread last.
    main = stack.partition('"MainThread"')[2] or stack.rpartition("(most recent call first):")[2]
    is_traceback = main == stack
    for pattern in _FRAMES:
        frames = list(pattern.finditer(main))
        if frames:
            frame = frames[-1 if is_traceback else 0]
            return f"{frame['name']} ({os.path.basename(frame['path'])}:{frame['line']})"
    return ""


def is_in_collective(stack: str) -> bool:
    """Return True if the innermost call of a stack is of torch.distributed."""
    return "distributed_c10d.py" in innermost(stack)


def last_collective() -> str:
    """Return the last collective that this process began, from torch's flight recorder.

    Example: `gloo:all_reduce of [[4]] (collective 812 of the group default_pg)`. Empty without one.
    """
    # Not imported here: the driver has no torch.
    module = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(module, "_dump_fr_trace_json", None)
    if dump is None:
        return ""
    entries: list[dict[str, Any]] = json.loads(dump()).get("entries", [])
    if not entries:
        return ""
    last = entries[-1]
    group = " ".join(dict.fromkeys(last["process_group"][1:])) or "default_pg"
    return (
        f"{last['profiling_name']} of {last['input_sizes']} (collective"
        f" {last['collective_seq_id']} of the group {group})"
    )


def _tail(path: Path, start: int) -> str:
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
