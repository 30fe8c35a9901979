"""Ends the driver with a message when its raylet dies. Ray ends it as well, at its next call, but
without any message.
"""

from __future__ import annotations

import os
import select
import threading

from nemo_like.distributed.ray.session_guard import is_removing_all, remove_all_sessions


class RayletWatch:
    """Waits in a thread for the end of the raylet of a Ray that this process started, and then
    exits with code 1.
    """

    def __init__(self, pid: int) -> None:
        self._raylet = os.pidfd_open(pid)
        self._stop_reader, self._stop_writer = os.pipe()
        self._message = (
            f"error: the raylet (pid {pid}), the Ray process that runs the workers of this machine,"
            f" ended unexpectedly, so the"
            " run cannot continue. The same command with resume=true continues from the latest"
            " checkpoint, if there is one.\n"
        ).encode()
        self._thread = threading.Thread(target=self._run, name="raylet_watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop waiting, before the raylet is ended on purpose. May be called again."""
        if not self._thread.is_alive() and self._raylet < 0:
            return
        os.write(self._stop_writer, b"x")
        self._thread.join()
        for descriptor in (self._raylet, self._stop_reader, self._stop_writer):
            os.close(descriptor)
        self._raylet = -1

    def _run(self) -> None:
        ended, _, _ = select.select([self._raylet, self._stop_reader], [], [])
        if self._stop_reader not in ended and not is_removing_all():
            os.write(
                2, self._message
            )  # at once and without a buffer: Ray may end the process within milliseconds
            remove_all_sessions()
            os._exit(1)
