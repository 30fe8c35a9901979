"""The loop of a run over epochs of its rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from nemo_like.config.errors import counted
from nemo_like.config.schema import EpochLoopConfig
from nemo_like.data.loader import BatchLoader
from nemo_like.metrics import Metrics
from nemo_like.training.reporting import StepWork, check_trained
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.run_data import ExampleSource, ExampleT
from nemo_like.training.skipped_steps import stop_if_too_many

OpenRun = Callable[[int | None], AbstractContextManager[TrainingRun]]
"""Opens the run, given the number of its steps, None if it is not known in advance."""


def is_due(step: int, period: int, *, is_last: bool) -> bool:
    """Return True every `period` steps (0: never) and always at the last step."""
    return is_last or (period > 0 and step % period == 0)


class EpochTask(Protocol):
    """What an algorithm does in such a run."""

    def show_rows(self, run: TrainingRun) -> None:
        """Print the first rows of the file, decoded."""
        ...

    def train_step(self, run: TrainingRun, step: int) -> StepWork:
        """Train on the next rows after `step` steps; return them and what was computed."""
        ...

    def validate(self, run: TrainingRun, step: int) -> Metrics:
        """Return the metrics of all validation sets after `step` steps."""
        ...


def run_epochs(
    limits: EpochLoopConfig,
    source: ExampleSource[ExampleT],
    loader: BatchLoader[ExampleT],
    open_task: Callable[[], EpochTask],
    open_run: OpenRun,
) -> RunResult:
    """Train until `limits` end the run; return paths and last metrics.

    `open_task` is called before `open_run`: it encodes the validation rows, so that a bad row
    is an error before the first step. Raises ConfigError for wrong input.
    """
    source.encode_ahead(loader.rows_of_batches(source.last_step(limits, loader, 0)))
    total = source.last_step(limits, loader, 0)
    task = open_task()
    with open_run(total) as run:
        if run.step == 0:
            task.show_rows(run)
            if limits.val_at_start:
                run.log.add(_validated(task, run, run.step))
                run.log.write(run.step)
        return run.finalize(_train(run, limits, source, loader, task))


def _validated(task: EpochTask, run: TrainingRun, step: int) -> Metrics:
    """Validate, with the time that it takes on the console."""
    with run.progress.phase("validation"):
        return task.validate(run, step)


def _train(
    run: TrainingRun,
    limits: EpochLoopConfig,
    source: ExampleSource[ExampleT],
    loader: BatchLoader[ExampleT],
    task: EpochTask,
) -> int:
    """Train to the end of the run; return the last step."""
    step = run.step
    # The files can have changed since the checkpoint, and the number of steps with them.
    total = source.last_step(limits, loader, step)

    def is_end() -> bool:
        return (total is not None and step >= total) or loader.is_finished(source.rows.is_kept)

    # A run without any row left ends with the error of the loader, not after 0 steps.
    is_last = step > 0 and is_end()
    with run.progress.phase(run.settings.needs.job, total, unit="steps", done=step) as phase:
        while not is_last and not run.stops_early:
            run.stop_if_requested(step, loader)
            with run.log.timers("step"):
                work = task.train_step(run, step)
            step += 1
            phase.advance()
            is_last = is_end()
            if is_due(step, limits.val_period, is_last=is_last):
                run.log.add(_validated(task, run, step))
            run.log_step(step, work)
            # With a mixture an epoch need not have every row.
            if loader.epoch > 0 and loader.mixture is None:
                check_trained(run.settings.policy, run.settings.needs, run.log.counters)
            # After the log, because it can end the run.
            stop_if_too_many(run, step, loader)
            run.save_if_due(step, loader, is_last=is_last)
    check_trained(run.settings.policy, run.settings.needs, run.log.counters)
    num_left_out = loader.num_left_out(source.rows.is_kept)
    if num_left_out:
        run.progress.print_line(
            f"data.batching.tail=drop leaves out {counted(num_left_out, 'row')} of the last epoch"
        )
    return step
