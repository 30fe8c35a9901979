"""The current activity of this process, for the detection of hung workers.

Code that makes progress calls `note` for every microbatch, decoding step and reward sample. A
monitor compares the number of notes: a slow worker adds notes, a hung one does not. The state is a
module variable because a process has one worker; a local run has several, but runs one call at a
time.
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

    num_notes: int
    """Notes so far."""
    time_s: float
    """`time.monotonic()` of the last note."""
    text: str


_last = Activity(0, time.monotonic(), "started")


def note(text: str) -> None:
    """Record progress. Costs well under a microsecond, so it fits into inner loops."""
    global _last
    # One assignment, so that a reader in another thread sees either the old or the new note.
    _last = Activity(_last.num_notes + 1, time.monotonic(), text)


def last() -> Activity:
    """Return the last note."""
    return _last


def main_thread_stack() -> str:
    """Return the Python stack of the main thread, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame))
