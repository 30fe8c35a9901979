"""Early end of a run, after the current step, by a signal, its time limit or a health rule.

SIGTERM, SIGHUP and `cluster.time_limit` end the run with exit code 75, the first SIGINT with 130, a
health rule with 3. A second SIGINT ends the process at once. Before the first step there is nothing
to save, and a signal ends the run directly. A SIGHUP that was ignored when the run began stays
ignored.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from nemo_like.config.constraints import parse_duration
from nemo_like.distributed.activity import process_age_s
from nemo_like.distributed.ray.session_guard import remove_all_sessions

EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: the same command with resume=true continues the run."""
EXIT_INTERRUPTED = 130
EXIT_UNHEALTHY = 3
"""The same command would fail again: a key must be changed first."""

_NODE_CHECK_S = 5.0
"""Seconds between two checks for nodes that have returned."""
_exit_now = os._exit


class RunStopped(BaseException):
    """The run ended early on request. `str()` is the message, `exit_code` the command's exit code.

    Not an `Exception`, as it is raised from signal handlers: code that catches every exception
    must not treat it as a failure of that code.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StopRequests:
    """Requests to end the run early: the first signal, the time limit, a health rule."""

    def __init__(self, time_limit: str | None) -> None:
        self._limit = time_limit
        self._limit_s = None if time_limit is None else parse_duration(time_limit)
        self._signal: signal.Signals | None = None
        self._finishes_steps = False
        self.unhealthy: str | None = None
        """The health rule that ends the run."""
        self.raised: BaseException | None = None
        """The exception that a signal outside a step has raised."""
        self.has_returned_nodes = False
        """True if the run ends because it can have more nodes."""
        self.restarts_after: Callable[[BaseException], bool] = lambda error: False
        """Return whether this process starts the run again after a failure."""
        self._nodes_return: Callable[[], bool] | None = None
        self._next_check_s = 0.0

    def watch_nodes(self, have_returned: Callable[[], bool] | None) -> None:
        """End the run after a step at which `have_returned` is True; None for no such check."""
        self._nodes_return = have_returned
        self.has_returned_nodes = False
        self._next_check_s = time.monotonic() + _NODE_CHECK_S

    def _check_nodes(self) -> None:
        now = time.monotonic()
        if self._nodes_return is not None and now >= self._next_check_s:
            self._next_check_s = now + _NODE_CHECK_S
            self.has_returned_nodes = self._nodes_return()

    @property
    def final_reason(self) -> str | None:
        """What requests the end of the run for good; None without a request."""
        if self._signal is not None:
            return self._signal.name
        if self.unhealthy is not None:
            return f"health rule {self.unhealthy}"
        if self._limit_s is not None and process_age_s() >= self._limit_s:
            return f"cluster.time_limit {self._limit}"
        return None

    @property
    def reason(self) -> str | None:
        """What requests the end of the run, returned nodes included; None without a request."""
        final = self.final_reason
        if final is not None:
            return final
        if not self.has_returned_nodes:
            self._check_nodes()
        return "returned nodes" if self.has_returned_nodes else None

    @property
    def exit_code(self) -> int:
        """The exit code of a run that ended for `reason`."""
        if self._signal is None and self.unhealthy is not None:
            return EXIT_UNHEALTHY
        return EXIT_INTERRUPTED if self._signal == signal.SIGINT else EXIT_STOPPED

    def finish_steps(self, *, enabled: bool) -> None:
        """Set whether a signal waits for the end of the step (True) or ends the run directly."""
        self._finishes_steps = enabled
        self.raised = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle SIGTERM, SIGHUP or SIGINT."""
        received = signal.Signals(number)
        if received == signal.SIGINT and self._signal == signal.SIGINT:
            _write_line(
                "interrupted twice: exiting at once; the steps since the last checkpoint are lost"
            )
            # Exit handlers do not run, so the processes of Ray are ended here.
            remove_all_sessions()
            _exit_now(EXIT_INTERRUPTED)
        is_first = self._signal is None
        # SIGINT replaces an earlier signal, so that the next SIGINT counts as the second.
        if is_first or received == signal.SIGINT:
            self._signal = received
        if not self._finishes_steps:
            if received == signal.SIGINT:
                self.raised = KeyboardInterrupt()
            elif is_first:
                text = f"stopped by {received.name} outside a step"
                self.raised = RunStopped(text, EXIT_STOPPED)
            else:
                return
            raise self.raised
        if received == signal.SIGINT:
            _write_line(
                "interrupted: the run saves a checkpoint and ends after the current step; press"
                " Ctrl-C again to exit at once"
            )
        elif is_first:
            _write_line(
                f"{received.name}: the run saves a checkpoint and ends after the current step"
            )


_active: StopRequests | None = None


@contextmanager
def stop_requests(time_limit: str | None) -> Iterator[StopRequests]:
    """Handle signals and `cluster.time_limit` inside the block.

    A nested block shares the requests of the outer one. Only a main thread can handle signals;
    in another thread the time limit alone has an effect.
    """
    global _active
    if _active is not None:
        yield _active
        return
    requests = StopRequests(time_limit)
    _active = requests
    handled = [signal.SIGINT, signal.SIGTERM]
    # `nohup` ignores SIGHUP, so that the command continues after its terminal is closed.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        handled.append(signal.SIGHUP)
    if threading.current_thread() is not threading.main_thread():
        handled = []
    before = {number: signal.signal(number, requests.on_signal) for number in handled}
    try:
        yield requests
    except Exception:
        # Native code of Ray that a signal interrupts raises SystemError instead.
        if requests.raised is not None:
            raise requests.raised from None
        raise
    finally:
        _active = None
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_line(text: str) -> None:
    """Write a line to the console."""
    # Not by `print`, whose buffer may be in use when a signal arrives. A closed terminal (SIGHUP)
    # must not end the run with an OSError.
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
