"""Writes the record of each step's rollout, for `nemo-like show` and `nemo-like replay`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.data.jagged import Jagged
from nemo_like.metrics import Metrics, metric_values
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.rollout.records import (
    Column,
    RolloutRecord,
    json_numbers,
    remove_old_tokens,
    row_values,
)
from nemo_like.rollout.rows import Rollout
from nemo_like.run.files import write_json_lines
from nemo_like.training.reporting import StepWork
from nemo_like.training.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class TrainedRollout:
    """A rollout after its training: B rows."""

    rollout: Rollout
    locations: Sequence[str]
    """File and line of each row's prompt."""
    columns: Mapping[str, Column]
    """Columns that joined the batch for training, [B, ...] or Jagged [T, ...]."""
    advantages: np.ndarray
    """float32 [B]."""
    optimizer_steps: Sequence[Metrics]
    """Metrics of each optimizer step."""
    work: StepWork
    """What was computed before and in training."""


def fetch_logprobs(
    run: TrainingRun,
    sharded: ShardedBatch,
    logprobs: Logprobs | None,
    fetched: Mapping[str, Jagged],
) -> dict[str, Jagged]:
    """Fetch the log-probs of the batch from the workers, float32 [T] each; none if none are kept.

    `fetched` has the values of `logprobs` if they were fetched already, or is empty. Call it before
    the next log-prob pass and the next training, which release them. Those of the training pass,
    under `policy_logprobs`, take the place of `prev_logprobs` where no pass computes these.
    """
    if not run.config.logger.save_rollouts:
        return {}
    with run.timers("rollout_record"):
        columns = dict(fetched)
        if logprobs is not None and not fetched:
            columns = run.policy.fetch_logprobs(logprobs)
        if "prev_logprobs" not in columns:
            columns["policy_logprobs"] = run.policy.fetch_trained_logprobs(sharded)
    return columns


def save_rollout(run: TrainingRun, trained: TrainedRollout, step: int) -> None:
    """Write `rollouts/step_<N>.jsonl`, and `rollouts/step_<N>.safetensors`.

    `step` is counted from 1. Does nothing unless `logger.save_rollouts` is set. Raises WriteError.
    """
    config = run.config.logger
    if not config.save_rollouts:
        return
    with run.timers("rollout_record"):
        columns: dict[str, Column] = {**trained.rollout.batch, **trained.columns}
        records = trained.rollout.records(trained.advantages)
        added = row_values(columns, trained.locations)
        for row, values in zip(records, added, strict=True):
            row.update(values)
        path = run.directory.rollouts(step)
        write_json_lines(path, records, f"the rollouts of step {step}")
        # A step that trained nothing has nothing to replay.
        if config.keep_rollout_tokens == 0 or not trained.optimizer_steps:
            return
        optimizer_steps = []
        for metrics in trained.optimizer_steps:
            optimizer_steps.append(json_numbers(metric_values(metrics)))
        record = RolloutRecord(
            step=step,
            weights_version=step - 1,
            config=run.resolved,
            optimizer_steps=optimizer_steps,
            columns=columns,
        )
        record.save(run.directory.rollout_tokens(step))
        if config.keep_rollout_tokens is not None:
            remove_old_tokens(path.parent, config.keep_rollout_tokens, run.saver.saved_steps())
