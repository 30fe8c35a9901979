"""Saving checkpoints, their selection by a metric with early stopping, and the final export.

With `checkpointing.async_save` training continues while the workers write a checkpoint.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import CheckpointingConfig, EarlyStoppingConfig
from nemo_like.metrics import Timers
from nemo_like.run.checkpoint import Checkpointer, CheckpointError, OpenCheckpoint, TrainingState
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import WriteError, remove_link, reporting_write_errors
from nemo_like.run.progress import Progress
from nemo_like.run.upload import Uploader
from nemo_like.training.workers import RunWorkers

logger = logging.getLogger(__name__)

_BEST_KEY = "checkpointing.keep_best"
_POLICY = "policy"
"""The policy's directory inside a checkpoint."""


def policy_directory(checkpoint: Path) -> Path:
    """Return the directory of the policy's own files inside a checkpoint."""
    return checkpoint / _POLICY


class CheckpointSaver:
    """Saves the checkpoints of a run. At most one is being written at a time."""

    def __init__(
        self,
        checkpointer: Checkpointer,
        workers: RunWorkers,
        timers: Timers,
        uploader: Uploader | None = None,
    ) -> None:
        self._checkpointer = checkpointer
        self._workers = workers
        self.timers = timers
        self.uploader = uploader
        self._pending: OpenCheckpoint | None = None
        """A checkpoint that the policy's workers write while training continues."""

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
                self._pending = checkpoint
            else:
                self._publish(checkpoint)

    def _publish(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpointer.publish(checkpoint)
        if self.uploader is not None:
            self.uploader.submit()

    def saved_steps(self) -> list[int]:
        """Return the steps of the checkpoints, the pending one included."""
        steps = self._checkpointer.saved_steps()
        if self._pending is not None:
            steps.append(self._pending.step)
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
        with self._checkpointer.discarding(pending):
            pending.add(_POLICY, self._workers.policy.finish_save())
        self._publish(pending)

    def finish_after_error(self, error: Exception) -> None:
        """Publish the pending checkpoint if the workers still can; the run ends with `error`.

        Otherwise its directory is removed and a warning is logged. Raises CheckpointError only if
        `error` is a failed write as well: a checkpoint that fills the disk is the cause then.
        """
        if self._pending is None:
            return
        checkpoint = self._pending
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

    With `with_ema` the model with averaged weights is written as well; without it an averaged
    model from an earlier start of the run is removed, because it does not match the new weights.
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


@dataclass(kw_only=True)
class BestValue:
    """The best value of one metric so far."""

    metric: str
    """The value of `checkpointing.keep_best`."""
    mode: Literal["max", "min"]
    """Whether a larger or a smaller value is better."""
    value: float | None = None
    step: int | None = None
    """Step of `value`."""
    num_without: int = 0
    """Values since `step` that were not better."""

    def observe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Compare the metric of the record of `step`; return True if it is the best so far.

        Records without the metric change nothing; a value that is not finite is never better.
        Raises ConfigError if the record of step 0 has metrics of the same section, but not this
        one. Later a run would be lost, so `Selection.summary` reports it.
        """
        if self.metric not in metrics:
            section = self.metric.partition("/")[0]
            others = [name for name in metrics if name.partition("/")[0] == section]
            if step == 0 and others:
                raise ConfigError(
                    f"{_BEST_KEY} is {self.metric!r}, which this run does not log; metrics of"
                    f" that section: {', '.join(sorted(others))}"
                )
            return False
        value = metrics[self.metric]
        if not self._is_better(value):
            self.num_without += 1
            return False
        self.value = value
        self.step = step
        self.num_without = 0
        return True

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.value is None:
            return True
        return value > self.value if self.mode == "max" else value < self.value

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "value": self.value,
            "step": self.step,
            "num_without": self.num_without,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state, unless it belongs to another metric or mode: then start again."""
        if state.get("metric") != self.metric or state.get("mode") != self.mode:
            return
        self.value = state["value"]
        self.step = state["step"]
        self.num_without = state["num_without"]


class Selection:
    """Best checkpoint and early stopping of one run."""

    def __init__(self, checkpointing: CheckpointingConfig, stopping: EarlyStoppingConfig) -> None:
        self.patience = stopping.patience
        self.best: BestValue | None = None
        """Best of the steps that have a checkpoint; None without `checkpointing.keep_best`."""
        self.stopping: BestValue | None = None
        """Of all values, for early stopping; None without `early_stopping.patience`."""
        metric = checkpointing.keep_best
        if metric is not None:
            self.best = BestValue(metric=metric, mode=checkpointing.best_mode)
            if self.patience is not None:
                self.stopping = BestValue(metric=metric, mode=checkpointing.best_mode)

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the values of the record of `step`. Raises ConfigError for an unknown metric."""
        # The initial model has no checkpoint to keep.
        if self.best is not None and step > 0:
            self.best.observe(step, metrics)
        if self.stopping is not None:
            self.stopping.observe(step, metrics)

    def is_best(self, step: int) -> bool:
        """Return True if the record of `step` has the best value so far."""
        return self.best is not None and self.best.step == step

    @property
    def best_step(self) -> int | None:
        """The step of the best checkpoint; None without one."""
        return None if self.best is None else self.best.step

    @property
    def stops(self) -> bool:
        """True if the run must end because its metric has not improved for `patience` values."""
        if self.stopping is None or self.patience is None:
            return False
        return self.stopping.num_without >= self.patience

    def summary(self) -> list[str]:
        """Return the lines for the end of the run: early stopping, best step, missing metrics."""
        lines = []
        if self.stopping is not None and self.stops:
            best = self.stopping
            reached = "it was never finite"
            if best.value is not None:
                reached = f"best was {best.value:.6g} at step {best.step}"
            lines.append(
                f"early stopping: {best.metric} has not improved in {best.num_without} evaluations"
                f" ({reached})"
            )
        if self.best is not None and self.best.value is not None:
            best = self.best
            lines.append(f"best checkpoint: step {best.step}, {best.metric} {best.value:.6g}")
        if self.best is not None and self.best.step is None and self.best.num_without == 0:
            lines.append(f"{_BEST_KEY} is {self.best.metric!r}, but no step logged it")
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values, for a checkpoint."""
        return {name: each.state() for name, each in self._named().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint. Raises CheckpointError if it is damaged."""
        try:
            for name, each in self._named().items():
                each.restore(state.get(name, {}))
        except (KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the selection state is damaged: {error!r}") from error

    def _named(self) -> dict[str, BestValue]:
        named = {"best": self.best, "stopping": self.stopping}
        return {name: each for name, each in named.items() if each is not None}
