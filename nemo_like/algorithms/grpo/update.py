"""Training on one rollout: log-probs, advantages, and one or more passes of optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nemo_like.algorithms.grpo.advantages import rollout_advantages, without_truncated
from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.records import TrainedRollout, fetch_logprobs
from nemo_like.algorithms.grpo.rollouts import StepRollout
from nemo_like.data.columns import take_rows
from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import RolloutLoss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.policy.logprob_store import LogprobName
from nemo_like.training.reporting import StepWork, plan_metrics
from nemo_like.training.run import TrainingRun, plan_rows
from nemo_like.training.steps import TrainedBatch, train_steps


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
        )
    num_epochs = config.grpo.num_epochs_per_rollout
    plan, sharded = run.plan_and_shard(batch, step)
    loss = loss.for_num_steps(plan.num_steps * num_epochs)
    names = _logprob_names(config, loss)
    logprobs = None
    fetched: dict[str, Jagged] = {}
    if names:
        with run.timers("logprobs"):
            logprobs = run.policy.compute_logprobs(sharded, names)
            if num_epochs > 1 or config.has_kl_in_reward:
                fetched = run.policy.fetch_logprobs(logprobs)
    advantages = rollout_advantages(config, rollout, fetched)
    # Rows are prompt-major: the completions of a prompt are consecutive.
    locations = np.repeat(taken.locations, config.grpo.num_generations_per_prompt)
    trained = TrainedBatch(
        step=step + 1,
        batch=batch,
        locations=locations.tolist(),
        columns={"advantages": advantages.column},
    )
    # No pass computes them where the training pass has the same values.
    keep_logprobs = config.logger.save_rollouts and "prev_logprobs" not in names
    with run.timers("train"):
        steps = train_steps(run, sharded, trained, loss, logprobs, keep_logprobs=keep_logprobs)
    recorded = fetch_logprobs(run, sharded, logprobs, fetched)
    for epoch in range(1, num_epochs):
        shuffled = _shuffled(config, trained, advantages.column, fetched, epoch)
        steps += _train_again(run, shuffled, loss)
    run.add_metrics(advantages.metrics)
    run.add_metrics(merge_metrics(steps) | plan_metrics(plan))
    return TrainedRollout(
        rollout=rollout,
        locations=trained.locations,
        columns={**trained.columns, **recorded},
        advantages=advantages.rows,
        optimizer_steps=steps,
        work=StepWork.of(plan, num_logprob_passes=len(names), num_epochs=num_epochs),
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
    config: GrpoRunConfig,
    trained: TrainedBatch,
    advantages: np.ndarray | Jagged,
    logprobs: Mapping[str, Jagged],
    epoch: int,
) -> TrainedBatch:
    """Return the rows of a rollout in the order of pass `epoch`, with their log-probs.

    `advantages` are float32 [B], or [T] per token; `logprobs` are float32 [T] each.
    """
    batch = trained.batch
    order = epoch_order(config.seed, trained.step, epoch, batch.size)
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
    with run.timers("plan"):
        plan = plan_rows(run.policy, trained.batch)
    with run.timers("shard"):
        sharded = run.policy.shard(trained.batch, plan)
    with run.timers("train"):
        return train_steps(run, sharded, trained, loss)
