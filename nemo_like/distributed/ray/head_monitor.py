"""Detects the loss of the head of the Ray cluster (GCS) and ends a driver that blocks after it.

Calls between the driver and running actors work without the head for a while. Calls that need the
head block, and after 60 s Ray ends the process without a Python exception. A thread therefore
connects to the head every few seconds. Worker groups check `is_lost` at every call and raise
WorkerFailure. If the process has not ended some time after the loss, because it blocks in Ray, the
thread ends it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from typing import NoReturn

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0
_CONNECT_TIMEOUT_S = 5.0
_MAX_ATTEMPTS = 3
_GRACE_S = 30.0
"""Time from the detection to the forced end of the process, below the 60 s of Ray."""
_EXIT_CODE = 1


class HeadMonitor:
    """Watches the head at `address` (host:port) from a daemon thread until `stop`."""

    def __init__(self, address: str) -> None:
        self.address = address
        host, _, port = address.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._lost = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="head-monitor", daemon=True)
        self._thread.start()

    @property
    def is_lost(self) -> bool:
        """True once the loss of the head was detected; it stays True."""
        return self._lost.is_set()

    def describe_loss(self) -> str:
        """Return the cause and its consequence, one sentence each."""
        return (
            f"the head of the Ray cluster (GCS, {self.address}) does not accept connections;"
            " without it no worker can be used. Its log is gcs_server.out of the Ray session."
        )

    def stop(self) -> None:
        """End the thread. After a loss, the process is not ended any more."""
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while self._is_reachable():
            if self._stopped.wait(_PERIOD_S):
                return
        if self._stopped.is_set():
            return
        self._lost.set()
        logger.info("%s", self.describe_loss())
        if self._stopped.wait(_GRACE_S):
            return
        # The main thread is blocked in Ray, which cannot be interrupted. The session guard removes
        # the session's processes after this process has ended.
        print(
            f"error: {self.describe_loss()} resume=true continues from the latest checkpoint,"
            " if there is one.",
            file=sys.stderr,
            flush=True,
        )
        end_process()

    def _is_reachable(self) -> bool:
        """Return True if the head accepts a connection at one of several attempts."""
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S).close()
                return True
            except OSError:
                # Waits 1 s, then 2 s: a busy head may refuse connections for a moment. After
                # `stop` the result is not used.
                if attempt < _MAX_ATTEMPTS and self._stopped.wait(float(attempt)):
                    return True
        return False


def end_process() -> NoReturn:
    """End the process as a failed run without the exit handlers of Ray, which need the head."""
    # `os._exit` flushes nothing.
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_EXIT_CODE)
