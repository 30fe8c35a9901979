"""Symbolic comparison of two answers in a child process that can be killed.

math-verify and sympy may run without end, use all memory or raise on an answer such as
`9**9**9**9`, and a limit inside the process does not interrupt arithmetic on big integers. So the
comparison runs in a child process with limits on CPU time and memory. It works in any thread, and
this process imports neither library.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType

from nemo_like.sandbox.isolation import lower_limit

CPU_LIMIT_S = 2.0
"""CPU time of one comparison, after which it counts as unequal."""
_HARD_CPU_LIMIT_S = 3.0
"""CPU time after which the kernel ends the child, also in code that does not return to Python."""
_WALL_LIMIT_S = 30.0
_START_LIMIT_S = 180.0
_MEMORY_LIMIT_BYTES = 4 * 2**30
_SERVE = "from nemo_like.environments.comparison import serve; serve()"


class AnswerComparer:
    """Compares answers in one child process, which is started on demand."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def is_equal(self, gold: str, predicted: str) -> bool:
        """Return True if math-verify finds the answers equal.

        A comparison that fails, or exceeds a limit on time or memory, returns False. Raises
        RuntimeError if the child process cannot be started.
        """
        with self._lock:
            child = self._running_child()
            reply = self._request(child, gold, predicted)
            if not reply:
                # It may still compute; the next comparison starts another child.
                self._end()
            return reply == b"1\n"

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            self._end()

    def _running_child(self) -> subprocess.Popen[bytes]:
        # A forked process must not use the child of its parent: their replies would mix.
        is_owner = self._owner == os.getpid()
        if is_owner and self._child is not None and self._child.poll() is None:
            return self._child
        if is_owner:
            self._end()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", _SERVE],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                # Signals to the group of the driver, such as Ctrl-C, are for the driver.
                process_group=0,
            )
        except OSError as error:
            raise RuntimeError(
                f"the process that compares answers cannot be started: {error}"
            ) from error
        self._child = child
        self._owner = os.getpid()
        if _read_line(child, _START_LIMIT_S) != b"ready\n":
            self._end()
            raise RuntimeError(
                f"the process that compares answers did not start within {_START_LIMIT_S:g} s;"
                f" check that `{sys.executable} -c 'import math_verify'` works"
            )
        return child

    def _request(self, child: subprocess.Popen[bytes], gold: str, predicted: str) -> bytes:
        """Return the child's reply; empty if it ended or exceeded the time limit."""
        assert child.stdin is not None
        try:
            request = json.dumps([gold, predicted]) + "\n"
            child.stdin.write(request.encode("ascii"))
            child.stdin.flush()
        except OSError:
            return b""
        return _read_line(child, _WALL_LIMIT_S)

    def _end(self) -> None:
        child = self._child
        self._child = None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for stream in (child.stdin, child.stdout):
            assert stream is not None
            with suppress(OSError):  # a request that the child no longer reads
                stream.close()


def _read_line(child: subprocess.Popen[bytes], limit_s: float) -> bytes:
    """Read one line of the child's output; empty if it ends or the limit passes first."""
    assert child.stdout is not None
    line = b""
    deadline = time.monotonic() + limit_s
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return b""
            part = os.read(child.stdout.fileno(), 64)
            if not part:
                return b""
            line += part
    return line


class _OutOfTime(BaseException):
    """Raised in a comparison at its CPU limit; not an Exception, so that no library handles it."""


def serve() -> None:
    """Run the child process: reply `1` or `0` to each JSON line `[gold, predicted]`."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGVTALRM, _raise_out_of_time)
    lower_limit(resource.RLIMIT_AS, _MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES)
    lower_limit(resource.RLIMIT_CORE, 0, 0)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    # Output of the libraries must not be read as a reply.
    os.dup2(2, 1)

    import logging

    # Slow, so it is imported before the time of the first comparison starts.
    from nemo_like.environments.expressions import expressions_equal

    logging.disable()
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        gold, predicted = json.loads(line)
        is_equal = _within_limit(expressions_equal, gold, predicted)
        replies.write(b"1\n" if is_equal else b"0\n")


def _raise_out_of_time(number: int, frame: FrameType | None) -> None:
    raise _OutOfTime


def _within_limit(compare: Callable[[str, str], bool], gold: str, predicted: str) -> bool:
    try:
        signal.setitimer(signal.ITIMER_PROF, _HARD_CPU_LIMIT_S)
        # Repeated every 0.5 s, in case a library handles the first exception.
        signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S, 0.5)
        try:
            return compare(gold, predicted)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    except (Exception, _OutOfTime):  # noqa: BLE001
        # An answer that the libraries cannot handle is not the right one.
        return False
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)


shared_comparer = AnswerComparer()
"""The comparer of this process."""

atexit.register(shared_comparer.close)
