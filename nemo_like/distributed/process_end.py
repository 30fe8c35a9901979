"""The end of a worker's process by its own decision, with a reason that the driver reports."""

from __future__ import annotations

import os
import re
from typing import NoReturn

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
