"""GRPO (Shao et al. 2024): group-relative policy optimization.

One step: prompts, rollout, plan, log-probs, advantages, optimizer steps, weight synchronization.
"""

from __future__ import annotations

import logging
from contextlib import closing

import numpy as np

from nemo_like.algorithms.grpo.advantages import group_advantages
from nemo_like.algorithms.grpo.config import GrpoRunConfig, asynchronous_warnings
from nemo_like.algorithms.grpo.data import num_optimizer_steps, open_source
from nemo_like.algorithms.grpo.records import TrainedRollout, fetch_logprobs, save_rollout
from nemo_like.algorithms.grpo.rollouts import RolloutPipeline, StepRollout
from nemo_like.config.paths import resolve_paths
from nemo_like.data.loader import RowLoader
from nemo_like.losses import RolloutLoss, rollout_loss
from nemo_like.metrics import Sum, merge_metrics
from nemo_like.rollout.prompt import Prompt
from nemo_like.training.dataset import ExampleSource, validation_prompts
from nemo_like.training.evaluation import is_due, score_answers, show_rollout
from nemo_like.training.run import RunResult, TrainingRun, open_training_run, plan_metrics
from nemo_like.training.skipped_steps import TrainedBatch, stop_if_too_many, train_steps

logger = logging.getLogger(__name__)


def run_grpo(config: GrpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    loader = source.loader()
    with closing(source.rows):
        source.start_encoding(loader.order, config.grpo.max_num_steps * loader.batch_size)
        return _train(config, source, loader)


def _train(
    config: GrpoRunConfig,
    source: ExampleSource[Prompt],
    loader: RowLoader[Prompt],
) -> RunResult:
    total = config.grpo.max_num_steps
    val_prompts = validation_prompts(config, source.data)
    loss = rollout_loss(config.loss_fn, config.policy.generation.max_new_tokens)
    with open_training_run(
        config,
        source.data.encoder,
        num_steps=total,
        num_optimizer_steps=num_optimizer_steps(config, source),
    ) as run:
        for warning in asynchronous_warnings(config):
            logger.warning(warning)
        source.finish_encoding(run.progress)
        step = run.resume(loader)
        if step > 0:
            # The generator has loaded the initial weights.
            with run.workers.policy_onloaded():
                run.sync_weights(step)
        elif config.grpo.val_at_start:
            temperature = config.grpo.val_temperature
            run.add_metrics(score_answers(run, val_prompts, step, temperature))
            run.log_metrics(step)
        pipeline = RolloutPipeline(run, config, loader, step)
        with run.progress.phase("grpo", total, unit="steps", done=step) as phase:
            while step < total and not run.stops_early:
                run.stop_if_requested(step, pipeline.position)
                with run.timers("step"):
                    pipeline.fetch(step)
                    with run.generating():
                        pipeline.start(step)
                        taken = pipeline.take(step)
                    if step == 0:
                        show_rollout(run, taken.rollout, "rollout sample")
                    trained, num_logprob_passes = _update(run, config, pipeline, taken, loss, step)
                step += 1
                if step < total and config.grpo.max_staleness > 0:
                    # Now, so that the generator has work while this step is logged and saved.
                    pipeline.start(step)
                # The generator has the weights of `step` since the update.
                if is_due(step, config.grpo.val_period, is_last=step == total):
                    temperature = config.grpo.val_temperature
                    run.add_metrics(score_answers(run, val_prompts, step, temperature))
                run.add_generator_metrics()
                with run.rollouts.background():
                    save_rollout(run, trained, step)
                    lengths = taken.rollout.batch["length"]
                    run.log_step(step, lengths, num_logprob_passes=num_logprob_passes)
                    stop_if_too_many(run, step, pipeline.position)
                    run.save_if_due(step, pipeline.position, is_last=step == total)
                phase.advance()
        return run.finalize(step)


def _update(
    run: TrainingRun,
    config: GrpoRunConfig,
    pipeline: RolloutPipeline,
    taken: StepRollout,
    loss: RolloutLoss,
    step: int,
) -> tuple[TrainedRollout, int]:
    """Train on the rollout and copy the new weights to the generator.

    The rollouts of later steps, if any were started, run meanwhile. Returns the trained rollout and
    the number of log-prob passes before training.
    """
    rollout = taken.rollout
    batch = rollout.batch
    group_size = config.grpo.num_generations_per_prompt
    with run.workers.policy_onloaded():
        with run.rollouts.background():
            plan, sharded = run.plan_and_shard(batch, step)
            loss = loss.for_num_steps(plan.num_steps)
            logprobs = None
            if loss.logprob_names:
                with run.timers("logprobs"):
                    logprobs = run.policy.compute_logprobs(sharded, loss.logprob_names)
            advantages = group_advantages(
                batch["reward"],
                batch["group"],
                config.grpo.advantage,
                batch["reward_mask"],
            )
            trained = TrainedBatch(
                step=step + 1,
                batch=batch,
                # Rows are prompt-major: the completions of a prompt are consecutive.
                locations=np.repeat(taken.locations, group_size).tolist(),
                columns={"advantages": advantages},
            )
            # No pass computes them where the training pass has the same values.
            keep_logprobs = (
                config.logger.save_rollouts and "prev_logprobs" not in loss.logprob_names
            )
            with run.timers("train"):
                steps = train_steps(
                    run, sharded, trained, loss, logprobs, keep_logprobs=keep_logprobs
                )
            columns = fetch_logprobs(run, sharded, logprobs)
        pipeline.prepare_update()
        # Still inside: the weights are read from the devices.
        with run.timers("weight_sync"):
            run.sync_weights(step + 1)
    num_effective = float(np.count_nonzero(advantages))
    run.add_metrics({"reward/num_effective_rows": Sum(num_effective)})
    run.add_metrics(merge_metrics(steps) | rollout.metrics() | plan_metrics(plan))
    trained_rollout = TrainedRollout(
        rollout=rollout,
        locations=trained.locations,
        columns={**trained.columns, **columns},
        advantages=advantages,
        optimizer_steps=steps,
    )
    return trained_rollout, len(loss.logprob_names)
