"""The parts that every training run shares: workers, files and the log of a step.

The loops are in `algorithms`, one package per job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from nemo_like.config.errors import counted
from nemo_like.config.schema import LoggerConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.loader import BatchLoader, Position
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.spec import CostModel
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.policy.policy import Policy, ShardedBatch
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import write_text
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.files import RunFiles
from nemo_like.training.groups import WorkersStart
from nemo_like.training.microbatches import limit_metrics
from nemo_like.training.reporting import (
    StepWork,
    full_length_metrics,
    image_metrics,
    throughput_metrics,
)
from nemo_like.training.run_data import loader_metrics
from nemo_like.training.saving import export_model
from nemo_like.training.step_log import StepLog
from nemo_like.training.stopping import RunStopped, StopRequests
from nemo_like.training.workers import RunWorkers

if TYPE_CHECKING:
    # A run without rollouts needs neither generation nor environments.
    from nemo_like.training.rollout_run import RolloutRun

logger = logging.getLogger(__name__)
Value = TypeVar("Value")


@dataclass(frozen=True)
class RunResult:
    """Paths and metrics of a finished run."""

    directory: RunDirectory
    step: int
    last: dict[str, float]
    """The last value of every metric."""
    first: dict[str, float]
    """The first value of every metric."""
    export: Path | None
    """The Hugging Face model, if one was exported."""


@dataclass(kw_only=True)
class TrainingRun:
    """One open run: `log_step` and `save_if_due` per step, then `finalize`."""

    settings: WorkersStart
    logger: LoggerConfig
    files: RunFiles
    log: StepLog
    workers: RunWorkers
    encoder: ChatEncoder
    progress: Progress
    stop: StopRequests
    step: int
    """Steps done when the run was opened: the step of the checkpoint that it continues."""
    sampling: RolloutRun | None
    """None in a run that samples no completions."""
    num_skipped_in_a_row: int = 0
    """Longest sequence of skipped optimizer steps that ends in the latest step; see
    `skipped_steps`."""

    @property
    def policy(self) -> Policy:
        return self.workers.policy

    @property
    def rollouts(self) -> RolloutRun:
        """What samples completions. Raises RuntimeError in a run that samples none."""
        if self.sampling is None:
            raise RuntimeError("this run was started without a generator and reward workers")
        return self.sampling

    def plan_and_shard(
        self, batch: BatchedDataDict, step: int, plan: BatchPlan | None = None
    ) -> tuple[BatchPlan, ShardedBatch]:
        """Plan the batch from its numbers of tokens; send each data-parallel rank its rows once.

        A `plan` that the loader made is used as it is.
        """
        if plan is None:
            with self.log.timers("plan"):
                plan = self.policy.plan_rows(batch)
        # In GRPO the rollout is complete here, so a checkpoint is not kept waiting for the step.
        self.files.saver.publish_if_written()
        if step == 0:
            write_text(self.files.directory.plan(step), plan.to_json() + "\n")
            self.progress.print_line(f"first batch: {plan}")
        # For `nemo-like plan --metrics`, which plans the steps of a past run again.
        counts = self.policy.count_tokens(batch, with_prefixes=False)
        counts = replace(counts, prefixes=plan.prefixes)
        record = {"step": step + 1, **counts.to_dict()}
        if "episode" in batch:
            record["episode"] = batch["episode"].tolist()
        self.files.lengths.append_json(record, f"the row lengths of step {step + 1}")
        self.log.add(image_metrics(batch.get("images", ())))
        with self.log.timers("shard"):
            sharded = self.policy.shard(batch, plan)
        return plan, sharded

    def show_rows(self, loader: BatchLoader[EncodedRow]) -> None:
        """Print the first rows of the file, decoded, with their trained tokens highlighted."""
        rows = loader.first_rows(self.logger.num_samples_shown)
        samples = [Sample(self.encoder.segments(row)) for row in rows]
        self.show_training_samples(samples)

    def show_training_samples(self, samples: Sequence[Sample]) -> None:
        """Print training rows, and log them with the next step."""
        self.progress.show_samples(samples, "training row")
        self.log.media.samples["samples/training_rows"] = samples

    def next_rows(self, loader: BatchLoader[Value]) -> list[Value]:
        """Return the next batch; `timing/data_wait_s` is the wait for its encoding."""
        with self.log.timers("data_wait"):
            rows = next(loader)
        self.log.add(loader_metrics(loader))
        return rows

    def log_step(self, step: int, work: StepWork) -> None:
        """Log the added metrics, the timings and the throughput of the step that just ended."""
        self.log.counters["num_tokens"] += float(work.lengths.sum())
        self.log.counters["num_rows"] += float(len(work.lengths))
        self.log.media.add_histogram("histograms/row_length", work.lengths)
        self.log.media.add_histogram("histograms/trained_length", work.num_trained)
        device = self.policy.device_info
        throughput = throughput_metrics(
            work,
            CostModel.from_spec(self.policy.model),
            self.log.timers,
            peak_flops=device.peak_flops,
            num_workers=self.policy.group.world_size,
            has_frozen_weights=self.settings.policy.adapter is not None,
        )
        self.log.add(throughput | full_length_metrics(work, self.settings.policy))
        self.log.add(limit_metrics(self.settings.policy))
        self.log.add(self.log.timers.pop())
        if self.files.saver.uploader is not None:
            self.log.add(self.files.saver.uploader.metrics)
        self.log.report_start()
        self.log.write(step)

    def save_if_due(self, step: int, position: Position, *, is_last: bool) -> None:
        """Save a checkpoint if this step is due; its time is the next step's `timing/checkpoint_s`.

        The step with the best metric of `checkpointing.keep_best` is always due. `position` is the
        loader, or its position after the rows of `step`. With `is_last` this waits until the
        checkpoint is written; otherwise, with `checkpointing.async_save`, it may be written during
        the following steps. Call it after every step: it also publishes the earlier checkpoint.
        Raises CheckpointError.
        """
        with self.progress.phase("saving"):
            self.files.save_if_due(
                step,
                position,
                self.log.counters,
                is_last=is_last or self.stops_early,
                # While steps are skipped the weights may be useless: older checkpoints are kept.
                prunes=self.num_skipped_in_a_row == 0,
            )

    @property
    def stops_early(self) -> bool:
        """True if `early_stopping` ends the run after the step that was logged last."""
        return self.files.selection.stops

    def stop_if_requested(self, step: int, position: Position) -> None:
        """After a stop request, save a checkpoint of `step` and raise RunStopped."""
        reason = self.stop.reason
        if reason is None:
            return
        if step > 0:
            self.save_if_due(step, position, is_last=True)
        hint = "there is no checkpoint"
        if self.files.checkpointer.latest_path.exists():
            hint = "resume=true continues the run"
        raise RunStopped(f"stopped by {reason} after step {step}: {hint}", self.stop.exit_code)

    def finalize(self, step: int) -> RunResult:
        """Export the model if configured and return the result of the run.

        Raises RunStopped after a stop request if there is an export to write: it can take longer
        than the time that a scheduler grants after a signal.
        """
        exports = self.files.checkpointing.export_hf
        if self.stop.reason is not None and exports:
            raise RunStopped(
                f"stopped by {self.stop.reason} after the last step, {step}: resume=true writes"
                " the export",
                self.stop.exit_code,
            )
        self.stop.finish_steps(enabled=False)
        for line in self.files.selection.summary():
            self.progress.print_line(line)
        export = None
        if exports:
            export = export_model(
                self.files.directory,
                self.workers,
                self.progress,
                with_ema=self.settings.policy.ema.enabled,
            )
            if self.files.saver.uploader is not None:
                exports = (self.files.directory.hf, self.files.directory.hf_ema)
                self.files.saver.uploader.submit([path for path in exports if path.is_dir()])
        self.files.log_file.check()
        text = f"done: {counted(step, 'step')}, run directory {self.files.directory.path}"
        if export is not None:
            text += f", model {export}"
        self.progress.print_line(text)
        self.files.log_file.note(text)
        return RunResult(self.files.directory, step, self.log.last, self.log.first, export)


def check_workers(
    encoder: ChatEncoder, workers: RunWorkers, progress: Progress, *, shared: Path | None
) -> None:
    """Check chat template, the `shared` directory and row isolation before the first step.

    Raises ConfigError, or WorkerError for a model whose packed rows see each other.
    """
    difference = encoder.prompt_difference()
    if difference is not None:
        logger.warning("the chat template makes rollouts and SFT rows differ: %s", difference)
    if shared is not None:
        workers.policy.check_shared_directory(shared)
    with (
        progress.phase("checking that rows are isolated", unit="checks"),
        workers.policy_onloaded(),
    ):
        # A kernel that attends across rows would train without an error, and wrongly.
        workers.policy.probe_isolation()
