"""Uploads checkpoints and exported models from a thread, for which a run waits only at its end."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from nemo_like.config.errors import error_text
from nemo_like.metrics import Max, Metrics
from nemo_like.run.checkpoint import Checkpointer
from nemo_like.run.directory import RunDirectory
from nemo_like.run.store import Store, UploadCancelled, checkpoint_sources, export_sources

logger = logging.getLogger(__name__)


class Uploader:
    """Keeps the latest and the best checkpoint of a run in a store.

    A failed upload is tried again with the next checkpoint, and once at the end of the run. Only
    the driver's thread calls these methods.
    """

    def __init__(self, store: Store, checkpointer: Checkpointer, directory: RunDirectory) -> None:
        self.store = store
        self._checkpointer = checkpointer
        self._directory = directory
        # The state below is shared with the thread and changes under this lock only.
        self._changed = threading.Condition()
        self._queue: dict[Path, tuple[str, ...]] = {}
        """Directory to upload -> the files in the store that will name it."""
        self._active: Path | None = None
        self._is_due = False
        self._is_closing = False
        self._num_failed = 0
        self._is_failing = False
        self._is_slow = False
        self._metrics: Metrics = {}
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def submit_checkpoints(self) -> None:
        """Upload the latest and the best checkpoint, unless the store has them.

        Those of earlier calls that were not begun are left out.
        """
        pointers: dict[Path, tuple[str, ...]] = {}
        for pointer, path in self._checkpointer.selected().items():
            pointers[path] = (*pointers.get(path, ()), pointer)
        with self._changed:
            active, parent = self._active, self._checkpointer.path
            kept = {p: n for p, n in self._queue.items() if p == active or p.parent != parent}
            skipped = [path.name for path in self._queue.keys() - kept.keys() - pointers.keys()]
            if active is not None and skipped and not self._is_slow:
                self._is_slow = True
                logger.warning(
                    "the upload of %s to %s takes longer than the time between two checkpoints, so"
                    " some are not uploaded (reported once)",
                    active.name,
                    self.store.address,
                )
            self._submit(kept | pointers)

    def submit_exports(self, exports: Iterable[Path]) -> None:
        """Upload exported models, after the checkpoints."""
        with self._changed:
            self._submit(self._queue | {path: () for path in exports if path.is_dir()})

    def _submit(self, queue: dict[Path, tuple[str, ...]]) -> None:
        self._set_queue(queue)
        self._is_due = True
        self._changed.notify()

    def _set_queue(self, queue: dict[Path, tuple[str, ...]]) -> None:
        self._queue = queue
        # The local retention must not remove what is being read.
        self._checkpointer.in_use = frozenset(queue)

    def metrics(self) -> Metrics:
        """Return the state of the uploads."""
        with self._changed:
            return self._metrics | {"upload/num_failed": Max(self._num_failed)}

    def close(self, wait_s: float) -> None:
        """Wait up to `wait_s` seconds until everything is uploaded, and end the thread."""
        with self._changed:
            self._is_closing = True
            # A failed upload is tried once more.
            self._is_due = bool(self._queue)
            self._changed.notify()
        try:
            self._thread.join(wait_s)
        finally:
            self.store.cancelled.set()
            with self._changed:
                names = ", ".join(path.name for path in self._queue)
                self._set_queue({})
        if names:
            logger.warning(
                "not uploaded to %s: %s; the files in %s are complete, and the next resume there"
                " uploads its checkpoint",
                self.store.address,
                names,
                self._directory.path,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_due or self._is_closing)
                if not self._is_due:
                    return
                self._is_due = False
            try:
                while self._upload_next():
                    pass
            except UploadCancelled:
                return
            except Exception as error:  # noqa: BLE001 (the libraries of stores raise any type)
                self._note_failure(error)

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            path, self._active = self._active, None
            self._num_failed += 1
            level = logging.INFO if self._is_failing else logging.WARNING
            self._is_failing = True
        logger.log(
            level,
            "the upload of %s to %s failed: %s. Training continues, and the upload is tried again"
            " with the next checkpoint (reported once)",
            "a checkpoint" if path is None else path.name,
            self.store.address,
            error_text(error),
        )

    def _upload_next(self) -> bool:
        """Upload the first directory of the queue; return False if there is none."""
        with self._changed:
            if not self._queue:
                return False
            path, pointers = next(iter(self._queue.items()))
            self._active = path
        started_s = time.monotonic()
        is_checkpoint = path.parent == self._checkpointer.path
        metrics: Metrics = {}
        if is_checkpoint:
            step = int(path.name.removeprefix("step_"))
            is_new = self._upload_checkpoint(path, step, pointers)
            if "latest" in pointers:
                metrics["upload/latest_step"] = Max(step)
        else:
            self.store.put(path.name, export_sources(path))
            is_new = True
        if is_new:
            metrics["upload/seconds"] = Max(time.monotonic() - started_s)
        with self._changed:
            self._metrics = self._metrics | metrics
            self._active = None
            self._is_failing = False
            self._set_queue({p: n for p, n in self._queue.items() if p != path or n != pointers})
        return True

    def _upload_checkpoint(self, path: Path, step: int, pointers: tuple[str, ...]) -> bool:
        """Upload a checkpoint unless the store has it; return whether it did not."""
        sources = checkpoint_sources(self._directory, step)
        prefix = f"checkpoints/{path.name}/"
        wanted = {name: each.record for name, each in sources.items() if name.startswith(prefix)}
        is_new = not wanted.items() <= self.store.records(path.name).items()
        if is_new:
            self.store.put(path.name, sources)
        for pointer in pointers:
            self.store.point(pointer, path.name)
        if "latest" in pointers:
            best = self._checkpointer.selected().get("best")
            keep_latest = self._checkpointer.config.keep_latest
            self.store.prune(step, keep_latest, None if best is None else best.name)
        return is_new
