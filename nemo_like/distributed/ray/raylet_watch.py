"""Ends the driver when its raylet dies. Ray does so as well, but only at its next call.

The guard of the session writes the message, because it is a process of its own: Ray may end this
process before a thread of it can write.
"""

from __future__ import annotations

import os
import select
import threading
import time

from nemo_like.distributed.ray.session_guard import SessionDirectory, remove_all_sessions

_MESSAGE_S = 0.2
"""Time for the guard to write its message before this process ends."""


class RayletWatch:
    """Exits with code 1 when a raylet that this process started ends. Waits in a thread."""

    def __init__(self, session: SessionDirectory, pid: int) -> None:
        self._session = session
        self._raylet = os.pidfd_open(pid)
        session.watch_raylet(pid)
        # A pipe instead of an event: `select` waits for it and for the raylet at the same time.
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._run, name="raylet_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop waiting, before the raylet is ended on purpose. May be called again."""
        if not self._thread.is_alive() and self._raylet < 0:
            return
        self._session.unwatch()
        os.write(self._stop_writer, b"x")
        self._thread.join()
        for descriptor in (self._raylet, self._stop_reader, self._stop_writer):
            os.close(descriptor)
        self._raylet = -1

    def _run(self) -> None:
        ready, _, _ = select.select([self._raylet, self._stop_reader], [], [])
        if self._stop_reader in ready:
            return
        time.sleep(_MESSAGE_S)
        remove_all_sessions()
        # `sys.exit` would end this thread only.
        os._exit(1)
