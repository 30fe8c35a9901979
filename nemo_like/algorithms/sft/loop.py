"""Supervised fine-tuning. One step: rows, plan, one optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from nemo_like.algorithms.run import open_epochs
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.algorithms.sft.data import open_loader, open_source
from nemo_like.config.paths import resolve_paths
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.loader import BatchLoader
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import NllLoss
from nemo_like.metrics import ExpMean, Mean, Metric, Metrics, merge_metrics
from nemo_like.policy.policy import Policy
from nemo_like.training.epochs import run_epochs
from nemo_like.training.model_files import open_model_spec
from nemo_like.training.reporting import StepWork, plan_metrics
from nemo_like.training.run import RunResult, TrainingRun
from nemo_like.training.run_data import ExampleSource, named_metrics
from nemo_like.training.skipped_steps import TrainedBatch, train


def run_sft(config: SftRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    # The driver plans, so it needs the sizes of the model.
    loader = open_loader(config, source, open_model_spec(config.policy))
    return run_epochs(
        config.sft,
        source,
        loader,
        lambda: _Task(config, source, loader),
        open_epochs(config, source.data, loader),
    )


class _Task:
    """Implements `EpochTask`."""

    def __init__(
        self,
        config: SftRunConfig,
        source: ExampleSource[EncodedRow],
        loader: BatchLoader[EncodedRow],
    ) -> None:
        """Encode the validation rows. Raises ConfigError for a bad row."""
        data = source.data
        self._loader = loader
        self._loss = NllLoss(sources=data.train.mixture.names if data.train.mixture else ())
        self._validation = source.validation_batches()
        self._answers: Callable[[TrainingRun, int], Metrics] | None = None
        """Scores answers to the validation prompts; None unless answers are generated."""
        if config.sft.val_generate:
            # Imported on demand: other runs need neither generation nor environments.
            from nemo_like.algorithms.sft.validation import open_answers

            self._answers = open_answers(source)

    def show_rows(self, run: TrainingRun) -> None:
        run.show_rows(self._loader)

    def train_step(self, run: TrainingRun, step: int) -> StepWork:
        loader = self._loader
        batch = BatchedDataDict(collate(run.next_rows(loader)))
        sources = loader.batch_sources()
        if sources is not None:
            batch["source"] = sources
        plan, sharded = run.plan_and_shard(batch, step, plan=loader.plan)
        trained = TrainedBatch(
            step=step + 1, batch=batch, locations=loader.batch_locations(), columns={}
        )
        with run.log.timers("train"), run.workers.policy_onloaded():
            metrics = train(run, sharded, trained, self._loss)
        run.log.add(metrics | _perplexity("policy/perplexity", metrics["policy/loss"]))
        # A stream knows the rows that its plan does not have.
        of_batch = {name: Mean(value) for name, value in loader.batch_metrics().items()}
        run.log.add(plan_metrics(plan) | of_batch)
        return StepWork.of(plan)

    def validate(self, run: TrainingRun, step: int) -> Metrics:
        """Return the validation loss; with `sft.val_generate` also the reward of answers."""
        metrics: Metrics = {}
        with run.log.timers("validation"):
            with run.workers.policy_onloaded():
                for name, batches in self._validation.items():
                    metrics |= named_metrics(name, evaluate_batches(run.policy, batches))
            if self._answers is not None:
                metrics |= self._answers(run, step)
        return metrics


def evaluate_batches(policy: Policy, batches: Iterable[Sequence[EncodedRow]]) -> Metrics:
    """Return loss, perplexity and token accuracy over all rows; nothing if there are none."""
    metrics: Metrics = {}
    for rows in batches:
        batch = BatchedDataDict(collate(rows))
        sharded = policy.shard(batch, policy.plan_rows(batch, "evaluate"))
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
