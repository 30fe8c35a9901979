"""GRPO (Shao et al. 2024): group-relative policy optimization.

One step: prompts, rollout, plan, log-probs, advantages, optimizer steps, weight synchronization.
"""

from __future__ import annotations

import logging

from nemo_like.algorithms.grpo.config import GrpoRunConfig, asynchronous_warnings
from nemo_like.algorithms.grpo.data import num_optimizer_steps, open_source
from nemo_like.algorithms.grpo.records import TrainedRollout, save_rollout
from nemo_like.algorithms.grpo.rollouts import RolloutPipeline, StepRollout
from nemo_like.algorithms.grpo.update import train_on_rollout
from nemo_like.config.paths import resolve_paths
from nemo_like.data.loader import RowLoader
from nemo_like.losses import RolloutLoss, rollout_loss
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.run import RunResult, TrainingRun, open_training_run
from nemo_like.training.run_data import ExampleSource, prompt_sets
from nemo_like.training.steps import (
    AnswerSampling,
    is_due,
    score_answers,
    show_rollout,
    stop_if_too_many,
)

logger = logging.getLogger(__name__)


def run_grpo(config: GrpoRunConfig) -> RunResult:
    """Train as configured; return paths and last metrics. Raises ConfigError for wrong input."""
    config = resolve_paths(config)
    source = open_source(config)
    loader = source.loader()
    source.encode_ahead(loader.order.upcoming(_max_num_prompts(config)))
    return _train(config, source, loader)


def _max_num_prompts(config: GrpoRunConfig) -> int:
    """Return the number of prompts that a run may need."""
    tries = 1
    if config.grpo.dynamic_sampling.enabled:
        tries += config.grpo.dynamic_sampling.max_refills
    return config.grpo.max_num_steps * config.grpo.num_prompts_per_step * tries


def _train(
    config: GrpoRunConfig, source: ExampleSource[Prompt], loader: RowLoader[Prompt]
) -> RunResult:
    total = config.grpo.max_num_steps
    val_sets = prompt_sets(config, source.data.encoder, source.data.validation)
    sampling = AnswerSampling(
        temperature=config.grpo.val_temperature,
        num_samples=config.grpo.val_num_samples,
        pass_reward=config.grpo.val_pass_reward,
    )
    loss = rollout_loss(config.loss_fn, config.policy.generation.max_new_tokens)
    with open_training_run(
        config,
        source.data,
        num_steps=total,
        num_optimizer_steps=num_optimizer_steps(config, source),
    ) as run:
        for warning in asynchronous_warnings(config):
            logger.warning(warning)
        step = run.resume(loader)
        if step > 0:
            # The generator has loaded the initial weights.
            with run.workers.policy_onloaded():
                run.sync_weights(step)
        elif config.grpo.val_at_start:
            run.add_metrics(score_answers(run, val_sets, step, sampling))
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
                    trained = _update(run, config, pipeline, taken, loss, step)
                step += 1
                phase.advance()
                if step < total and config.grpo.max_staleness > 0:
                    # Now, so that the generator has work while this step is logged and saved.
                    pipeline.start(step)
                # The generator has the weights of `step` since the update.
                if is_due(step, config.grpo.val_period, is_last=step == total):
                    run.add_metrics(score_answers(run, val_sets, step, sampling))
                run.add_generator_metrics()
                with run.rollouts.background():
                    save_rollout(run, trained, step)
                    run.log_step(step, trained.work)
                    stop_if_too_many(run, step, pipeline.position)
                    run.save_if_due(step, pipeline.position, is_last=step == total)
        return run.finalize(step)


def _update(
    run: TrainingRun,
    config: GrpoRunConfig,
    pipeline: RolloutPipeline,
    taken: StepRollout,
    loss: RolloutLoss,
    step: int,
) -> TrainedRollout:
    """Train on the rollout and copy the new weights to the generator.

    The rollouts of later steps, if any were started, run meanwhile.
    """
    with run.workers.policy_onloaded():
        with run.rollouts.background():
            trained = train_on_rollout(run, config, taken, loss, step)
            if is_due(step + 1, config.grpo.reference_update_period, is_last=False):
                with run.timers("reference_update"):
                    run.policy.update_reference()
        pipeline.prepare_update()
        # Still inside: the weights are read from the devices.
        with run.timers("weight_sync"):
            run.sync_weights(step + 1)
    run.add_metrics(taken.metrics())
    return trained
