"""Checks of the workers of a run before its first step."""

from __future__ import annotations

import logging

from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.run.directory import RunDirectory
from nemo_like.run.progress import Progress
from nemo_like.training.workers import RunWorkers

logger = logging.getLogger(__name__)


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
