"""What every run shares: its directory, its workers, resume, saving and logging. The loops are in
`sft` and `grpo`.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from nemo_like.checkpoint import Checkpoint, Checkpointer, CheckpointError, TrainingState
from nemo_like.config.errors import ConfigError
from nemo_like.config.load import to_dict
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.loader import RowLoader
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.files import AppendedFile, remove_link, reporting_write_errors, write_text
from nemo_like.metrics import Mean, Metrics, Sum, Timers, metric_values
from nemo_like.policy.checkpoint.sharded import checkpoint_problem
from nemo_like.policy.optim import resolve_decay_steps
from nemo_like.policy.policy import Policy, ShardedBatch
from nemo_like.progress import Progress, Sample
from nemo_like.run_directory import (
    RunDirectory,
    log_config_changes,
    open_run,
    start_run,
    write_config,
)
from nemo_like.run_log import RunLog, run_log
from nemo_like.tracking import Tracker, check_logger
from nemo_like.training.run_warnings import precision_warnings
from nemo_like.training.stopping import RunStopped, StopRequests, stop_requests
from nemo_like.training.throughput import throughput_metrics
from nemo_like.training.workers import RunWorkers, start_workers
from nemo_like.weight_sync.transport import push

logger = logging.getLogger(__name__)
Value = TypeVar("Value")


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves behind."""

    run: RunDirectory
    step: int
    last: dict[str, float]
    """The last value of every metric."""
    first: dict[str, float]
    """The first value of every metric."""
    export: Path | None
    """The Hugging Face model, if one was exported."""


