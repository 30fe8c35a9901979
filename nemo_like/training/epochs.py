"""The loop of a run over the rows of a file with one optimizer step per batch of the loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from nemo_like.config.schema import EpochLoopConfig, RunConfig
from nemo_like.config.text import counted
from nemo_like.data.loader import BatchLoader
from nemo_like.metrics import Metrics
from nemo_like.training.dataset import ExampleSource, ExampleT
from nemo_like.training.evaluation import is_due
from nemo_like.training.open_run import open_training_run
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.skipped_steps import stop_if_too_many
from nemo_like.training.throughput import StepWork


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
    config: RunConfig,
    limits: EpochLoopConfig,
    source: ExampleSource[ExampleT],
    loader: BatchLoader[ExampleT],
    open_task: Callable[[], EpochTask],
) -> RunResult:
    """Train until `limits` end the run; return paths and last metrics.

    `limits` is the section of the algorithm in `config`. `open_task` is called before the run
    starts: it encodes the validation rows, so that a bad row is an error before the first step.
    Raises ConfigError for wrong input.
    """
    source.encode_ahead(loader.rows_of_batches(source.last_step(limits, loader, 0)))
    total = source.last_step(limits, loader, 0)
    task = open_task()
    with open_training_run(config, source.data, num_steps=total, num_optimizer_steps=total) as run:
        step = run.resume(loader)
        if step == 0:
            task.show_rows(run)
            if limits.val_at_start:
                run.add_metrics(task.validate(run, step))
                run.log_metrics(step)
        return run.finalize(_train(run, limits, source, loader, task, step))


def _train(
    run: TrainingRun,
    limits: EpochLoopConfig,
    source: ExampleSource[ExampleT],
    loader: BatchLoader[ExampleT],
    task: EpochTask,
    step: int,
) -> int:
    """Train from `step` to the end of the run; return the last step."""
    # The files can have changed since the checkpoint, and the number of steps with them.
    total = source.last_step(limits, loader, step)

    def is_end() -> bool:
        return (total is not None and step >= total) or source.is_exhausted(limits, loader)

    # A run without any row left ends with the error of the loader, not after 0 steps.
    is_last = step > 0 and is_end()
    with run.progress.phase(run.config.kind, total, unit="steps", done=step) as phase:
        while not is_last and not run.stops_early:
            run.stop_if_requested(step, loader)
            with run.timers("step"):
                work = task.train_step(run, step)
            step += 1
            phase.advance()
            is_last = is_end()
            if is_due(step, limits.val_period, is_last=is_last):
                run.add_metrics(task.validate(run, step))
            run.log_step(step, work)
            # After the log, because it can end the run.
            stop_if_too_many(run, step, loader)
            run.save_if_due(step, loader, is_last=is_last)
    num_left_out = loader.num_left_out(source.rows.is_kept)
    if num_left_out:
        run.progress.print_line(
            f"data.batching.tail=drop leaves out {counted(num_left_out, 'row')} of the last epoch"
        )
    return step
