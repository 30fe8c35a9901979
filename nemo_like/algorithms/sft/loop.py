"""Supervised fine-tuning. One step: rows, plan, one optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.data import SftLoader, open_loader, open_source
from nemo_like.config.paths import resolve_paths
from nemo_like.config.text import plural
from nemo_like.data.collate import EncodedRow, collate
from nemo_like.data.columns import num_trained_tokens
from nemo_like.data.streaming.loader import StreamLoader
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import NllLoss
from nemo_like.metrics import ExpMean, Mean, Metric, Metrics, merge_metrics
from nemo_like.policy.policy import Policy
from nemo_like.training.dataset import ExampleSource
from nemo_like.training.evaluation import is_due, score_answers
from nemo_like.training.model_files import open_model_spec
from nemo_like.training.open_run import open_training_run
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.skipped_steps import TrainedBatch, stop_if_too_many, train
from nemo_like.training.throughput import StepWork, plan_metrics
from nemo_like.training.validation_sets import PromptSet, named_metrics, prompt_sets


def run_sft(config: SftRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    # The workers make no plans here, so the driver reads the sizes of the model.
    loader = open_loader(config, source, open_model_spec(config))
    with closing(source.rows):
        if source.encodes_before_run:
            source.start_encoding(_upcoming(config, source, loader, 0))
        return _train(config, source, loader)


def _train(config: SftRunConfig, source: ExampleSource[EncodedRow], loader: SftLoader) -> RunResult:
    total = _num_steps(config, source, loader)
    validation = ValidationData.open(config, source)
    mixture = source.data.train.mixture
    loss = NllLoss(sources=() if mixture is None else mixture.names)
    with (
        open_training_run(config, source.data, num_steps=total, num_optimizer_steps=total) as run,
        # Actors that encode rows are stopped before this process leaves their cluster.
        closing(source.rows),
    ):
        if not source.encodes_before_run:
            num_done = run.load_position(loader)
            source.start_encoding(_upcoming(config, source, loader, num_done))
        source.finish_encoding(run.progress)
        step = run.resume(loader)
        # The files can have changed since the checkpoint, and the number of steps with them.
        total = _num_steps(config, source, loader, step)
        if step == 0:
            run.show_rows(loader)
            if config.sft.val_at_start:
                run.add_metrics(validate(run, validation, step))
                run.log_metrics(step)
        # A run without any row left ends with the error of the loader, not after 0 steps.
        is_last = step > 0 and _is_last(config, source, loader, step, total)
        with run.progress.phase("sft", total, unit="steps", done=step) as phase:
            while not is_last and not run.stops_early:
                run.stop_if_requested(step, loader)
                with run.timers("step"):
                    batch = _batch(run.next_rows(loader, step), loader)
                    plan, sharded = run.plan_and_shard(batch, step, plan=loader.plan)
                    trained = TrainedBatch(
                        step=step + 1, batch=batch, locations=loader.batch_locations(), columns={}
                    )
                    with run.timers("train"), run.workers.policy_onloaded():
                        metrics = train(run, sharded, trained, loss)
                        run.add_metrics(
                            metrics | _perplexity("policy/perplexity", metrics["policy/loss"])
                        )
                step += 1
                phase.advance()
                is_last = _is_last(config, source, loader, step, total)
                run.add_metrics(plan_metrics(plan) | stream_metrics(loader))
                if is_due(step, config.sft.val_period, is_last=is_last):
                    run.add_metrics(validate(run, validation, step))
                run.log_step(step, StepWork.of(plan))
                # After the log, because it can end the run.
                stop_if_too_many(run, step, loader)
                run.save_if_due(step, loader, is_last=is_last)
        _report_dropped_tail(run, source, loader)
        return run.finalize(step)


def _batch(rows: list[EncodedRow], loader: SftLoader) -> BatchedDataDict:
    """Return the columns of the loader's last batch; of a mixture with `source` int64 [B]."""
    batch = BatchedDataDict(collate(rows))
    sources = loader.batch_sources()
    if sources is not None:
        batch["source"] = sources.indices
    return batch


def _upcoming(
    config: SftRunConfig, source: ExampleSource[EncodedRow], loader: SftLoader, step: int
) -> np.ndarray:
    """Return the rows that the run visits after `step` steps, int64 [n].

    Raises ConfigError if an epoch has no step.
    """
    if isinstance(loader, StreamLoader):
        return loader.upcoming(len(loader))
    num_left = max(source.num_steps(config.sft) - step, 0)
    return loader.upcoming(num_left * loader.batch_size)