@dataclass
class Job:
    """One open run. `begin` once, then per step `log_step` and `save_if_due`, then `finish`."""

    config: RunConfig
    run: RunDirectory
    checkpointer: Checkpointer
    resumed: Checkpoint | None
    progress: Progress
    encoder: ChatEncoder
    workers: RunWorkers
    log_file: RunLog
    closing: ExitStack
    """Closes what `begin` opens."""
    resolved: dict[str, Any]
    """The configuration as plain values, for config.yaml and the trackers."""
    stop: StopRequests
    timers: Timers = field(default_factory=Timers)
    pending: Metrics = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    tracker: Tracker = field(init=False)
    lengths: AppendedFile = field(init=False)
    counters: dict[str, float] = field(default_factory=lambda: {"num_tokens": 0.0, "num_rows": 0.0})
    num_skipped_in_a_row: int = 0
    """Optimizer steps skipped one after the other, up to the latest step; see `skipped`."""

    @property
    def policy(self) -> Policy:
        return self.workers.policy

    def begin(self, loader: RowLoader) -> int:
        """The step to start from: 0, or that of the checkpoint, with policy and loader restored.

        The first change to the files of an existing run happens here, after everything that can
        refuse it has passed.
        """
        step = 0
        if self.resumed is not None:
            state = self.resumed.state()
            step = state.step
            with self.progress.phase(f"loading step {step}"), self.workers.policy_onloaded():
                self.policy.load(self.resumed.path / "policy")
            try:
                loader.load_state_dict(state.loader)
            except (KeyError, TypeError, AttributeError) as error:
                raise CheckpointError(
                    f"{self.resumed.path} has a damaged position of the data loader: {error!r}"
                ) from error
            self.counters.update(state.counters)
            self.progress.say(f"resumed from {self.resumed.path}")
        elif self.config.resume:
            self.progress.say(
                f"resume: no checkpoint in {self.checkpointer.path}, so the run starts at step 0"
            )
        resumed_step = None if self.resumed is None else step
        start_run(self.run, self.resolved, resumed_step)
        tracker = Tracker(
            self.run,
            self.config.logger,
            self.resolved,
            resumed_step=resumed_step,
            show=self.progress.show_step,
        )
        self.tracker = self.closing.enter_context(tracker)
        self.lengths = AppendedFile(self.run.lengths)
        self.closing.callback(self.lengths.close)
        self.stop.finish_steps(enabled=True)
        return step

    def sync_weights(self, version: int) -> None:
        """Push the policy's weights to the generator; its completions carry `version` afterwards.

        The version of a run's weights is the number of steps done. Call inside
        `workers.policy_onloaded()`.
        """
        assert self.workers.generator is not None, "only a run that generates has a generator"
        push(self.policy.group, self.workers.generator.group, version)

    def plan_and_shard(self, batch: BatchedDataDict, step: int) -> tuple[BatchPlan, ShardedBatch]:
        """Plan the batch from its lengths and send each dp rank its rows, once."""
        with self.timers("plan"):
            plan = self.policy.plan(batch["length"])
        if step == 0:
            write_text(self.run.plan(step), plan.to_json() + "\n")
            self.progress.say(str(plan))
        record = {"step": step + 1, "lengths": batch["length"].tolist()}
        self.lengths.append_json(record, f"the row lengths of step {step + 1}")
        with self.timers("shard"):
            sharded = self.policy.shard(batch, plan)
        return plan, sharded

    def show_rows(self, loader: RowLoader[EncodedRow]) -> None:
        """The first rows of the file, decoded, with what is trained made visible."""
        rows = loader.first_rows(self.config.logger.num_samples_shown)
        self.progress.show_samples(
            [Sample(self.encoder.segments(row)) for row in rows], "training row"
        )

    def next_rows(self, loader: RowLoader[Value], step: int) -> list[Value]:
        """Return the batch after `step`; how long the run waited for its encoding is logged.

        Raises ConfigError for a bad row, after a checkpoint of `step`: rows that the run has not
        reached may be corrected, so that a resume loses nothing.
        """
        try:
            with self.timers("data_wait"):
                rows = next(loader)
        except ConfigError as error:
            if step == 0 or not self.config.checkpointing.enabled:
                raise
            self.save_if_due(step, loader, is_last=True)
            raise ConfigError(
                f"{error}. The run stopped after step {step} and saved it: resume=true continues"
                f" with the corrected file"
            ) from error
        self.note({"data/epoch": Mean(loader.epoch), "data/num_dropped": Sum(loader.num_dropped)})
        return rows

    def note(self, metrics: Metrics) -> None:
        """Keep metrics for the line of the step that is about to be logged."""
        self.pending |= metrics

    def log_step(self, step: int, lengths: np.ndarray, *, num_logprob_passes: int = 0) -> None:
        """Log everything noted, the timings and the throughput of the step that just ended."""
        self.counters["num_tokens"] += float(lengths.sum())
        self.counters["num_rows"] += float(len(lengths))
        info = self.policy.info
        self.note(
            throughput_metrics(
                lengths,
                info.cost,
                self.timers,
                peak_flops=info.peak_flops,
                num_workers=info.num_workers,
                num_logprob_passes=num_logprob_passes,
            )
        )
        self.note(self.timers.pop())
        self.log(step)

    def log(self, step: int) -> None:
        """Log everything noted so far as the one record of `step`."""
        if not self.pending:
            return
        values = metric_values(self.pending)
        values |= {f"progress/{name}": total for name, total in self.counters.items()}
        self.pending = {}
        self.log_file.check()
        self.tracker.log(step, values)
        self.last |= values
        self.first = values | self.first

    def save_if_due(self, step: int, loader: RowLoader, *, is_last: bool) -> None:
        """Write a checkpoint if this step is due; its time counts to the next step's
        `timing/checkpoint_s`.
        """
        if self.checkpointer.should_save(step, is_last=is_last):
            self.save(step, loader)

    def save(self, step: int, loader: RowLoader) -> None:
        """Write the checkpoint of `step`, whose metrics were logged. Raises CheckpointError."""
        self.tracker.sync()
        self.lengths.sync()
        # While steps are skipped the weights may already be useless: older checkpoints are kept.
        prunes = self.num_skipped_in_a_row == 0
        with (
            self.timers("checkpoint"),
            self.workers.policy_onloaded(),
            self.checkpointer.writing(step, prunes=prunes) as checkpoint,
        ):
            checkpoint.add("policy", self.policy.save(checkpoint.path / "policy"))
            TrainingState(step=step, loader=loader.state_dict(), counters=dict(self.counters)).save(
                checkpoint.path
            )

    def stop_if_requested(self, step: int, loader: RowLoader) -> None:
        """After a stop request, save a checkpoint of `step` and raise RunStopped."""
        reason = self.stop.reason
        if reason is None:
            return
        if step > 0:
            self.save_if_due(step, loader, is_last=True)
        saved = self.checkpointer.latest_path.exists()
        then = "resume=true continues the run" if saved else "there is no checkpoint"
        raise RunStopped(f"stopped by {reason} after step {step}: {then}", self.stop.exit_code)

    def finish(self, step: int) -> RunResult:
        """Export the model and say where everything is. Raises RunStopped instead after a stop
        request.
        """
        if self.stop.reason is not None and self.config.checkpointing.export_hf:
            raise RunStopped(
                f"stopped by {self.stop.reason} after the last step, {step}: resume=true writes"
                f" the export",
                self.stop.exit_code,
            )
        self.stop.finish_steps(enabled=False)
        export = None
        if self.config.checkpointing.export_hf:
            export = self.run.hf
            unfinished = export.with_name("hf.unfinished")
            with reporting_write_errors(export, "the exported model"):
                remove_link(unfinished)
                shutil.rmtree(unfinished, ignore_errors=True)
                with self.progress.phase("exporting"), self.workers.policy_onloaded():
                    self.policy.export_hf(unfinished)
                shutil.rmtree(export, ignore_errors=True)
                unfinished.rename(export)
        self.log_file.check()
        self.progress.say(
            f"done: {step} steps, run directory {self.run.path}"
            + (f", model {export}" if export else "")
        )
        return RunResult(self.run, step, self.last, self.first, export)


