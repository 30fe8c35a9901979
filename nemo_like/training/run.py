"""The parts that every training run shares: directory, workers, resume, checkpoints and logging.

The loops are in `algorithms`, one package per job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from nemo_like.config.errors import counted
from nemo_like.config.load import to_dict
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.columns import num_trained_tokens
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.loader import BatchLoader, Position
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.spec import CostModel
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.metrics import Metrics, Sum, Timers, metric_values, start_timers
from nemo_like.policy.checkpoint.sharded_reader import checkpoint_problem
from nemo_like.policy.optim import resolve_decay_steps
from nemo_like.policy.policy import Policy, ShardedBatch
from nemo_like.rollout.collector import RolloutCollector, RolloutJob
from nemo_like.rollout.rows import Rollout
from nemo_like.run.checkpoint import Checkpoint, Checkpointer, TrainingState
from nemo_like.run.directory import (
    RunDirectory,
    log_config_changes,
    open_run_directory,
    start_run_directory,
    write_config,
)
from nemo_like.run.files import AppendedFile, write_text
from nemo_like.run.progress import Progress, Sample
from nemo_like.run.sinks import Media
from nemo_like.run.tracking import RunLog, Tracker, check_logger, run_log
from nemo_like.training.health import Health
from nemo_like.training.model_files import check_frozen_models, frozen_models, open_model_spec
from nemo_like.training.parity_check import ParityCheck
from nemo_like.training.reporting import (
    StepWork,
    full_length_metrics,
    header_lines,
    new_counters,
    start_line,
    start_warnings,
    step_line,
    step_note,
    throughput_metrics,
)
from nemo_like.training.rollout_workers import open_collector
from nemo_like.training.run_data import RunData, load_position, loader_metrics
from nemo_like.training.saving import CheckpointSaver, Selection, export_model, policy_directory
from nemo_like.training.stopping import RunStopped, StopRequests, stop_requests
from nemo_like.training.weights import GeneratorWeights
from nemo_like.training.workers import RunWorkers, start_workers

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


@dataclass
class TrainingRun:
    """One open run: `resume` once, `log_step` and `save_if_due` per step, then `finalize`."""

    config: RunConfig
    directory: RunDirectory
    checkpointer: Checkpointer
    resumed: Checkpoint | None
    """The checkpoint that the run continues; None if it starts at step 0."""
    progress: Progress
    encoder: ChatEncoder
    num_steps: int | None
    """Steps of the run, for its output; None if it does not know them in advance."""
    workers: RunWorkers
    log_file: RunLog
    closing: ExitStack
    """Closes what `resume` opens."""
    resolved: dict[str, Any]
    """The configuration as plain values, for config.yaml and the trackers."""
    stop: StopRequests
    frozen_models: dict[str, str]
    """Identities of frozen models by config key, for checkpoints."""
    timers: Timers = field(default_factory=Timers)
    pending_metrics: Metrics = field(default_factory=dict)
    """Metrics of the step that is logged next."""
    media: Media = field(default_factory=Media)
    """Samples and distributions of the same step."""
    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    saver: CheckpointSaver = field(init=False)
    selection: Selection = field(init=False)
    health: Health = field(init=False)
    findings: AppendedFile = field(init=False)
    tracker: Tracker = field(init=False)
    lengths: AppendedFile = field(init=False)
    counters: dict[str, float] = field(default_factory=new_counters)
    last_logged_s: float = field(default_factory=time.monotonic)
    opened_s: float = field(default_factory=time.monotonic)
    num_skipped_in_a_row: int = 0
    """Longest sequence of skipped optimizer steps that ends in the latest step; see
    `steps`."""

    def __post_init__(self) -> None:
        self.saver = CheckpointSaver(self.checkpointer, self.workers, self.timers)
        self.selection = Selection(self.config.checkpointing, self.config.early_stopping)
        self.health = Health(self.config.health, self.resolved)

    @property
    def policy(self) -> Policy:
        return self.workers.policy

    def resume(self, loader: BatchLoader) -> int:
        """Restore policy and loader from the checkpoint, open the logs, and return the step.

        The step is 0 without a checkpoint. Files of an existing run first change here, after every
        check that can refuse the run. Raises CheckpointError for a damaged checkpoint.
        """
        resumed_step = None
        if self.resumed is not None:
            resumed_step = self._load(self.resumed, loader)
        elif self.config.resume:
            self.progress.print_line(
                f"resume: no checkpoint in {self.checkpointer.path}, so the run starts at step 0"
            )
        # The policy and the loader accepted the checkpoint, so files may change now.
        start_run_directory(self.directory, self.resolved, resumed_step)
        # A kill may have come between `latest` and `best`, or the run went back to an older step.
        self.checkpointer.set_best(self.selection.best_step)
        tracker = Tracker(
            self.directory,
            self.config.logger,
            self.resolved,
            resumed_step=resumed_step,
            show=self._show_step,
        )
        self.tracker = self.closing.enter_context(tracker)
        if self.workers.rollout_workers is not None and resumed_step is None:
            with self.workers.policy_onloaded():
                adapter = self.config.policy.adapter
                if adapter is not None and (adapter.adapter_path or adapter.is_quantized):
                    # The generator has loaded the model without the adapter, and not in 4 bits.
                    self.sync_weights(0)
                else:
                    # Both sides have loaded the same model; a resume checks the first update.
                    self.generator_weights.start_check()
        self.lengths = AppendedFile(self.directory.lengths)
        self.closing.callback(self.lengths.close)
        self.findings = AppendedFile(self.directory.health)
        self.closing.callback(self.findings.close)
        # From here on a signal waits for the end of a step, so that the step can be saved.
        self.stop.finish_steps(enabled=True)
        return resumed_step or 0

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a step, and what the health rules find in it."""
        line = step_line(self.config.kind, step, self.num_steps, metrics)
        is_validated = any(name.startswith("validation/") for name in metrics)
        self.progress.show_step(line, note=step_note(metrics), always=is_validated)
        self.stop.unhealthy = self.health.report(step, metrics, self.findings)

    def _load(self, checkpoint: Checkpoint, loader: BatchLoader) -> int:
        """Restore policy, loader and counters; return the step of the checkpoint."""
        state = checkpoint.state()
        with self.progress.phase(f"loading step {state.step}"), self.workers.policy_onloaded():
            self.policy.load(policy_directory(checkpoint.path))
        allow_changed_rows = self.config.data.allow_changed_rows
        if not load_position(checkpoint, loader, allow_changed_rows=allow_changed_rows):
            self.progress.print_line(
                "resume: the training rows changed since the checkpoint; the run continues in epoch"
                f" {loader.epoch + 1} with the new rows (data.allow_changed_rows)"
            )
        self.counters = dict(state.counters)
        self.selection.load_state_dict(state.selection)
        self.progress.print_line(f"resumed from {checkpoint.path}")
        return state.step

    @cached_property
    def rollouts(self) -> RolloutCollector:
        """Drives generation, the environment and rewards."""
        return open_collector(self.config, self.workers.rollout, self.encoder)

    @cached_property
    def generator_weights(self) -> GeneratorWeights:
        """Keeps the generator's weights equal to the policy's."""
        return GeneratorWeights(
            self.config.policy,
            self.config.cluster,
            self.policy,
            self.workers.rollout.generator,
            self.timers,
            self.progress.print_line,
        )

    def sync_weights(self, version: int) -> None:
        """Copy the policy's weights to the generator, whose completions then carry `version`.

        The version is the number of steps done. Call inside `workers.policy_onloaded()`.
        """
        self.add_metrics(self.generator_weights.update(version))

    @contextmanager
    def generating(self, *, updates_next: bool = False) -> Iterator[None]:
        """Keep the generator on its devices inside the block, with verified weights.

        `updates_next` tells that `sync_weights` is called before the generator is used again.
        """
        with self.workers.generator_onloaded(discards_weights=updates_next):
            self.add_metrics(self.generator_weights.verify())
            yield

    def add_generator_metrics(self) -> None:
        """Add the counters of the generator since the last call; not while it runs in a thread."""
        now = time.monotonic()
        generator = self.workers.rollout.generator
        self.add_metrics(generator.pop_metrics(now - self.last_logged_s))
        self.last_logged_s = now

    def finish_rollout(self, job: RolloutJob) -> Rollout:
        """Generate and score until `job` is done. Restarted replicas get the current weights."""
        generator = self.workers.rollout.generator
        while not job.is_done:
            if generator.replicas_without_weights:
                # The policy must not be loaded beside a generator on the same devices.
                with self.workers.generator_offloaded(), self.workers.policy_onloaded():
                    replicas = generator.replicas_without_weights
                    self.generator_weights.update(generator.version, replicas)
                self.add_metrics(self.generator_weights.verify())
            self.rollouts.advance()
        reward_models = self.workers.rollout.reward_models
        if reward_models is not None:
            with self.timers("reward_model"), self.workers.reward_models_alone():
                reward_models.score(job, [row.sample() for row in job.rows])
            self.add_metrics(reward_models.pop_metrics())
        return job.result()

    def plan_and_shard(
        self, batch: BatchedDataDict, step: int, plan: BatchPlan | None = None
    ) -> tuple[BatchPlan, ShardedBatch]:
        """Plan the batch from its numbers of tokens; send each data-parallel rank its rows once.

        A `plan` that the loader made is used as it is.
        """
        if plan is None:
            with self.timers("plan"):
                plan = self.policy.plan_rows(batch)
        # In GRPO the rollout is complete here, so a checkpoint is not kept waiting for the step.
        self.saver.publish_if_written()
        if step == 0:
            write_text(self.directory.plan(step), plan.to_json() + "\n")
            self.progress.print_line(f"first batch: {plan}")
        # For `nemo-like plan --metrics`, which plans the steps of a past run again.
        counts = TokenCounts(batch["length"], num_trained_tokens(batch), plan.prefixes)
        record = {"step": step + 1, **counts.to_dict()}
        self.lengths.append_json(record, f"the row lengths of step {step + 1}")
        with self.timers("shard"):
            sharded = self.policy.shard(batch, plan)
        return plan, sharded

    def show_rows(self, loader: BatchLoader[EncodedRow]) -> None:
        """Print the first rows of the file, decoded, with their trained tokens highlighted."""
        rows = loader.first_rows(self.config.logger.num_samples_shown)
        samples = [Sample(self.encoder.segments(row)) for row in rows]
        self.show_training_samples(samples)

    def show_training_samples(self, samples: Sequence[Sample]) -> None:
        """Print training rows, and log them with the next step."""
        self.progress.show_samples(samples, "training row")
        self.media.samples["samples/training_rows"] = samples

    def next_rows(self, loader: BatchLoader[Value]) -> list[Value]:
        """Return the next batch; `timing/data_wait_s` is the wait for its encoding."""
        with self.timers("data_wait"):
            rows = next(loader)
        self.add_metrics(loader_metrics(loader))
        return rows

    def add_metrics(self, metrics: Metrics) -> None:
        """Add metrics to the record of the step that is logged next."""
        self.pending_metrics |= metrics

    def log_step(self, step: int, work: StepWork) -> None:
        """Log the added metrics, the timings and the throughput of the step that just ended."""
        self.counters["num_tokens"] += float(work.lengths.sum())
        self.counters["num_rows"] += float(len(work.lengths))
        self.media.add_histogram("histograms/row_length", work.lengths)
        self.media.add_histogram("histograms/trained_length", work.num_trained)
        device = self.policy.device_info
        throughput = throughput_metrics(
            work,
            CostModel.from_spec(self.policy.model),
            self.timers,
            peak_flops=device.peak_flops,
            num_workers=self.policy.group.world_size,
            has_frozen_weights=self.config.policy.adapter is not None,
        )
        self.add_metrics(throughput | full_length_metrics(work, self.config.policy))
        self.add_metrics(self.timers.pop())
        self._report_start()
        self.log_metrics(step)

    def _report_start(self) -> None:
        """Log and print the phases from the command to the end of the first step; once."""
        phases = start_timers.pop()
        if not phases:
            return
        phases["timing/start_first_step_s"] = Sum(time.monotonic() - self.opened_s)
        self.add_metrics(phases)
        self.progress.print_line(start_line(metric_values(phases)))

    def log_metrics(self, step: int) -> None:
        """Log the added metrics as the one record of `step`."""
        if not self.pending_metrics:
            return
        values = metric_values(self.pending_metrics)
        for name, total in self.counters.items():
            values[f"progress/{name}"] = total
        self.pending_metrics = {}
        # A log that cannot be written stops the run here, and not silently.
        self.log_file.check()
        self.tracker.log(step, values, self.media)
        self.media = Media()
        self.last |= values
        self.first = values | self.first
        self.selection.observe(step, values)

    def save_if_due(self, step: int, position: Position, *, is_last: bool) -> None:
        """Save a checkpoint if this step is due; its time is the next step's `timing/checkpoint_s`.

        The step with the best metric of `checkpointing.keep_best` is always due. `position` is the
        loader, or its position after the rows of `step`. With `is_last` this waits until the
        checkpoint is written; otherwise, with `checkpointing.async_save`, it may be written during
        the following steps. Call it after every step: it also publishes the earlier checkpoint.
        Raises CheckpointError.
        """
        is_last = is_last or self.stops_early
        is_best = self.selection.is_best(step)
        if is_last:
            # First, because the pending checkpoint may be of this step.
            self.saver.finish()
        else:
            self.saver.publish_if_written()
        if self.checkpointer.should_save(step, is_last=is_last, is_best=is_best):
            in_background = self.config.checkpointing.async_save and not is_last
            self._save(step, position, in_background=in_background)

    def _save(self, step: int, position: Position, *, in_background: bool) -> None:
        """Save the checkpoint of `step`, whose metrics are logged. Raises CheckpointError."""
        # A resume removes the log records after the checkpoint's step. It must find those before,
        # so they are on disk first.
        self.tracker.sync()
        self.lengths.sync()
        self.findings.sync()
        # While steps are skipped the weights may already be useless: older checkpoints are kept.
        prunes = self.num_skipped_in_a_row == 0
        state = TrainingState(
            step=step,
            loader=position.state_dict(),
            counters=dict(self.counters),
            selection=self.selection.state_dict(),
            model=self.frozen_models,
        )
        self.saver.save(
            state, prunes=prunes, in_background=in_background, is_best=self.selection.is_best(step)
        )

    @property
    def stops_early(self) -> bool:
        """True if `early_stopping` ends the run after the step that was logged last."""
        return self.selection.stops

    def stop_if_requested(self, step: int, position: Position) -> None:
        """After a stop request, save a checkpoint of `step` and raise RunStopped."""
        reason = self.stop.reason
        if reason is None:
            return
        if step > 0:
            self.save_if_due(step, position, is_last=True)
        hint = "there is no checkpoint"
        if self.checkpointer.latest_path.exists():
            hint = "resume=true continues the run"
        raise RunStopped(f"stopped by {reason} after step {step}: {hint}", self.stop.exit_code)

    def finalize(self, step: int) -> RunResult:
        """Export the model if configured and return the result of the run.

        Raises RunStopped after a stop request if there is an export to write: it can take longer
        than the time that a scheduler grants after a signal.
        """
        exports = self.config.checkpointing.export_hf
        if self.stop.reason is not None and exports:
            raise RunStopped(
                f"stopped by {self.stop.reason} after the last step, {step}: resume=true writes"
                " the export",
                self.stop.exit_code,
            )
        self.stop.finish_steps(enabled=False)
        for line in self.selection.summary():
            self.progress.print_line(line)
        export = None
        if exports:
            export = export_model(
                self.directory, self.workers, self.progress, with_ema=self.config.policy.ema.enabled
            )
        self.log_file.check()
        text = f"done: {counted(step, 'step')}, run directory {self.directory.path}"
        if export is not None:
            text += f", model {export}"
        self.progress.print_line(text)
        self.log_file.note(text)
        return RunResult(self.directory, step, self.last, self.first, export)


