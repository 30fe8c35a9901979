"""Uploads checkpoints and exported models from a thread, for which a run waits only at its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from nemo_like.config.errors import error_text
from nemo_like.metrics import Max, Metrics
from nemo_like.run.checkpoint import Checkpointer
from nemo_like.run.directory import RunDirectory
from nemo_like.run.store import Sources, Store, UploadCancelled, checkpoint_sources, export_sources

logger = logging.getLogger(__name__)


class Uploader:
    """Keeps the latest and the best checkpoint of a run in a store.

    A failed upload is tried again with the next checkpoint, and once at the end of the run.
    """

    def __init__(self, store: Store, checkpointer: Checkpointer, directory: RunDirectory) -> None:
        self.store = store
        self._checkpointer = checkpointer
        self._directory = directory
        # The thread and the driver replace these values and never change them in place.
        self._exports: tuple[Path, ...] = ()
        self._metrics: Metrics = {"upload/num_failed": Max(0)}
        self._is_due = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self._is_slow = False
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def submit(self, exports: Sequence[Path] = ()) -> None:
        """Upload the latest and the best checkpoint, unless the store has them, and `exports`."""
        self._exports += tuple(exports)
        if self._is_due.is_set() and not exports and not self._is_slow:
            self._is_slow = True
            logger.warning(
                "uploads to %s take longer than the time between two checkpoints, so some are not"
                " uploaded (reported once)",
                self.store.address,
            )
        self._is_due.set()

    def metrics(self) -> Metrics:
        """Return the state of the uploads."""
        return self._metrics

    def close(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds until everything is uploaded, and end the thread."""
        self._is_closing = True
        self._is_due.set()
        try:
            self._thread.join(wait_s)
        finally:
            self.store.cancelled.set()
        if self._is_failing or self._thread.is_alive():
            logger.warning(
                "%s does not have the last files of the run; those in %s are complete, and the next"
                " resume there uploads its checkpoint",
                self.store.address,
                self._directory.path,
            )

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._is_due.wait()
            is_last = self._is_closing
            self._is_due.clear()
            try:
                self._upload()
                self._is_failing = False
            except UploadCancelled:
                return
            except Exception as error:  # noqa: BLE001 (the libraries of stores raise any type)
                self._note_failure(error)
            self._checkpointer.in_use = frozenset()

    def _note_failure(self, error: Exception) -> None:
        num_failed = self._metrics["upload/num_failed"].value + 1
        self._metrics = self._metrics | {"upload/num_failed": Max(num_failed)}
        logger.log(
            logging.INFO if self._is_failing else logging.WARNING,
            "the upload to %s failed: %s. Training continues, and the upload is tried again with"
            " the next checkpoint (reported once)",
            self.store.address,
            error_text(error),
        )
        self._is_failing = True

    def _upload(self) -> None:
        selected = self._selected()
        for pointer, path in selected.items():
            sources = checkpoint_sources(self._directory, int(path.name.removeprefix("step_")))
            prefix = f"checkpoints/{path.name}/"
            wanted = {name: each[1] for name, each in sources.items() if name.startswith(prefix)}
            if not wanted.items() <= self.store.records(path.name).items():
                self._put(path.name, sources)
            self.store.point(pointer, path.name)
        if "latest" in selected:
            step = int(selected["latest"].name.removeprefix("step_"))
            best = selected["best"].name if "best" in selected else None
            self.store.prune(step, self._checkpointer.config.keep_latest, best)
            self._metrics = self._metrics | {"upload/latest_step": Max(step)}
        for path in self._exports:
            self._put(path.name, export_sources(path))
            self._exports = tuple(each for each in self._exports if each != path)

    def _selected(self) -> dict[str, Path]:
        """Return the latest and the best checkpoint, which are not removed until the upload ends.

        If `latest` still names the checkpoint after it was marked, the driver, which replaces
        `latest` and then removes checkpoints, removes only others.
        """
        while True:
            selected = self._checkpointer.selected()
            self._checkpointer.in_use = frozenset(selected.values())
            if self._checkpointer.selected() == selected:
                return selected

    def _put(self, name: str, sources: Sources) -> None:
        started_s = time.monotonic()
        self.store.put(name, sources)
        self._metrics = self._metrics | {"upload/seconds": Max(time.monotonic() - started_s)}
