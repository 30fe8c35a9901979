"""Distillation. One step: rows or sampled completions, plan, teachers, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from nemo_like.algorithms.distillation.config import DistillConfig, DistillRunConfig
from nemo_like.algorithms.distillation.data import (
    TaughtRow,
    open_source,
    open_teachers,
    resolve_teachers,
    validation_batches,
)
from nemo_like.algorithms.run import open_epochs
from nemo_like.config.paths import resolve_paths
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.loader import RowLoader
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.spec import CostModel
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.generation.requests import SamplingParams
from nemo_like.losses.likelihood import DistillationLoss, Divergence
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.heads.targets import TEACHER, TargetSettings
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.rows import rollout_metrics, row_seeds
from nemo_like.run.progress import Sample
from nemo_like.training.encoding import RowLimits, encode_conversation
from nemo_like.training.epochs import run_epochs
from nemo_like.training.reporting import StepWork, plan_metrics
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.run_data import ExampleSource, named_metrics
from nemo_like.training.skipped_steps import TrainedBatch, train
from nemo_like.training.validation_answers import show_rollout

_TRAINED_COLUMNS = ("input_ids", "token_mask", "length", "row_mask")
_VALIDATION_NAMES = {
    "policy/nll": "loss",
    "policy/teacher_nll": "teacher_loss",
    "policy/divergence": "divergence",
    "policy/entropy": "entropy",
    "policy/teacher_entropy": "teacher_entropy",
}


def run_distill(config: DistillRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_teachers(resolve_paths(config))
    source = open_source(config)
    specs = open_teachers(config, source.data.encoder.tokenizer)
    costs = [CostModel.from_spec(specs[name]) for name in config.named_teachers]
    loader = source.loader()
    return run_epochs(
        config.distill,
        source,
        loader,
        partial(_Task, config, source, loader, costs),
        open_epochs(config, source.data, loader),
    )


def target_settings(config: DistillConfig) -> TargetSettings:
    """Return the divergence of a config and what it needs of the teachers."""
    divergence = Divergence(
        kind=config.divergence, weight=config.divergence_weight, temperature=config.temperature
    )
    return TargetSettings(divergence=divergence, top_k=config.top_k)


def is_on_policy(config: DistillRunConfig, step: int) -> bool:
    """Return True if `step`, counted from 0, trains on completions of the student.

    It depends on the arguments only, so that a resumed run has the same steps.
    """
    fraction = config.distill.on_policy_fraction
    if fraction in (0.0, 1.0):
        return fraction == 1.0
    return bool(np.random.default_rng((config.seed % 2**64, step)).random() < fraction)


class _Task:
    """Implements `EpochTask`."""

    def __init__(
        self,
        config: DistillRunConfig,
        source: ExampleSource[TaughtRow],
        loader: RowLoader[TaughtRow],
        costs: Sequence[CostModel],
    ) -> None:
        """`costs` are the costs of the teachers."""
        self._config = config
        self._loader = loader
        self._costs = costs
        self._validation = {
            name: validation_batches(config, source.data, name) for name in source.data.validation
        }

    def show_rows(self, run: TrainingRun) -> None:
        _show_rows(run, self._loader)

    def train_step(self, run: TrainingRun, step: int) -> StepWork:
        batch, plan = _step(run, self._config, self._loader, step)
        work = StepWork.of(plan)
        teachers = batch[TEACHER][plan.rows]
        flops = 0.0
        for teacher, cost in enumerate(self._costs):
            flops += work.forward_flops(cost, teachers == teacher)
        return replace(work, teacher_flops=flops)

    def validate(self, run: TrainingRun, step: int) -> Metrics:
        return validate(run, self._config, self._validation)


def _step(
    run: TrainingRun, config: DistillRunConfig, loader: RowLoader[TaughtRow], step: int
) -> tuple[BatchedDataDict, BatchPlan]:
    """Train on the next rows; return the batch that was trained, and its plan."""
    rows = run.next_rows(loader)
    locations = loader.batch_locations()
    is_sampled = is_on_policy(config, step)
    if is_sampled:
        batch = _sampled_batch(run, config, rows, step)
    else:
        rows, locations = _conversations(run, config, rows, locations)
        batch = _batch(rows)
    plan, sharded = run.plan_and_shard(batch, step)
    trained = TrainedBatch(step=step + 1, batch=batch, locations=locations, columns={})
    # The student must not imitate its own completions.
    loss = DistillationLoss(sft_weight=0.0 if is_sampled else config.distill.sft_weight)
    with run.workers.policy_onloaded():
        with run.log.timers("teacher"):
            targets = run.policy.compute_targets(sharded, target_settings(config.distill))
        with run.log.timers("train"):
            run.log.add(train(run, sharded, trained, loss, targets))
    run.log.add(plan_metrics(plan))
    return batch, plan


def _conversations(
    run: TrainingRun, config: DistillRunConfig, rows: Sequence[TaughtRow], locations: Sequence[str]
) -> tuple[list[TaughtRow], list[str]]:
    """Return the rows as conversations, and their locations, without those that are too long.

    Prompts, which some steps of the run complete, are encoded with the answers of their rows.
    """
    limits = RowLimits.of(config.policy, config.data)
    found = []
    found_at = []
    for row, location in zip(rows, locations, strict=True):
        example = row.example
        if isinstance(example, Prompt):
            example = encode_conversation(run.encoder, limits, example.row)
        if example is not None:
            found.append(TaughtRow(example, row.teacher))
            found_at.append(location)
    return found, found_at


def _batch(rows: Sequence[TaughtRow]) -> BatchedDataDict:
    """Return the batch of B conversations, with the teacher of each."""
    encoded: list[EncodedRow] = []
    for row in rows:
        assert isinstance(row.example, EncodedRow), "prompts are completed or encoded before"
        encoded.append(row.example)
    return _with_teachers(collate(encoded), rows)


def _with_teachers(columns: Mapping[str, Any], rows: Sequence[TaughtRow]) -> BatchedDataDict:
    """Return the batch of `columns` with the teacher of each of its B rows, int64 [B].

    Rows of one teacher may share prefixes: data may have several answers of a prompt.
    """
    teachers = np.array([row.teacher for row in rows], dtype=np.int64)
    return BatchedDataDict({**columns, TEACHER: teachers, "group": teachers})


def _sampled_batch(
    run: TrainingRun, config: DistillRunConfig, rows: Sequence[TaughtRow], step: int
) -> BatchedDataDict:
    """Let the student complete the prompts of `rows`; return the batch of B completions."""
    prompts: list[Prompt] = []
    for row in rows:
        assert isinstance(row.example, Prompt), "a run with sampled completions reads prompts"
        prompts.append(row.example)
    if step > 0:
        with run.workers.policy_onloaded(), run.log.timers("weight_sync"):
            run.rollouts.sync_weights(step)
    with run.rollouts.generating(updates_next=True), run.log.timers("generation"):
        job = run.rollouts.collector.start(
            prompts,
            group_size=1,
            sampling=SamplingParams.from_config(config.policy.generation),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=row_seeds(config.seed, step, len(prompts)),
        )
        rollout = run.rollouts.finish(job)
    rollout.check_versions(step, step)
    if step == 0:
        show_rollout(run, rollout, "rollout", "rollout samples")
    metrics = rollout_metrics(rollout)
    if not config.reward.functions:
        # Nothing scored the completions.
        metrics = {name: value for name, value in metrics.items() if "reward" not in name}
    run.log.add(metrics)
    run.rollouts.add_generator_metrics()
    columns = {name: rollout.batch[name] for name in _TRAINED_COLUMNS}
    return _with_teachers(columns, rows)


def validate(
    run: TrainingRun, config: DistillRunConfig, sets: Mapping[str, Sequence[Sequence[TaughtRow]]]
) -> Metrics:
    """Return the likelihoods of student and teacher, and their divergence, on validation rows.

    The rows of each set are given in batches.
    """
    metrics: Metrics = {}
    settings = target_settings(config.distill)
    with run.log.timers("validation"), run.workers.policy_onloaded():
        for name, batches in sets.items():
            merged: Metrics = {}
            for rows in batches:
                # Sums and counts are merged, so batches of different size weigh by their tokens.
                merged = merge_metrics([merged, _evaluate(run, rows, settings)])
            metrics |= named_metrics(name, merged)
    return metrics


def _evaluate(run: TrainingRun, rows: Sequence[TaughtRow], settings: TargetSettings) -> Metrics:
    """Return the metrics of one batch of validation rows."""
    batch = _batch(rows)
    sharded = run.policy.shard(batch, run.policy.plan_rows(batch, "evaluate"))
    targets = run.policy.compute_targets(sharded, settings)
    values = run.policy.evaluate(sharded, DistillationLoss(), targets)
    return {name: values[metric] for metric, name in _VALIDATION_NAMES.items()}


def _show_rows(run: TrainingRun, loader: RowLoader[TaughtRow]) -> None:
    """Print the first conversations of the file, decoded, with their trained tokens highlighted."""
    if run.settings.needs.rollouts is not None:
        # A sample of the first completions is shown instead.
        return
    samples = []
    for row in loader.first_rows(run.logger.num_samples_shown):
        if isinstance(row.example, EncodedRow):
            samples.append(Sample(run.encoder.segments(row.example)))
    run.show_training_samples(samples)