@contextmanager
def open_training_run(
    config: RunConfig, data: RunData, *, num_steps: int | None, num_optimizer_steps: int | None
) -> Iterator[TrainingRun]:
    """Lock the run directory, find the checkpoint, and start and check the workers.

    The numbers of steps are None if the run does not know them in advance. Everything closes with
    the block. Raises ConfigError or CheckpointError if the run cannot start; no file of an existing
    run has changed then, because files change in `TrainingRun.resume`.
    """
    plain = to_dict(config)
    # The directory keeps the config as the user wrote it, without the resolved steps.
    config = replace(config, policy=resolve_decay_steps(config.policy, num_optimizer_steps))
    progress = Progress(verbose=config.logger.verbose)
    with (
        stop_requests(config.cluster.time_limit) as stop,
        open_run_directory(config.output_dir, config.run_name, resume=config.resume) as directory,
        run_log(directory.logs / "driver.log") as log_file,
        ExitStack() as closing,
    ):
        log_file.note_start()
        checkpointer = Checkpointer(directory.path, config.checkpointing)
        check_logger(config.logger)
        for warning in start_warnings(config, data.encoder, num_optimizer_steps):
            logger.warning(warning)  # on the console and in driver.log
        spec = open_model_spec(config)
        for line in header_lines(config, directory.path, spec, len(data.train), num_steps):
            progress.print_line(line)
        identities = frozen_models(config)
        resumed = None
        if config.resume:
            resumed = checkpointer.find_latest(lambda p: checkpoint_problem(policy_directory(p)))
            if resumed is not None:
                check_frozen_models(resumed.state().model, identities, config, resumed.path)
            # config.yaml itself is replaced in `start_run_directory`, after the last check.
            log_config_changes(directory, plain)
        else:
            write_config(directory, plain)
        parity = ParityCheck(config.policy, config.parallel, config.cluster, closing)
        with start_workers(
            config, progress, logs=directory.logs / "ray", end_token_ids=data.encoder.end_token_ids
        ) as workers:
            check_workers(config, data.encoder, workers, directory, progress)
            parity.finish(progress)
            run = TrainingRun(
                config=config,
                directory=directory,
                checkpointer=checkpointer,
                resumed=resumed,
                progress=progress,
                encoder=data.encoder,
                num_steps=num_steps,
                workers=workers,
                log_file=log_file,
                closing=closing,
                resolved=plain,
                stop=stop,
                frozen_models=identities,
            )
            try:
                yield run
            except Exception as error:
                run.saver.finish_after_error(error)
                raise
            finally:
                for line in run.health.advice():
                    progress.print_line(line)


def check_workers(
    config: RunConfig,
    encoder: ChatEncoder,
    workers: RunWorkers,
    directory: RunDirectory,
    progress: Progress,
) -> None:
    """Check chat template, shared directory and row isolation before the first step.

    Raises ConfigError, or WorkerError for a model whose packed rows see each other.
    """
    difference = encoder.prompt_difference()
    if difference is not None:
        logger.warning("the chat template makes rollouts and SFT rows differ: %s", difference)
    if config.checkpointing.enabled or config.checkpointing.export_hf:
        workers.policy.check_shared_directory(directory.path)
    with (
        progress.phase("checking that rows are isolated", unit="checks"),
        workers.policy_onloaded(),
    ):
        # A kernel that attends across rows would train without an error, and wrongly.
        workers.policy.probe_isolation()
