"""The files of a run: its directory, logs and checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.config.schema import CheckpointingConfig
from nemo_like.data.loader import Position
from nemo_like.run.checkpoint import Checkpointer, TrainingState
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import AppendedFile
from nemo_like.run.tracking import RunLog, Tracker
from nemo_like.training.health import Health
from nemo_like.training.saving import CheckpointSaver, Selection


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The open files of a run. They exist when every check that can refuse the run has passed."""

    directory: RunDirectory
    log_file: RunLog
    tracker: Tracker
    lengths: AppendedFile
    """The row lengths of each step."""
    findings: AppendedFile
    """What the health rules found."""
    health: Health
    checkpointing: CheckpointingConfig
    checkpointer: Checkpointer
    saver: CheckpointSaver
    selection: Selection
    resolved: Mapping[str, Any]
    """The configuration as plain values."""
    frozen_models: Mapping[str, str]
    """Identities of frozen models by config key, for checkpoints."""

    def save_if_due(
        self,
        step: int,
        position: Position,
        counters: Mapping[str, float],
        *,
        is_last: bool,
        prunes: bool,
    ) -> None:
        """Save a checkpoint if this step is due; see `TrainingRun.save_if_due`.

        `prunes` is passed to `Checkpointer.begin`. Raises CheckpointError.
        """
        is_best = self.selection.is_best(step)
        if is_last:
            # First, because the pending checkpoint may be of this step.
            self.saver.finish()
        else:
            self.saver.publish_if_written()
        if not self.checkpointer.should_save(step, is_last=is_last, is_best=is_best):
            return
        # A resume removes the log records after the checkpoint's step. It must find those before,
        # so they are on disk first.
        self.tracker.sync()
        self.lengths.sync()
        self.findings.sync()
        state = TrainingState(
            step=step,
            loader=position.state_dict(),
            counters=dict(counters),
            selection=self.selection.state_dict(),
            model=dict(self.frozen_models),
        )
        in_background = self.checkpointing.async_save and not is_last
        self.saver.save(state, prunes=prunes, in_background=in_background, is_best=is_best)