def _num_steps(
    config: SftRunConfig, source: ExampleSource[EncodedRow], loader: SftLoader, step: int = 0
) -> int | None:
    """Return the last step of a run that has done `step`; None if it is not known in advance."""
    if isinstance(loader, StreamLoader):
        return config.sft.max_num_steps
    return source.last_step(config.sft, loader, step)


def _is_last(
    config: SftRunConfig,
    source: ExampleSource[EncodedRow],
    loader: SftLoader,
    step: int,
    total: int | None,
) -> bool:
    """Return True if the run ends after `step` steps."""
    if total is not None and step >= total:
        return True
    if isinstance(loader, StreamLoader):
        return loader.is_finished(source.rows.is_kept)
    return source.is_exhausted(config.sft, loader)


def _report_dropped_tail(
    run: TrainingRun, source: ExampleSource[EncodedRow], loader: SftLoader
) -> None:
    """Print the rows of the last epoch that `data.batching.tail=drop` leaves out.

    Those of earlier epochs are in the metric `packing/num_dropped` of the steps that follow.
    """
    if not isinstance(loader, StreamLoader) or loader.spec.tail != "drop":
        return
    is_kept = source.rows.is_kept
    num_left = loader.num_left(is_kept)
    if num_left and loader.is_finished(is_kept):
        run.progress.print_line(
            f"data.batching.tail=drop leaves out {num_left} {plural(num_left, 'row')} of the last"
            " epoch"
        )


def stream_metrics(loader: SftLoader) -> Metrics:
    """Return the metrics of the window from which the rows of the step were chosen."""
    if not isinstance(loader, StreamLoader):
        return {}
    return {name: Mean(value) for name, value in loader.planned.window_metrics().items()}


@dataclass(frozen=True)
class ValidationData:
    """The validation rows, encoded before the run starts.

    A bad row is then an error before the first step, not at a later validation.
    """

    batches: dict[str, list[list[EncodedRow]]]
    """The batches of each set by its name."""
    prompts: list[PromptSet]
    """Empty unless answers are generated."""

    @classmethod
    def open(cls, config: SftRunConfig, source: ExampleSource[EncodedRow]) -> ValidationData:
        """Encode the validation rows. Raises ConfigError for a bad row."""
        data = source.data
        batches = {name: list(source.validation_batches(name)) for name in data.validation}
        prompts: list[PromptSet] = []
        if config.sft.val_generate:
            prompts = prompt_sets(config, data.encoder, data.validation)
        return cls(batches, prompts)


def validate(run: TrainingRun, data: ValidationData, step: int) -> Metrics:
    """Return the validation loss, and with `sft.val_generate` the reward of generated answers."""
    metrics: Metrics = {}
    with run.timers("validation"):
        with run.workers.policy_onloaded():
            for name, batches in data.batches.items():
                metrics |= named_metrics(name, evaluate_batches(run.policy, batches))
        if data.prompts:
            # SFT generates only here, so the weights are not copied after every step.
            with run.workers.policy_onloaded():
                run.sync_weights(step)
            metrics |= score_answers(run, data.prompts, step)
    return metrics


def evaluate_batches(policy: Policy, batches: Iterable[Sequence[EncodedRow]]) -> Metrics:
    """Return loss, perplexity and token accuracy over all rows; nothing if there are none."""
    metrics: Metrics = {}
    for rows in batches:
        batch = BatchedDataDict(collate(rows))
        plan = policy.plan(batch["length"], "evaluate", num_trained=num_trained_tokens(batch))
        sharded = policy.shard(batch, plan)
        values = policy.evaluate(sharded, NllLoss())
        # Sums and counts are merged, so batches of different size weigh by their tokens.
        found = {name: values[f"policy/{name}"] for name in ("loss", "token_accuracy")}
        metrics = merge_metrics([metrics, found])
    # A set may have no row that is short enough.
    return metrics | _perplexity("perplexity", metrics["loss"]) if metrics else {}


def _perplexity(name: str, loss: Metric) -> Metrics:
    """Return exp of the loss per token, which is a mean over all tokens, as metric `name`."""
    assert isinstance(loss, Mean)
    return {name: ExpMean(loss.total, loss.weight)}
