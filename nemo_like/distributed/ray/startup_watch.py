"""Ends the driver with a message if the Ray head that it starts dies before `ray.init` returns.

Ray's native code waits 60 s for the head and then ends the process without a message. If Ray
raises an exception instead, it does so within the grace period, and the exception has more detail.
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from nemo_like.distributed.ray.processes import has_ended
from nemo_like.distributed.ray.session_guard import SessionDirectory, gcs_pid, kept_logs_text

_PERIOD_S = 0.25
_GRACE_S = 15.0


class StartupWatch:
    """Watches the head process of `session` from a thread, in a `with` block around `ray.init`."""

    def __init__(self, session: SessionDirectory, logs: Path | None) -> None:
        """`logs` receives the logs of Ray if the head dies."""
        self._session = session
        self._logs = logs
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="startup-watch", daemon=True)

    def __enter__(self) -> StartupWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        pid = None
        # The head does not run yet when the watch starts; until then there is nothing to report.
        while pid is None or not has_ended(pid):
            if self._stopped.wait(_PERIOD_S):
                return
            if pid is None:
                pid = gcs_pid(self._session.path)
        if self._stopped.wait(_GRACE_S):
            return
        self._session.close(self._logs)
        message = (
            f"error: the head of Ray (GCS, pid {pid}) ended while Ray was being started on this"
            f" machine{kept_logs_text(self._logs)}. All its processes were stopped, and no file of"
            " the run has changed. Try again.\n"
        )
        with suppress(OSError):  # the terminal is closed
            os.write(2, message.encode())
        logging.shutdown()
        # The main thread is blocked in Ray's native code, which cannot be interrupted.
        os._exit(1)
