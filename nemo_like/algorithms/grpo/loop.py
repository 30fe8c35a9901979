"""GRPO (Shao et al. 2024): group-relative policy optimization.

One step: prompts, rollout, plan, log-probs, advantages, optimizer steps, weight synchronization.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.algorithms.grpo.advantages import rollout_advantages, without_truncated
from nemo_like.algorithms.grpo.config import GrpoConfig, GrpoRunConfig, asynchronous_warnings
from nemo_like.algorithms.grpo.data import num_optimizer_steps, open_source
from nemo_like.algorithms.grpo.rollouts import RolloutPipeline, StepRollout, prompt_selector
from nemo_like.algorithms.run import open_training_run
from nemo_like.config.loss import LogprobName
from nemo_like.config.paths import resolve_paths
from nemo_like.data.columns import take_rows
from nemo_like.data.jagged import Jagged
from nemo_like.data.loader import RowLoader
from nemo_like.data.oversampling import OversamplingLoader
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import RolloutLoss, rollout_loss
from nemo_like.metrics import Metrics, merge_metrics, metric_values
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.records import (
    Column,
    RolloutRecord,
    json_numbers,
    remove_old_tokens,
    row_values,
)
from nemo_like.rollout.rows import Rollout, select_rows
from nemo_like.run.files import write_json_lines
from nemo_like.training.epochs import is_due
from nemo_like.training.prompts import prompt_sets
from nemo_like.training.reporting import StepWork, check_trained, plan_metrics
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.run_data import ExampleSource
from nemo_like.training.skipped_steps import TrainedBatch, stop_if_too_many, train_steps
from nemo_like.training.validation_answers import AnswerSampling, score_answers, show_rollout

logger = logging.getLogger(__name__)


def run_grpo(config: GrpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    loader = source.loader()
    if config.grpo.oversampling_factor > 1:
        num_sampled = config.grpo.num_sampled_prompts
        loader = OversamplingLoader.of(loader, num_sampled=num_sampled)
    if config.grpo.prompt_selection.enabled:
        loader.selector = prompt_selector(config)
    source.encode_ahead(loader.order.upcoming(_max_num_prompts(config.grpo)))
    return _train(config, source, loader)


def answer_sampling(config: GrpoConfig) -> AnswerSampling:
    """Return how validation answers are sampled and counted."""
    return AnswerSampling(
        temperature=config.val_temperature,
        num_samples=config.val_num_samples,
        pass_reward=config.val_pass_reward,
        top_p=config.val_top_p,
        top_k=config.val_top_k,
        max_new_tokens=config.val_max_new_tokens,
    )


def _max_num_prompts(grpo: GrpoConfig) -> int:
    """Return the number of prompts that a run may need; with selection those that it expects."""
    num_prompts = grpo.max_num_steps * grpo.max_prompts_per_step
    if grpo.prompt_selection.enabled:
        num_prompts = round(num_prompts / grpo.prompt_selection.exploration)
    if grpo.oversampling_factor > 1:
        # Those that wait after the last step: at most as many before it as fill no step.
        num_prompts += grpo.num_sampled_prompts
    return num_prompts


def _train(
    config: GrpoRunConfig, source: ExampleSource[Prompt], loader: RowLoader[Prompt]
) -> RunResult:
    total = config.grpo.max_num_steps
    data = source.data
    val_sets = prompt_sets(data.encoder, source.settings.limits, data.validation)
    sampling = answer_sampling(config.grpo)
    loss = rollout_loss(config.loss_fn, config.policy.generation.max_new_tokens)
    with open_training_run(
        config,
        data,
        loader,
        num_steps=total,
        num_optimizer_steps=num_optimizer_steps(config, source),
    ) as run:
        num_visits = total * config.grpo.max_prompts_per_step
        warnings = config.grpo.prompt_selection.warnings(num_visits, len(loader))
        for warning in asynchronous_warnings(config) + warnings:
            logger.warning(warning)
        step = run.step
        if step > 0:
            # The generator has loaded the initial weights.
            with run.workers.policy_onloaded():
                run.rollouts.sync_weights(step)
        elif config.grpo.val_at_start:
            run.log.add(score_answers(run, val_sets, step, sampling))
            run.log.write(step)
        pipeline = RolloutPipeline(run, config, loader, step)
        with run.progress.phase("grpo", total, unit="steps", done=step) as phase:
            while step < total and not run.stops_early:
                run.stop_if_requested(step, pipeline.position)
                with run.log.timers("step"):
                    pipeline.fetch(step)
                    with run.rollouts.generating(updates_next=True):
                        pipeline.start(step)
                        taken = pipeline.take(step)
                    if step == 0:
                        show_rollout(run, taken.rollout, "rollout", "rollout samples")
                    trained = _update(run, config, pipeline, taken, loss, step)
                step += 1
                phase.advance()
                if step < total and config.grpo.max_staleness > 0:
                    # Now, so that the generator has work while this step is logged and saved.
                    pipeline.start(step)
                # The generator has the weights of `step` since the update.
                if is_due(step, config.grpo.val_period, is_last=step == total):
                    run.log.add(score_answers(run, val_sets, step, sampling))
                run.rollouts.add_generator_metrics()
                with run.rollouts.collector.background():
                    save_rollout(run, trained, step)
                    run.log_step(step, trained.work)
                    stop_if_too_many(run, step, pipeline.position)
                    run.save_if_due(step, pipeline.position, is_last=step == total)
        check_trained(run.settings.policy, run.settings.needs, run.log.counters)
        return run.finalize(step)


def _update(
    run: TrainingRun,
    config: GrpoRunConfig,
    pipeline: RolloutPipeline,
    taken: StepRollout,
    loss: RolloutLoss,
    step: int,
) -> TrainedRollout:
    """Train on the rollout and copy the new weights to the generator.

    The rollouts of later steps, if any were started, run meanwhile.
    """
    with run.workers.policy_onloaded():
        with run.rollouts.collector.background():
            trained = train_on_rollout(run, config, taken, loss, step)
            if is_due(step + 1, config.grpo.reference_update_period, is_last=False):
                with run.log.timers("reference_update"):
                    run.policy.update_reference()
        pipeline.prepare_update()
        # Still inside: the weights are read from the devices.
        with run.log.timers("weight_sync"):
            run.rollouts.sync_weights(step + 1)
    run.log.add(taken.metrics())
    run.log.media.add_histogram("histograms/reward", taken.rollout.batch["reward"])
    return trained


def train_on_rollout(
    run: TrainingRun, config: GrpoRunConfig, taken: StepRollout, loss: RolloutLoss, step: int
) -> TrainedRollout:
    """Take the optimizer steps on a rollout and add their metrics to the run.

    Every pass of `grpo.num_epochs_per_rollout` takes the rows in another order, and so with other
    rows in each optimizer step; log-probs and advantages are computed once. A rollout without rows
    trains nothing.
    """
    rollout = taken.rollout
    if config.grpo.overlong.filter:
        rollout = without_truncated(rollout)
    batch = rollout.batch
    if batch.size == 0:
        no_tokens = np.zeros(0, dtype=np.int64)
        return TrainedRollout(
            rollout=rollout,
            locations=[],
            columns={},
            advantages=np.zeros(0, dtype=np.float32),
            optimizer_steps=[],
            work=StepWork(lengths=no_tokens, num_trained=no_tokens),
            taken=taken,
        )
    num_epochs = config.grpo.num_epochs_per_rollout
    plan, sharded = run.plan_and_shard(batch, step)
    loss = loss.for_num_steps(plan.num_steps * num_epochs)
    names = _logprob_names(config, loss)
    logprobs = None
    fetched: dict[str, Jagged] = {}
    if names:
        with run.log.timers("logprobs"):
            logprobs = run.policy.compute_logprobs(sharded, names)
            if num_epochs > 1 or config.has_kl_in_reward:
                fetched = run.policy.fetch_logprobs(logprobs)
    advantages = rollout_advantages(config, rollout, fetched)
    # Rows are prompt-major: the rows of a prompt are consecutive.
    locations = np.array(taken.locations)[np.unique(batch["group"], return_inverse=True)[1]]
    trained = TrainedBatch(
        step=step + 1,
        batch=batch,
        locations=locations.tolist(),
        columns={"advantages": advantages.column},
    )
    # No pass computes them where the training pass has the same values.
    keep_logprobs = config.logger.save_rollouts and "prev_logprobs" not in names
    with run.log.timers("train"):
        steps = train_steps(run, sharded, trained, loss, logprobs, keep_logprobs=keep_logprobs)
    recorded = fetch_logprobs(run, sharded, logprobs, fetched)
    for epoch in range(1, num_epochs):
        shuffled = _shuffled(config.seed, trained, advantages.column, fetched, epoch)
        steps += _train_again(run, shuffled, loss)
    run.log.add(advantages.metrics)
    run.log.add(merge_metrics(steps) | plan_metrics(plan))
    return TrainedRollout(
        rollout=rollout,
        locations=trained.locations,
        columns={**trained.columns, **recorded},
        advantages=advantages.rows,
        optimizer_steps=steps,
        work=StepWork.of(plan, num_logprob_passes=len(names), num_epochs=num_epochs),
        taken=taken,
    )


def epoch_order(seed: int, step: int, epoch: int, num_rows: int) -> np.ndarray:
    """Return the order of the rows in pass `epoch` over a rollout, int64 [num_rows].

    Pass 0 has the order of the rollout. It depends on the arguments only, so that a resumed run has
    the same.
    """
    if epoch == 0:
        return np.arange(num_rows)
    return np.random.default_rng((seed % 2**64, step, epoch)).permutation(num_rows)


def _logprob_names(config: GrpoRunConfig, loss: RolloutLoss) -> tuple[LogprobName, ...]:
    """Return the log-probs that the loss or the rewards read, each once."""
    names: list[LogprobName] = list(loss.logprob_names)
    if config.has_kl_in_reward:
        if config.computes_prev_logprobs:
            names.append("prev_logprobs")
        names.append("reference_logprobs")
    return tuple(dict.fromkeys(names))


def _shuffled(
    seed: int,
    trained: TrainedBatch,
    advantages: np.ndarray | Jagged,
    logprobs: Mapping[str, Jagged],
    epoch: int,
) -> TrainedBatch:
    """Return the rows of a rollout in the order of pass `epoch`, with their log-probs.

    `advantages` are float32 [B], or [T] per token; `logprobs` are float32 [T] each.
    """
    batch = trained.batch
    order = epoch_order(seed, trained.step, epoch, batch.size)
    # On other ranks than in the first pass, where the log-probs were kept.
    columns = BatchedDataDict({**batch, **logprobs})
    shuffled = take_rows(advantages, order)
    assert isinstance(shuffled, np.ndarray | Jagged)
    locations = np.array(trained.locations)[order].tolist()
    return TrainedBatch(
        step=trained.step,
        batch=columns.select_indices(order),
        locations=locations,
        columns={"advantages": shuffled},
        epoch=epoch,
    )


def _train_again(run: TrainingRun, trained: TrainedBatch, loss: RolloutLoss) -> list[Metrics]:
    """Plan and shard the rows in their new order; return the metrics of each optimizer step."""
    with run.log.timers("plan"):
        plan = run.policy.plan_rows(trained.batch)
    with run.log.timers("shard"):
        sharded = run.policy.shard(trained.batch, plan)
    with run.log.timers("train"):
        return train_steps(run, sharded, trained, loss)


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
    taken: StepRollout
    """As it was sampled, with the groups that dynamic sampling dropped."""


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
    if not run.logger.save_rollouts:
        return {}
    with run.log.timers("rollout_record"):
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
    config = run.logger
    if not config.save_rollouts:
        return
    with run.log.timers("rollout_record"):
        columns = BatchedDataDict({**trained.rollout.batch, **trained.columns})
        rows = trained.rollout.recorded_rows(config.max_rollout_rows)
        records = trained.rollout.records(trained.advantages, rows)
        is_complete = len(rows) == columns.size
        locations = [trained.locations[int(row)] for row in rows]
        added = row_values(columns if is_complete else columns.select_indices(rows), locations)
        for row, values in zip(records, added, strict=True):
            row.update(values)
        records += dropped_records(trained.taken, config.max_rollout_rows, len(records))
        path = run.files.directory.rollouts(step)
        write_json_lines(path, records, f"the rollouts of step {step}")
        # A step that trained nothing has nothing to replay, and a replay needs every row.
        if config.keep_rollout_tokens == 0 or not trained.optimizer_steps or not is_complete:
            return
        optimizer_steps = []
        for metrics in trained.optimizer_steps:
            optimizer_steps.append(json_numbers(metric_values(metrics)))
        record = RolloutRecord(
            step=step,
            weights_version=step - 1,
            config=run.files.resolved,
            optimizer_steps=optimizer_steps,
            columns=columns,
        )
        record.save(run.files.directory.rollout_tokens(step))
        if config.keep_rollout_tokens is not None:
            remove_old_tokens(
                path.parent, config.keep_rollout_tokens, run.files.saver.saved_steps()
            )


def dropped_records(
    taken: StepRollout, max_rows: int | None, num_recorded: int
) -> list[dict[str, Any]]:
    """Return the records of complete groups that dynamic sampling dropped, as far as they fit.

    `num_recorded` rows count for `max_rows` already. A step without a recorded row has at least one
    group.
    """
    if taken.sampled is None:
        return []
    is_dropped = ~np.isin(taken.sampled.batch["group"], taken.rollout.batch["group"])
    dropped = select_rows(taken.sampled, np.flatnonzero(is_dropped))
    groups = dropped.batch["group"]
    max_left = None if max_rows is None else max_rows - num_recorded
    group_size = int((groups == groups[:1]).sum())
    if len(groups) == 0 or (max_left is not None and num_recorded and max_left < group_size):
        return []
    rows = dropped.recorded_rows(max_left)
    records = dropped.records(rows=rows)
    for record in records:
        record["source"] = taken.sampled_locations[record["group"]]
        record["kept"] = False
    return records
