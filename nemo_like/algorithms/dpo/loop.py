"""The DPO loop. One step: pairs, plan, log-probs of the reference, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import numpy as np

from nemo_like.algorithms.dpo.config import DpoRunConfig
from nemo_like.algorithms.dpo.data import collate_pairs, open_source, pair_samples
from nemo_like.algorithms.dpo.loss import PreferenceLoss
from nemo_like.config.paths import resolve_paths
from nemo_like.data.loader import RowLoader
from nemo_like.data.preferences import PreferencePair
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.training.dataset import ExampleSource
from nemo_like.training.evaluation import is_due
from nemo_like.training.run import RunResult, TrainingRun, open_training_run
from nemo_like.training.skipped_steps import TrainedBatch, stop_if_too_many, train
from nemo_like.training.throughput import plan_metrics
from nemo_like.training.validation_sets import named_metrics


def run_dpo(config: DpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    loader = source.loader()
    with closing(source.rows):
        source.start_encoding(loader.order, source.num_steps(config.dpo) * loader.batch_size)
        return _train(config, source, loader)


def _train(
    config: DpoRunConfig,
    source: ExampleSource[PreferencePair],
    loader: RowLoader[PreferencePair],
) -> RunResult:
    total = source.num_steps(config.dpo)
    # Encoded before the run starts: a bad row is then an error before the first step.
    validation = {}
    for name in source.data.validation:
        validation[name] = list(source.validation_batches(name))
    loss = PreferenceLoss(config=config.loss_fn)
    with open_training_run(
        config, source.data.encoder, num_steps=total, num_optimizer_steps=total
    ) as run:
        source.finish_encoding(run.progress)
        step = run.resume(loader)
        # The files can have changed since the checkpoint, and the number of steps with them.
        total = source.last_step(config.dpo, loader, step)
        if step == 0:
            _show_pairs(run, loader)
            if config.dpo.val_at_start:
                run.add_metrics(validate(run, validation, loss))
                run.log_metrics(step)
        with run.progress.phase("dpo", total, unit="steps", done=step) as phase:
            while step < total and not run.stops_early:
                run.stop_if_requested(step, loader)
                with run.timers("step"):
                    lengths = _update(run, loader, loss, step)
                step += 1
                if is_due(step, config.dpo.val_period, is_last=step == total):
                    run.add_metrics(validate(run, validation, loss))
                run.log_step(step, lengths, num_logprob_passes=int(config.needs_reference))
                # After the log, because it can end the run.
                stop_if_too_many(run, step, loader)
                run.save_if_due(step, loader, is_last=step == total)
                phase.advance()
        return run.finalize(step)


def _update(
    run: TrainingRun,
    loader: RowLoader[PreferencePair],
    loss: PreferenceLoss,
    step: int,
) -> np.ndarray:
    """Train on the next pairs; return the lengths of their rows, int64 [2N]."""
    batch = collate_pairs(run.next_rows(loader, step))
    plan, sharded = run.plan_and_shard(batch, step, groups=batch["pair"])
    locations = loader.batch_locations()
    trained = TrainedBatch(
        step=step + 1,
        batch=batch,
        locations=np.repeat(locations, 2).tolist(),
        columns={},
    )
    with run.workers.policy_onloaded():
        with run.timers("logprobs"):
            reference = _reference_logprobs(run, sharded)
        with run.timers("train"):
            run.add_metrics(train(run, sharded, trained, loss, reference))
    run.add_metrics(plan_metrics(plan))
    return batch["length"]


def _reference_logprobs(run: TrainingRun, sharded: ShardedBatch) -> Logprobs | None:
    """Compute the log-probs of the reference; None for a loss without one."""
    if not run.config.needs_reference:
        return None
    # The loss compares likelihoods under the models, whatever the sampling parameters.
    return run.policy.compute_logprobs(sharded, ["reference_logprobs"], as_sampled=False)


def validate(
    run: TrainingRun,
    sets: Mapping[str, list[list[PreferencePair]]],
    loss: PreferenceLoss,
) -> Metrics:
    """Return the loss and the rewards of the pairs of each validation set, given in batches."""
    metrics: Metrics = {}
    with run.timers("validation"), run.workers.policy_onloaded():
        for name, batches in sets.items():
            metrics |= named_metrics(name, _set_metrics(run, batches, loss))
    return metrics


def _set_metrics(
    run: TrainingRun,
    batches: list[list[PreferencePair]],
    loss: PreferenceLoss,
) -> Metrics:
    """Return the metrics of one set: `loss`, and `rewards_chosen` for `rewards/chosen`."""
    merged: Metrics = {}
    for pairs in batches:
        batch = collate_pairs(pairs)
        plan = run.policy.plan(
            batch["length"],
            "evaluate",
            batch["pair"],
        )
        sharded = run.policy.shard(batch, plan)
        values = run.policy.evaluate(sharded, loss, _reference_logprobs(run, sharded))
        # Sums and counts are merged, so batches of different size weigh by their pairs.
        merged = merge_metrics([merged, values])
    metrics: Metrics = {}
    for name, value in merged.items():
        section, _, rest = name.partition("/")
        metrics[rest if section == "policy" else name.replace("/", "_")] = value
    return metrics


def _show_pairs(run: TrainingRun, loader: RowLoader[PreferencePair]) -> None:
    """Print the first pairs of the file, decoded, with the compared tokens highlighted."""
    samples = []
    for pair in loader.first_rows(run.config.logger.num_samples_shown):
        samples += pair_samples(run.encoder, pair)
    run.progress.show_samples(samples, "training row")
