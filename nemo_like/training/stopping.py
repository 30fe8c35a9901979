"""Ending a run early, by a signal or by its time limit, after the step that is running.

SIGTERM, SIGHUP and `cluster.time_limit` end the run with exit code 75, the first SIGINT with 130. A
second SIGINT ends the process at once. Before the first step there is nothing to save, and a signal
ends the run directly.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from nemo_like.config.durations import parse_duration
from nemo_like.config.schema import RunConfig
from nemo_like.distributed.ray.session_guard import remove_all_sessions

EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: the same command with resume=true continues the run."""
EXIT_INTERRUPTED = 130

_exit_now = os._exit


class RunStopped(BaseException):
    """The run ended early as asked. `str()` is the message; the command exits with `exit_code`.

    Not an `Exception`, as it is raised from signal handlers: code that catches every exception
    must not take it for a failure of its own.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StopRequests:
    """Whether the run has been asked to end, and by what."""

    def __init__(self, time_limit: str | None) -> None:
        self._limit = time_limit
        self._limit_s = None if time_limit is None else parse_duration(time_limit)
        self._signal: signal.Signals | None = None
        self._finishes_steps = False

    @property
    def reason(self) -> str | None:
        """What asked for the end of the run; None if nothing has."""
        if self._signal is not None:
            return self._signal.name
        if self._limit_s is not None and process_age_s() >= self._limit_s:
            return f"cluster.time_limit {self._limit}"
        return None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ended for `reason`."""
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_STOPPED

    def finish_steps(self, *, enabled: bool) -> None:
        """From here on a signal waits for the end of the step, or with False ends the run
        directly.
        """
        self._finishes_steps = enabled

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler of SIGTERM, SIGHUP and SIGINT."""
        received = signal.Signals(number)
        if received == signal.SIGINT and self._signal == signal.SIGINT:
            _say(
                "interrupted twice: exiting at once; what was done since the last checkpoint is"
                " lost"
            )
            remove_all_sessions()
            _exit_now(EXIT_INTERRUPTED)
        first = self._signal is None
        if first or received == signal.SIGINT:
            self._signal = received
        if not self._finishes_steps:
            if received == signal.SIGINT:
                raise KeyboardInterrupt
            if first:
                raise RunStopped(f"stopped by {received.name} outside a step", EXIT_STOPPED)
        elif received == signal.SIGINT:
            _say(
                "interrupted: the run saves a checkpoint and ends after the current step; press"
                " Ctrl-C again to exit at once"
            )
        elif first:
            _say(f"{received.name}: the run saves a checkpoint and ends after the current step")


_active: StopRequests | None = None


@contextmanager
def stop_requests(config: RunConfig) -> Iterator[StopRequests]:
    """Handle signals and the time limit inside the block; in a block inside another, those of the
    outer one.

    Only a main thread can handle signals; elsewhere the time limit alone has an effect.
    """
    global _active
    if _active is not None:
        yield _active
        return
    requests = _active = StopRequests(config.cluster.time_limit)
    handled = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    before = {number: signal.signal(number, requests.on_signal) for number in handled}
    try:
        yield requests
    finally:
        _active = None
        for number, handler in before.items():
            signal.signal(number, handler)


def process_age_s() -> float:
    """Seconds since this process was started."""
    fields = (
        Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
    )
    started = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _say(text: str) -> None:
    """Write a line to the console. Not by `print`, whose buffer may be in use when a signal
    arrives.
    """
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
