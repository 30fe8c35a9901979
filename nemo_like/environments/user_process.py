"""A child process for code that may hang or die: functions of the user, libraries without limits.

A thread that hangs cannot be interrupted, and would run on beside the run. The code is therefore
called in a child process, which is killed at a deadline and replaced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

_START_LIMIT_S = 300.0
_END_LIMIT_S = 5.0
"""Max wait for the exit status of a process that has closed its connection."""
_PARENT_CHECK_S = 1.0
_MAIN = "from nemo_like.environments.user_process import main; main()"
_READY = "ready"

Reply = Callable[[Any], None]
Handler = Callable[[Any, Reply], None]
"""Takes a message and a function that sends a reply, which it may call any number of times."""


class ProcessHung(Exception):
    """The process did not reply in time, and was killed."""


class ProcessEnded(Exception):
    """The process ended before its reply; `str()` is its status, for example `signal SIGSEGV`."""


class UserProcess:
    """Handles messages in a child process.

    The process starts with the first message, and again for the next one after it has ended. It
    ends with this process, even if that is killed, and what it started in its process group ends
    with it. Not thread-safe.
    """

    def __init__(
        self, prepare: Callable[..., Handler], *arguments: Any, is_quiet: bool = False
    ) -> None:
        """`prepare(*arguments)` is called in the child and returns the handler of messages.

        It is pickled by its name. With `is_quiet` the output of the child is discarded; otherwise
        it is the output of this process.
        """
        self._prepare = prepare
        self._arguments = arguments
        self._output = subprocess.DEVNULL if is_quiet else None
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._owner = 0

    def send(self, message: Any) -> None:
        """Send a message; start a process if none runs. Raises RuntimeError if it cannot start."""
        connection = self._started()
        with suppress(OSError):
            connection.send(message)

    def receive(self, timeout_s: float) -> Any:
        """Return the next reply. Raises ProcessHung and ProcessEnded; no process runs then."""
        assert self._connection is not None and self._child is not None, "send a message before"
        child = self._child
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                child.wait(_END_LIMIT_S)
            self.close()
            raise ProcessEnded(_described(child.returncode)) from None
        except BaseException:
            # The reply to this message must not be read as that to the next one.
            self.close()
            raise
        self.close()
        raise ProcessHung

    def close(self) -> None:
        """Kill the process, if it runs, and what it started in its process group."""
        child = self._child
        connection = self._connection
        self._child = None
        self._connection = None
        # The process of a parent that was forked is not this one's.
        if child is None or connection is None or self._owner != os.getpid():
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        connection.close()

    def _started(self) -> Connection:
        """Return the connection to a running process."""
        is_running = self._child is not None and self._child.poll() is None
        if is_running and self._owner == os.getpid() and self._connection is not None:
            return self._connection
        self.close()
        ours, theirs = Pipe()
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-c", _MAIN, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the driver. What the code starts is killed with the process.
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"a process for {self._name} cannot be started: {error}") from error
        theirs.close()
        self._connection = ours
        self._owner = os.getpid()
        try:
            # An error means that the process has ended, which `receive` reports.
            with suppress(OSError):
                ours.send((self._prepare, self._arguments))
            self.receive(_START_LIMIT_S)
        except (ProcessHung, ProcessEnded) as error:
            raise RuntimeError(
                f"the process for {self._name} did not start: {error or 'no reply in time'}"
            ) from error
        return ours

    @property
    def _name(self) -> str:
        return f"{self._prepare.__module__}.{self._prepare.__qualname__}"


def main() -> None:
    """Run the child process: handle messages until the connection ends."""
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    prepare, arguments = connection.recv()
    handle = prepare(*arguments)
    connection.send(_READY)
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        handle(message, connection.send)


def _end_with(parent: int) -> None:
    """End this process with its parent, also while the code hangs."""
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _described(status: int | None) -> str:
    if status is None:
        return "it closed its connection"
    if status >= 0:
        return f"exit status {status}"
    with suppress(ValueError):
        return f"signal {signal.Signals(-status).name}"
    return f"signal {-status}"
