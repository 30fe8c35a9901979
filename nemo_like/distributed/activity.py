"""What this process is working on, for the detection of hung workers.

Work that makes progress calls `note` for every microbatch, decoding step and reward sample. A
monitor compares the number of notes: a slow worker adds notes, a hung one does not. It is a module
because a process holds one worker; a local run, which holds several, runs one call at a time.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from typing import NamedTuple


class Activity(NamedTuple):
    """The last note of this process.

    Example: `Activity(17, 1032.5, "train, microbatch 3")`.
    """

    count: int
    """Notes so far."""
    time_s: float
    """`time.monotonic()` of the last note."""
    text: str


_last = Activity(0, time.monotonic(), "started")


def note(text: str) -> None:
    """Record progress. Costs well under a microsecond, so it fits into inner loops."""
    global _last
    _last = Activity(_last.count + 1, time.monotonic(), text)


def last() -> Activity:
    """The last note."""
    return _last


def main_thread_stack() -> str:
    """The Python stack of the main thread, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else ""
