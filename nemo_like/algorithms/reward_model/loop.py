"""The loop of a reward model. One step: pairs, plan, one optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from nemo_like.algorithms.reward_model.config import RewardModelRunConfig
from nemo_like.algorithms.reward_model.data import (
    MarginPair,
    collate_margin_pairs,
    open_source,
    pair_samples,
)
from nemo_like.config.paths import resolve_paths
from nemo_like.data.loader import RowLoader
from nemo_like.losses.bradley_terry import BradleyTerryLoss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.checkpoint.hf_export import padding_token_id
from nemo_like.training.dataset import ExampleSource
from nemo_like.training.epochs import run_epochs
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.skipped_steps import TrainedBatch, train
from nemo_like.training.throughput import plan_metrics
from nemo_like.training.validation_sets import named_metrics


def run_reward_model(config: RewardModelRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    encoder = source.data.encoder
    # The export needs one; without the check the run would fail at its end.
    padding_token_id(encoder.tokenizer)
    loader = source.loader()
    return run_epochs(config, config.rm, source, loader, partial(_Task, config, source, loader))


class _Task:
    """Implements `EpochTask`."""

    num_logprob_passes = 0

    def __init__(
        self,
        config: RewardModelRunConfig,
        source: ExampleSource[MarginPair],
        loader: RowLoader[MarginPair],
    ) -> None:
        self._loader = loader
        self._loss = BradleyTerryLoss(center_coefficient=config.rm.center_coefficient)
        self._validation = source.all_validation_batches()

    def show_rows(self, run: TrainingRun) -> None:
        _show_pairs(run, self._loader)

    def train_step(self, run: TrainingRun, step: int) -> np.ndarray:
        return _update(run, self._loader, self._loss, step)

    def validate(self, run: TrainingRun) -> Metrics:
        return validate(run, self._validation, self._loss)


def _update(
    run: TrainingRun,
    loader: RowLoader[MarginPair],
    loss: BradleyTerryLoss,
    step: int,
) -> np.ndarray:
    """Train on the next pairs; return the lengths of their rows, int64 [2N]."""
    batch = collate_margin_pairs(run.next_rows(loader, step))
    plan, sharded = run.plan_and_shard(batch, step, groups=batch["pair"])
    trained = TrainedBatch(
        step=step + 1,
        batch=batch,
        locations=np.repeat(loader.batch_locations(), 2).tolist(),
        columns={},
    )
    with run.workers.policy_onloaded(), run.timers("train"):
        run.add_metrics(train(run, sharded, trained, loss, None))
    run.add_metrics(plan_metrics(plan))
    return batch["length"]


def validate(
    run: TrainingRun,
    sets: Mapping[str, list[list[MarginPair]]],
    loss: BradleyTerryLoss,
) -> Metrics:
    """Return the metrics of the pairs of each validation set, given in batches.

    They are `loss`, and those of the loss without its section: `accuracy`, `margin`, ...
    """
    metrics: Metrics = {}
    with run.timers("validation"), run.workers.policy_onloaded():
        for name, batches in sets.items():
            merged: Metrics = {}
            for pairs in batches:
                batch = collate_margin_pairs(pairs)
                plan = run.policy.plan(
                    batch["length"],
                    "evaluate",
                    batch["pair"],
                )
                values = run.policy.evaluate(run.policy.shard(batch, plan), loss)
                # Sums and counts are merged, so batches of different size weigh by their pairs.
                merged = merge_metrics([merged, values])
            named = {metric.rpartition("/")[2]: value for metric, value in merged.items()}
            metrics |= named_metrics(name, named)
    return metrics


def _show_pairs(run: TrainingRun, loader: RowLoader[MarginPair]) -> None:
    """Print the first pairs of the file, decoded, with the tokens of the completions highlighted.

    The score is that of the last token of each row.
    """
    samples = []
    for example in loader.first_rows(run.config.logger.num_samples_shown):
        samples += pair_samples(run.encoder, example.pair)
    run.progress.show_samples(samples, "training row")
