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
from nemo_like.run.store import Store, UploadCancelled

logger = logging.getLogger(__name__)


_THREAD = "upload"


class Uploader:
    """Keeps the latest and the best checkpoint of a run in a store.

    A failed upload is tried again with the next checkpoint, and once at the end of the run.
    """

    def __init__(self, store: Store, checkpointer: Checkpointer, run: Path) -> None:
        self.store = store
        self._checkpointer = checkpointer
        self._path = run
        # The thread and the driver replace these values and never change them in place.
        self._exports: tuple[Path, ...] = ()
        self.metrics: Metrics = {"upload/num_failed": Max(0)}
        """The state of the uploads."""
        self._is_due = threading.Event()
        self._is_closing = False
        self._is_failing = False
        self._is_slow = False
        self._is_checked = False
        # Of an earlier start in this process, each in its last request.
        self._earlier = [each for each in threading.enumerate() if each.name == _THREAD]
        self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
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

    def close(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds until everything is uploaded, and end the thread."""
        self._is_closing = True
        self._is_due.set()
        try:
            self._thread.join(wait_s)
        finally:
            self.store.is_cancelled = True
        if self._is_failing or self._thread.is_alive():
            logger.warning(
                "%s does not have the last files of the run; those in %s are complete, and the next"
                " resume there uploads its checkpoint",
                self.store.address,
                self._path,
            )

    def cancel(self) -> None:
        """End the thread after its current request, without waiting for it.

        The next Uploader of this process uploads what is missing.
        """
        self.store.is_cancelled = True
        self._is_closing = True
        self._is_due.set()

    def _run(self) -> None:
        for thread in self._earlier:
            thread.join()
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
                if self.store.is_cancelled:
                    return
                num_failed = self.metrics["upload/num_failed"].value + 1
                self.metrics = self.metrics | {"upload/num_failed": Max(num_failed)}
                logger.log(
                    logging.INFO if self._is_failing else logging.WARNING,
                    "the upload to %s failed: %s. Training continues, and the upload is tried again"
                    " with the next checkpoint (reported once)",
                    self.store.address,
                    error_text(error),
                )
                self._is_failing = True
            self._checkpointer.in_use = frozenset()

    def _upload(self) -> None:
        started_s = time.monotonic()
        selected = self._selected()
        if "latest" in selected and not self._is_checked:
            is_behind = self._is_behind(selected["latest"])
            self._is_checked = True
            if is_behind:
                return
        is_new = bool(self._exports)
        for pointer, path in selected.items():
            is_new |= self.store.put_checkpoint(self._path, path)
            self.store.point(pointer, path.name)
        if "latest" in selected:
            step = int(selected["latest"].name.removeprefix("step_"))
            best = selected["best"].name if "best" in selected else None
            kept = self._checkpointer.config
            self.store.prune(step, kept.keep_latest, best, kept.keep_hours)
            self.metrics = self.metrics | {"upload/latest_step": Max(step)}
        while self._exports:
            export = self._exports[0]
            files = (path for path in sorted(export.rglob("*")) if path.is_file())
            self.store.put(export.name, export, files)
            self._exports = self._exports[1:]
        if is_new:
            self.metrics = self.metrics | {"upload/seconds": Max(time.monotonic() - started_s)}

    def _is_behind(self, latest: Path) -> bool:
        """Return whether the store has a later step, with a warning; for the start of a resume."""
        named = self.store.named("latest")
        step = int(latest.name.removeprefix("step_"))
        is_behind = named in {f"step_{other}" for other in self.store.steps() if other > step}
        if is_behind:
            logger.warning(
                "%s has %s, and this run continues from its local %s, whose next checkpoint becomes"
                " the latest there. To continue from the store, stop the run, remove %s and resume",
                self.store.address,
                named,
                latest.name,
                self._path / "latest",
            )
        return is_behind

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
