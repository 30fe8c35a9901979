"""Opens the data and the run of any job: the only place that takes a complete configuration apart.

The functions of `training` get sections of it, and what the job needs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_like.config.plain import to_dict
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.loader import BatchLoader
from nemo_like.metrics import Timers
from nemo_like.policy.checkpoint.sharded_reader import checkpoint_problem
from nemo_like.policy.optim import resolve_decay_steps
from nemo_like.run.checkpoint import Checkpoint, Checkpointer, TrainingState
from nemo_like.run.directory import (
    RunDirectory,
    log_config_changes,
    open_run_directory,
    start_run_directory,
    write_config,
)
from nemo_like.run.files import AppendedFile
from nemo_like.run.progress import Progress
from nemo_like.run.store import Store, check_unused, open_store, restore
from nemo_like.run.tracking import RunLog, Tracker, check_logger, run_log
from nemo_like.run.upload import Uploader
from nemo_like.training.epochs import OpenRun
from nemo_like.training.files import RunFiles
from nemo_like.training.groups import WorkersStart
from nemo_like.training.health import Health
from nemo_like.training.model_files import check_frozen_models, frozen_models, open_model_spec
from nemo_like.training.parity_check import ParityCheck
from nemo_like.training.reporting import (
    header_lines,
    new_counters,
    start_warnings,
    step_line,
    step_note,
)
from nemo_like.training.run import TrainingRun, check_workers
from nemo_like.training.run_data import RunData, load_position
from nemo_like.training.saving import CheckpointSaver, Selection, policy_directory
from nemo_like.training.step_log import StepLog
from nemo_like.training.stopping import StopRequests, stop_requests
from nemo_like.training.workers import RunWorkers, start_workers

logger = logging.getLogger(__name__)


def workers_start(config: RunConfig) -> WorkersStart:
    """Return what the workers of a run are started with."""
    return WorkersStart(
        policy=config.policy,
        parallel=config.parallel,
        cluster=config.cluster,
        data=config.data,
        needs=config.needs,
        seed=config.seed,
    )


@contextmanager
def open_training_run(
    config: RunConfig,
    data: RunData,
    loader: BatchLoader,
    *,
    num_steps: int | None,
    num_optimizer_steps: int | None,
) -> Iterator[TrainingRun]:
    """Lock the run directory, start and check the workers, and load the checkpoint if one exists.

    The numbers of steps are None if the run does not know them in advance. Everything closes with
    the block. Raises ConfigError or CheckpointError if the run cannot start. No file of an existing
    run has changed then, because files change after every check that can refuse the run.
    """
    plain = to_dict(config)
    # The directory keeps the config as the user wrote it, without the resolved steps.
    config = replace(config, policy=resolve_decay_steps(config.policy, num_optimizer_steps))
    settings = workers_start(config)
    progress = Progress(verbose=config.logger.verbose)
    with (
        stop_requests(config.cluster.time_limit) as stop,
        open_run_directory(config.output_dir, config.run_name, resume=config.resume) as directory,
        run_log(directory.logs / "driver.log") as log_file,
        ExitStack() as closing,
    ):
        log_file.note_start()
        opening = _Opening(
            config=config,
            plain=plain,
            directory=directory,
            checkpointer=Checkpointer(directory.path, config.checkpointing),
            log_file=log_file,
            progress=progress,
            stop=stop,
            num_steps=num_steps,
            closing=closing,
            store=open_store(config.checkpointing.upload_to, config.run_name),
        )
        check_logger(config.logger)
        for warning in start_warnings(
            settings.policy, settings.needs, settings.layout, data.encoder, num_optimizer_steps
        ):
            logger.warning(warning)  # on the console and in driver.log
        opening.print_header(len(data.train))
        identities = frozen_models(config.policy, config.needs)
        resumed = opening.find_checkpoint(identities)
        parity = ParityCheck(config.policy, config.parallel, config.cluster, closing)
        end_token_ids = data.encoder.end_token_ids
        with start_workers(
            settings, progress, logs=directory.logs / "ray", end_token_ids=end_token_ids
        ) as workers:
            saves = config.checkpointing.enabled or config.checkpointing.export_hf
            shared = directory.path if saves else None
            check_workers(data.encoder, workers, progress, shared=shared)
            parity.finish(progress)
            state = opening.load(resumed, workers, loader)
            # The policy and the loader accepted the checkpoint, so files may change now.
            run = opening.run(settings, workers, data.encoder, state, identities)
            # From here on a signal waits for the end of a step, so that the step can be saved.
            stop.finish_steps(enabled=True)
            try:
                yield run
            except Exception as error:
                run.files.saver.finish_after_error(error)
                raise
            finally:
                for line in run.files.health.advice():
                    progress.print_line(line)


def open_epochs(config: RunConfig, data: RunData, loader: BatchLoader) -> OpenRun:
    """Return what opens a run whose steps have one optimizer step each."""

    def open_run(num_steps: int | None) -> AbstractContextManager[TrainingRun]:
        return open_training_run(
            config, data, loader, num_steps=num_steps, num_optimizer_steps=num_steps
        )

    return open_run


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """A run whose directory is locked, and still has the files of an earlier run, if any."""

    config: RunConfig
    plain: dict[str, Any]
    """The configuration as plain values, for config.yaml and the trackers."""
    directory: RunDirectory
    checkpointer: Checkpointer
    log_file: RunLog
    progress: Progress
    stop: StopRequests
    num_steps: int | None
    closing: ExitStack
    """Closes the files of the run."""
    store: Store | None
    opened_s: float = field(default_factory=time.monotonic)

    def print_header(self, num_examples: int) -> None:
        """Print the lines that describe the run, which has `num_examples` in training files."""
        policy, needs = self.config.policy, self.config.needs
        spec = open_model_spec(policy, needs.head)
        self.progress.print_line(f"{needs.job} run in {self.directory.path}")
        for line in header_lines(
            policy, self.config.cluster, needs, spec, num_examples, self.num_steps
        ):
            self.progress.print_line(line)

    def find_checkpoint(self, identities: Mapping[str, str]) -> Checkpoint | None:
        """Return the checkpoint to continue, if the run is a resume and there is one.

        `identities` identify the frozen models, and must equal the checkpoint's. Raises
        ConfigError and CheckpointError.
        """
        config = self.config
        if not config.resume:
            if self.store is not None:
                check_unused(self.store)
            write_config(self.directory, self.plain)
            return None
        if self.store is not None:
            with self.progress.phase(f"looking for a checkpoint in {self.store.address}"):
                step = restore(self.store, self.directory.path)
            if step is not None:
                self.progress.print_line(f"downloaded step {step} from {self.store.address}")
        resumed = self.checkpointer.find_latest(
            lambda path: checkpoint_problem(policy_directory(path))
        )
        if resumed is not None:
            saved = resumed.state().model
            check_frozen_models(saved, identities, config.policy, config.needs, resumed.path)
        # config.yaml itself is replaced in `start_run_directory`, after the last check.
        log_config_changes(self.directory, self.plain)
        return resumed

    def load(
        self, resumed: Checkpoint | None, workers: RunWorkers, loader: BatchLoader
    ) -> TrainingState | None:
        """Restore policy and loader from a checkpoint; return its state.

        Raises CheckpointError for a damaged checkpoint.
        """
        if resumed is None:
            if self.config.resume:
                self.progress.print_line(
                    f"resume: no checkpoint in {self.checkpointer.path}, so the run starts at step"
                    " 0"
                )
            return None
        state = resumed.state()
        with self.progress.phase(f"loading step {state.step}"), workers.policy_onloaded():
            workers.policy.load(policy_directory(resumed.path))
        allow_changed_rows = self.config.data.allow_changed_rows
        if not load_position(resumed, loader, allow_changed_rows=allow_changed_rows):
            self.progress.print_line(
                "resume: the training rows changed since the checkpoint; the run continues in epoch"
                f" {loader.epoch + 1} with the new rows (data.allow_changed_rows)"
            )
        self.progress.print_line(f"resumed from {resumed.path}")
        return state

    def run(
        self,
        settings: WorkersStart,
        workers: RunWorkers,
        encoder: ChatEncoder,
        state: TrainingState | None,
        identities: Mapping[str, str],
    ) -> TrainingRun:
        """Open the files of the run and return it; `state` is None without a checkpoint."""
        timers = Timers()
        saver = CheckpointSaver(self.checkpointer, workers, timers, self._open_uploader())
        files = self._open_files(saver, state, identities)
        if saver.uploader is not None:
            # A killed process may have saved the checkpoint and not uploaded it.
            saver.uploader.submit()
        log = StepLog(
            tracker=files.tracker,
            log_file=files.log_file,
            selection=files.selection,
            progress=self.progress,
            timers=timers,
            opened_s=self.opened_s,
            counters=new_counters() if state is None else dict(state.counters),
        )
        sampling = None
        if settings.needs.rollouts is not None:
            # Imported on demand: a run without rollouts needs neither generation nor environments.
            from nemo_like.training.rollout_run import RolloutRun

            sampling = RolloutRun(settings, workers, encoder, log)
            if state is None:
                sampling.start(settings)
        return TrainingRun(
            settings=settings,
            logger=self.config.logger,
            files=files,
            log=log,
            workers=workers,
            encoder=encoder,
            progress=self.progress,
            stop=self.stop,
            step=0 if state is None else state.step,
            sampling=sampling,
        )

    def _open_uploader(self) -> Uploader | None:
        if self.store is None:
            return None
        uploader = Uploader(self.store, self.checkpointer, self.directory.path)

        def close(kind: object, error: BaseException | None, trace: object) -> None:
            if error is not None and self.stop.restarts_after(error):
                uploader.cancel()
                return
            with self.progress.phase(f"uploading to {uploader.store.address}"):
                uploader.close(self.config.checkpointing.upload_wait_s)

        self.closing.push(close)
        return uploader

    def _open_files(
        self, saver: CheckpointSaver, state: TrainingState | None, identities: Mapping[str, str]
    ) -> RunFiles:
        config, progress = self.config, self.progress
        selection = Selection(config.checkpointing, config.early_stopping)
        if state is not None:
            selection.load_state_dict(state.selection)
        resumed_step = None if state is None else state.step
        start_run_directory(self.directory, self.plain, resumed_step)
        # A kill may have come between `latest` and `best`, or the run went back to an older step.
        self.checkpointer.set_best(selection.best_step)
        health = Health(config.health, self.plain)
        findings = AppendedFile(self.directory.health)
        self.closing.callback(findings.close)
        lengths = AppendedFile(self.directory.lengths)
        self.closing.callback(lengths.close)

        def show(step: int, metrics: Mapping[str, float]) -> None:
            """Print the line of a step, and what the health rules find in it."""
            line = step_line(config.needs.job, step, self.num_steps, metrics)
            is_validated = any(name.startswith("validation/") for name in metrics)
            progress.show_step(line, note=step_note(metrics), always=is_validated)
            self.stop.unhealthy = health.report(step, metrics, findings)

        tracker = Tracker(
            self.directory, config.logger, self.plain, resumed_step=resumed_step, show=show
        )
        return RunFiles(
            directory=self.directory,
            log_file=self.log_file,
            tracker=self.closing.enter_context(tracker),
            lengths=lengths,
            findings=findings,
            health=health,
            checkpointing=config.checkpointing,
            checkpointer=self.checkpointer,
            saver=saver,
            selection=selection,
            resolved=self.plain,
            frozen_models=identities,
        )
