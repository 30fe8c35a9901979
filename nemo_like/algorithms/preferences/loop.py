"""The loop of DPO and of reward models.

One step: pairs, plan, log-probs of the reference where the loss needs them, one optimizer step.
"""

from __future__ import annotations

import numpy as np

from nemo_like.algorithms.preferences.config import (
    DpoRunConfig,
    PreferenceRunConfig,
    RewardModelRunConfig,
)
from nemo_like.algorithms.preferences.data import collate_pairs, open_source, pair_samples
from nemo_like.algorithms.preferences.loss import BradleyTerryLoss, PreferenceLoss
from nemo_like.algorithms.run import open_epochs
from nemo_like.config.paths import resolve_paths
from nemo_like.data.loader import RowLoader
from nemo_like.data.preferences import PreferencePair
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.checkpoint.hf_export import padding_token_id
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.training.epochs import run_epochs
from nemo_like.training.reporting import StepWork, plan_metrics
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.run_data import ExampleSource, named_metrics
from nemo_like.training.skipped_steps import TrainedBatch, train


def run_dpo(config: DpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    return _run(config, open_source(config), PreferenceLoss(config=config.loss_fn))


def run_rm(config: RewardModelRunConfig) -> RunResult:
    """Train a reward model; see `run_dpo`."""
    config = resolve_paths(config)
    source = open_source(config)
    # The export needs one; without the check the run would fail at its end.
    padding_token_id(source.data.encoder.tokenizer)
    return _run(config, source, BradleyTerryLoss(center_coefficient=config.rm.center_coefficient))


def _run(
    config: PreferenceRunConfig, source: ExampleSource[PreferencePair], loss: Loss
) -> RunResult:
    loader = source.loader()
    return run_epochs(
        config.loop,
        source,
        loader,
        lambda: _Task(source, loader, loss, needs_reference=config.needs.reference),
        open_epochs(config, source.data, loader),
    )


class _Task:
    """Implements `EpochTask`."""

    def __init__(
        self,
        source: ExampleSource[PreferencePair],
        loader: RowLoader[PreferencePair],
        loss: Loss,
        *,
        needs_reference: bool,
    ) -> None:
        """Encode the validation pairs. Raises ConfigError for a bad row."""
        self._loader = loader
        self._loss = loss
        self._needs_reference = needs_reference
        self._validation = source.validation_batches()

    def show_rows(self, run: TrainingRun) -> None:
        """Print the first pairs of the file, decoded, with the completions highlighted."""
        samples = []
        for pair in self._loader.first_rows(run.logger.num_samples_shown):
            samples += pair_samples(run.encoder, pair)
        run.show_training_samples(samples)

    def train_step(self, run: TrainingRun, step: int) -> StepWork:
        """Train on the 2N rows of the next pairs."""
        batch = collate_pairs(run.next_rows(self._loader))
        plan, sharded = run.plan_and_shard(batch, step)
        trained = TrainedBatch(
            step=step + 1,
            batch=batch,
            locations=np.repeat(self._loader.batch_locations(), 2).tolist(),
            columns={},
        )
        with run.workers.policy_onloaded():
            logprobs = None
            if self._needs_reference:
                with run.log.timers("logprobs"):
                    logprobs = _reference_logprobs(run, sharded)
            with run.log.timers("train"):
                run.log.add(train(run, sharded, trained, self._loss, logprobs))
        run.log.add(plan_metrics(plan))
        return StepWork.of(plan, num_logprob_passes=int(self._needs_reference))

    def validate(self, run: TrainingRun, step: int) -> Metrics:
        """Return the metrics of the loss over the pairs of each validation set."""
        metrics: Metrics = {}
        with run.log.timers("validation"), run.workers.policy_onloaded():
            for name, batches in self._validation.items():
                metrics |= named_metrics(name, self._set_metrics(run, batches))
        return metrics

    def _set_metrics(self, run: TrainingRun, batches: list[list[PreferencePair]]) -> Metrics:
        merged: Metrics = {}
        for pairs in batches:
            batch = collate_pairs(pairs)
            sharded = run.policy.shard(batch, run.policy.plan_rows(batch, "evaluate"))
            logprobs = _reference_logprobs(run, sharded) if self._needs_reference else None
            values = run.policy.evaluate(sharded, self._loss, logprobs)
            # Sums and counts are merged, so batches of different size weigh by their pairs.
            merged = merge_metrics([merged, values])
        return {_short_name(name): value for name, value in merged.items()}


def _reference_logprobs(run: TrainingRun, sharded: ShardedBatch) -> Logprobs:
    """Compute the log-probs of the reference."""
    # The loss compares likelihoods under the models, whatever the sampling parameters.
    return run.policy.compute_logprobs(sharded, ["reference_logprobs"], as_sampled=False)


def _short_name(metric: str) -> str:
    """Return e.g. `loss` for `policy/loss`, `accuracy` for `rm/accuracy`, and `rewards_chosen` for
    `rewards/chosen`.
    """
    section, _, rest = metric.partition("/")
    return rest if section in ("policy", "rm") else metric.replace("/", "_")
