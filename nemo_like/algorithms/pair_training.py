"""Training on preference pairs: the step, validation and samples of DPO and of reward models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from nemo_like.algorithms.pair_data import pair_samples
from nemo_like.data.loader import RowLoader
from nemo_like.data.preferences import PreferencePair
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import Loss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.policy import Logprobs, ShardedBatch
from nemo_like.training.reporting import StepWork, plan_metrics
from nemo_like.training.run import TrainingRun, plan_rows
from nemo_like.training.run_data import named_metrics
from nemo_like.training.steps import TrainedBatch, train

ExampleT = TypeVar("ExampleT")


@dataclass(frozen=True, kw_only=True)
class PairTask(Generic[ExampleT]):
    """Implements `EpochTask` for examples that have one preference pair each."""

    loader: RowLoader[ExampleT]
    validation: Mapping[str, list[list[ExampleT]]]
    """The examples of each validation set, in batches."""
    loss: Loss
    collate: Callable[[Sequence[ExampleT]], BatchedDataDict]
    """Returns the batch of 2N rows of N examples; see `pair_data.collate_pairs`."""
    pair_of: Callable[[ExampleT], PreferencePair]
    short_name: Callable[[str], str]
    """Returns the name of a metric of the loss in the metrics of a validation set."""
    needs_reference: bool = False
    """Compute the column `reference_logprobs` for the loss."""

    def show_rows(self, run: TrainingRun) -> None:
        """Print the first pairs of the file, decoded, with the completions highlighted."""
        samples = []
        for example in self.loader.first_rows(run.config.logger.num_samples_shown):
            samples += pair_samples(run.encoder, self.pair_of(example))
        run.progress.show_samples(samples, "training row")

    def train_step(self, run: TrainingRun, step: int) -> StepWork:
        """Train on the 2N rows of the next pairs."""
        batch = self.collate(run.next_rows(self.loader, step))
        plan, sharded = run.plan_and_shard(batch, step)
        trained = TrainedBatch(
            step=step + 1,
            batch=batch,
            locations=np.repeat(self.loader.batch_locations(), 2).tolist(),
            columns={},
        )
        with run.workers.policy_onloaded():
            logprobs = None
            if self.needs_reference:
                with run.timers("logprobs"):
                    logprobs = _reference_logprobs(run, sharded)
            with run.timers("train"):
                run.add_metrics(train(run, sharded, trained, self.loss, logprobs))
        run.add_metrics(plan_metrics(plan))
        return StepWork.of(plan, num_logprob_passes=int(self.needs_reference))

    def validate(self, run: TrainingRun, step: int) -> Metrics:
        """Return the metrics of the loss over the pairs of each validation set."""
        metrics: Metrics = {}
        with run.timers("validation"), run.workers.policy_onloaded():
            for name, batches in self.validation.items():
                metrics |= named_metrics(name, self._set_metrics(run, batches))
        return metrics

    def _set_metrics(self, run: TrainingRun, batches: list[list[ExampleT]]) -> Metrics:
        merged: Metrics = {}
        for examples in batches:
            batch = self.collate(examples)
            sharded = run.policy.shard(batch, plan_rows(run.policy, batch, "evaluate"))
            logprobs = _reference_logprobs(run, sharded) if self.needs_reference else None
            values = run.policy.evaluate(sharded, self.loss, logprobs)
            # Sums and counts are merged, so batches of different size weigh by their pairs.
            merged = merge_metrics([merged, values])
        return {self.short_name(name): value for name, value in merged.items()}


def _reference_logprobs(run: TrainingRun, sharded: ShardedBatch) -> Logprobs:
    """Compute the log-probs of the reference."""
    # The loss compares likelihoods under the models, whatever the sampling parameters.
    return run.policy.compute_logprobs(sharded, ["reference_logprobs"], as_sampled=False)
