"""Ends the driver with a message if the head of a Ray that it starts dies before `ray.init`
returns.

Ray's native code waits 60 s for the head and then ends the process without a message. Where Ray
raises an exception instead, it does so within the grace period, and the exception says more.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from types import TracebackType

from nemo_like.distributed.ray.actor import process_state
from nemo_like.distributed.ray.session_guard import SessionFolder, gcs_pid

_PERIOD_S = 0.25
_GRACE_S = 15.0


class StartupWatch:
    """Watches the head process of `session` from a thread, inside a `with` block around
    `ray.init`.
    """

    def __init__(self, session: SessionFolder, logs: Path | None) -> None:
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
        while pid is None or process_state(pid) not in ("", "Z", "X"):
            if self._stopped.wait(_PERIOD_S):
                return
            pid = gcs_pid(self._session.path) if pid is None else pid
        if self._stopped.wait(_GRACE_S):
            return
        self._session.close(self._logs)
        kept = (
            f"; the logs of Ray are in {self._logs}"
            if self._logs is not None and self._logs.is_dir()
            else ""
        )
        os.write(
            2,
            f"error: the head of Ray (GCS, pid {pid}) ended while Ray was being started on this"
            f" machine{kept}. All its"
            " processes were stopped, and no file of the run has changed. Try again.\n".encode(),
        )
        logging.shutdown()
        os._exit(1)
