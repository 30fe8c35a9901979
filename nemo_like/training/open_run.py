"""Opens a training run: its directory, checkpoint and workers."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from nemo_like.config.load import to_dict
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.policy.checkpoint.sharded_reader import checkpoint_problem
from nemo_like.policy.optim import resolve_decay_steps
from nemo_like.run.checkpoint import Checkpointer
from nemo_like.run.directory import (
    RunDirectory,
    log_config_changes,
    open_run_directory,
    write_config,
)
from nemo_like.run.progress import Progress
from nemo_like.run.tracking import check_logger, run_log
from nemo_like.training.checks import check_frozen_models, check_resumed_lora, frozen_models
from nemo_like.training.dataset import RunData
from nemo_like.training.model_files import open_model_spec
from nemo_like.training.run import TrainingRun
from nemo_like.training.run_lines import header_lines
from nemo_like.training.run_warnings import precision_warnings
from nemo_like.training.saving import policy_directory
from nemo_like.training.stopping import stop_requests
from nemo_like.training.workers import RunWorkers, start_workers

logger = logging.getLogger(__name__)


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
    progress = Progress()
    with (
        stop_requests(config) as stop,
        open_run_directory(config.output_dir, config.run_name, resume=config.resume) as directory,
        run_log(directory.logs / "driver.log") as log_file,
        ExitStack() as closing,
    ):
        host = socket.gethostname()
        logger.info("process %d on host %s starts, resume=%s", os.getpid(), host, config.resume)
        checkpointer = Checkpointer(directory.path, config.checkpointing)
        check_logger(config.logger)
        for warning in precision_warnings(config):
            logger.warning(warning)  # on the console and in driver.log
        spec = open_model_spec(config)
        for line in header_lines(config, directory.path, spec, len(data.train), num_steps):
            progress.print_line(line)
        identities = frozen_models(config)
        resumed = None
        if config.resume:
            resumed = checkpointer.find_latest(
                lambda path: checkpoint_problem(policy_directory(path))
            )
            if resumed is not None:
                check_resumed_lora(directory.config, config.policy.lora)
                saved = resumed.state().model
                check_frozen_models(saved, identities, config, resumed.path)
            # config.yaml itself is replaced in `start_run_directory`, after the last check.
            log_config_changes(directory, plain)
        else:
            write_config(directory, plain)
        with start_workers(
            config, progress, logs=directory.logs / "ray", end_token_ids=data.encoder.end_token_ids
        ) as workers:
            check_workers(config, data.encoder, workers, directory, progress)
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