def plan_metrics(plan: BatchPlan) -> Metrics:
    """How well the step's rows were packed and balanced."""
    return {name: Mean(value) for name, value in plan.metrics().items()}


@contextmanager
def open_job(
    config: RunConfig,
    encoder: ChatEncoder,
    *,
    generates: bool,
    needs_reference: bool,
    num_steps: int,
    num_optimizer_steps: int,
) -> Iterator[Job]:
    """Lock the run directory, find the checkpoint, start the workers and check them; everything
    closes with the block.

    Raises ConfigError or CheckpointError where the run cannot start. Nothing of an existing run has
    changed then: its files change in `Job.begin`.
    """
    plain = to_dict(config)
    config = replace(config, policy=resolve_decay_steps(config.policy, num_optimizer_steps))
    progress = Progress(num_steps=num_steps)
    with (
        stop_requests(config) as stop,
        open_run(config.output_dir, config.run_name, resume=config.resume) as run,
        run_log(run.logs / "driver.log") as log_file,
        ExitStack() as closing,
    ):
        logger.info(
            "process %d on host %s starts, resume=%s",
            os.getpid(),
            socket.gethostname(),
            config.resume,
        )
        checkpointer = Checkpointer(run.path, config.checkpointing)
        check_logger(config.logger)
        for warning in precision_warnings(config):
            logger.warning(warning)  # on the console and in driver.log
        resumed = None
        if config.resume:
            resumed = checkpointer.find_latest(lambda folder: checkpoint_problem(folder / "policy"))
            log_config_changes(run, plain)
        else:
            write_config(run, plain)
        with start_workers(
            config,
            progress,
            generates=generates,
            needs_reference=needs_reference,
            logs=run.logs / "ray",
            end_token_ids=encoder.end_token_ids,
        ) as workers:
            difference = encoder.prompt_difference()
            if difference is not None:
                logger.warning(
                    "the chat template makes rollouts and SFT rows differ: %s", difference
                )
            if config.checkpointing.enabled or config.checkpointing.export_hf:
                workers.policy.check_shared_directory(run.path)
            with (
                progress.phase("checking that packed rows cannot see each other", unit="checks"),
                workers.policy_onloaded(),
            ):
                workers.policy.probe_isolation()
            yield Job(
                config,
                run,
                checkpointer,
                resumed,
                progress,
                encoder,
                workers,
                log_file,
                closing,
                resolved=plain,
                stop=stop,
            )
