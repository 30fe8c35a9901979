"""The DPO loop. One step: pairs, plan, log-probs of the reference, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

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
from nemo_like.training.epochs import run_epochs
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.skipped_steps import TrainedBatch, train
from nemo_like.training.throughput import plan_metrics
from nemo_like.training.validation_sets import named_metrics


def run_dpo(config: DpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    loader = source.loader()
    return run_epochs(config, config.dpo, source, loader, partial(_Task, config, source, loader))


class _Task:
    """Implements `EpochTask`."""

    def __init__(
        self,
        config: DpoRunConfig,
        source: ExampleSource[PreferencePair],
        loader: RowLoader[PreferencePair],
    ) -> None:
        self.num_logprob_passes = int(config.needs_reference)
        self._loader = loader
        self._loss = PreferenceLoss(config=config.loss_fn)
        self._validation = source.all_validation_batches()

    def show_rows(self, run: TrainingRun) -> None:
        _show_pairs(run, self._loader)

    def train_step(self, run: TrainingRun, step: int) -> np.ndarray:
        return _update(run, self._loader, self._loss, step)

    def validate(self, run: TrainingRun) -> Metrics:
        return validate(run, self._validation, self._loss)


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
