"""Saving the checkpoints of a run, and its Hugging Face models at the end.

With `checkpointing.async_save` training continues while the workers write a checkpoint.
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from nemo_like.metrics import Timers
from nemo_like.run.checkpoint import Checkpointer, CheckpointError, OpenCheckpoint, TrainingState
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import WriteError, remove_link, reporting_write_errors
from nemo_like.run.progress import Progress
from nemo_like.training.workers import RunWorkers

logger = logging.getLogger(__name__)

_POLICY = "policy"
"""The policy's directory inside a checkpoint."""


@dataclass(frozen=True)
class _Pending:
    """A checkpoint that the policy's workers write while training continues."""

    checkpoint: OpenCheckpoint
    started_s: float
    """`time.monotonic()` when the workers had copied their state."""


def policy_directory(checkpoint: Path) -> Path:
    """Return the directory of the policy's own files inside a checkpoint."""
    return checkpoint / _POLICY


class CheckpointSaver:
    """Saves the checkpoints of a run. At most one is being written at a time."""

    def __init__(self, checkpointer: Checkpointer, workers: RunWorkers, timers: Timers) -> None:
        self._checkpointer = checkpointer
        self._workers = workers
        self.timers = timers
        self._pending: _Pending | None = None

    def save(
        self, state: TrainingState, *, prunes: bool, in_background: bool, is_best: bool = False
    ) -> None:
        """Save the policy and `state`, after the checkpoint that is being written.

        `prunes` and `is_best` are passed to `Checkpointer.begin`.

        With `in_background` the workers have copied the policy when this returns, and write it
        while training continues; `publish_if_written` and `finish` make it the latest. Raises
        CheckpointError if a checkpoint cannot be written.
        """
        policy = self._workers.policy
        with self.timers("checkpoint"):
            self.finish()
            checkpoint = self._checkpointer.begin(state.step, prunes=prunes, is_best=is_best)
            directory = policy_directory(checkpoint.path)
            with self._checkpointer.discarding(checkpoint):
                with self._workers.policy_onloaded():
                    if in_background:
                        policy.start_save(directory)
                    else:
                        checkpoint.add(_POLICY, policy.save(directory))
                state.save(checkpoint.path)
            if in_background:
                self._pending = _Pending(checkpoint, time.monotonic())
            else:
                self._checkpointer.publish(checkpoint)

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, the pending one included."""
        steps = self._checkpointer.saved_steps()
        if self._pending is not None:
            steps.append(self._pending.checkpoint.step)
        return steps

    def publish_if_written(self) -> None:
        """Publish the pending checkpoint if the workers have written it; does not wait for them.

        Raises CheckpointError if a worker could not write its files.
        """
        if self._pending is not None and self._workers.policy.is_save_written():
            self.finish()

    def finish(self) -> None:
        """Wait for the pending checkpoint, if any, and publish it. Raises CheckpointError."""
        if self._pending is None:
            return
        pending = self._pending
        # Also after an error: it cannot be finished a second time.
        self._pending = None
        with self._checkpointer.discarding(pending.checkpoint):
            pending.checkpoint.add(_POLICY, self._workers.policy.finish_save())
        self._checkpointer.publish(pending.checkpoint)
        seconds = time.monotonic() - pending.started_s
        step = pending.checkpoint.step
        logger.info("the checkpoint of step %d was complete %.1f s after its copy", step, seconds)

    def finish_after_error(self, error: Exception) -> None:
        """Publish the pending checkpoint if the workers still can; the run ends with `error`.

        Otherwise its directory is removed and a warning is logged. Raises CheckpointError only if
        `error` is a failed write as well: a checkpoint that fills the disk is the cause then.
        """
        if self._pending is None:
            return
        checkpoint = self._pending.checkpoint
        try:
            self.finish()
        except Exception as reason:
            shutil.rmtree(checkpoint.path, ignore_errors=True)
            if isinstance(error, WriteError) and isinstance(reason, CheckpointError):
                raise reason from error
            logger.warning(
                "the checkpoint of step %d was being written and is lost: %s",
                checkpoint.step,
                reason,
            )


def export_model(
    directory: RunDirectory, workers: RunWorkers, progress: Progress, *, with_ema: bool
) -> Path:
    """Write the Hugging Face model and return its directory. Raises WriteError.

    With `with_ema` the model with averaged weights is written as well; without it that of an
    earlier start of the run is removed, as it would not belong to the new one.
    """
    _export(directory.hf, workers, progress, ema=False)
    if with_ema:
        _export(directory.hf_ema, workers, progress, ema=True)
    else:
        with reporting_write_errors(directory.hf_ema, "the exported model"):
            # A link would direct the removal to the files it refers to.
            remove_link(directory.hf_ema)
            shutil.rmtree(directory.hf_ema, ignore_errors=True)
    return directory.hf


def _export(export: Path, workers: RunWorkers, progress: Progress, *, ema: bool) -> None:
    # Written under another name first, so that `export` never has an incomplete model.
    unfinished = export.with_name(f"{export.name}.unfinished")
    with reporting_write_errors(export, "the exported model"):
        # A link would direct the removal to the files it refers to.
        remove_link(unfinished)
        shutil.rmtree(unfinished, ignore_errors=True)
        with progress.phase("exporting"), workers.policy_onloaded():
            workers.policy.export_hf(unfinished, ema=ema)
        shutil.rmtree(export, ignore_errors=True)
        unfinished.rename(export)
