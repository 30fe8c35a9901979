"""Group-relative policy optimisation: prompts -> rollout -> plan -> outputs -> advantages -> updates
-> new weights.
"""

from __future__ import annotations

from contextlib import closing

import numpy as np

from nemo_like.algorithms.advantages import group_advantages
from nemo_like.config.paths import resolve_paths
from nemo_like.config.schema import GrpoRunConfig
from nemo_like.data.loader import RowLoader
from nemo_like.files import write_json_lines
from nemo_like.generation.generator import SamplingParams
from nemo_like.losses import ClippedPolicyGradientLoss
from nemo_like.rollout.prompt import Prompt
from nemo_like.rollout.rollout import Rollout, collect, row_seeds
from nemo_like.training.dataset import PromptSource
from nemo_like.training.evaluation import is_due, score_answers, show_rollout
from nemo_like.training.run import Job, RunResult, open_job, plan_metrics
from nemo_like.training.skipped_steps import TrainedBatch, stop_if_too_many, train


def run_grpo(config: GrpoRunConfig) -> RunResult:
    """Train as `config` says and return the paths and last metrics. Raises ConfigError for wrong
    input.
    """
    config = resolve_paths(config)
    source = PromptSource.open(config)
    loader = source.loader()
    with closing(source.rows):
        source.start_encoding(loader)
        return _train(config, source, loader)


def _train(config: GrpoRunConfig, source: PromptSource, loader: RowLoader[Prompt]) -> RunResult:
    total, held_out = config.grpo.max_num_steps, source.validation_prompts()
    loss = ClippedPolicyGradientLoss(config=config.loss_fn)
    needs_reference = config.loss_fn.reference_policy_kl_penalty > 0
    with open_job(
        config,
        source.encoder,
        generates=True,
        needs_reference=needs_reference,
        num_steps=total,
        num_optimizer_steps=source.num_optimizer_steps,
    ) as job:
        source.finish_encoding(job.progress)
        step = job.begin(loader)
        if step > 0:
            with job.workers.policy_onloaded():
                job.sync_weights(step)
        elif config.grpo.val_at_start:
            job.note(score_answers(job, held_out, step, config.grpo.val_temperature))
            job.log(step)
        with job.progress.phase("grpo", total, unit="steps", done=step) as phase:
            while step < total:
                job.stop_if_requested(step, loader)
                with job.timers("step"):
                    rollout = roll_out(job, config, loader, step)
                    plan, sharded = job.plan_and_shard(rollout.batch, step)
                    with job.workers.policy_onloaded():
                        with job.timers("logprobs"):
                            outputs = job.policy.compute_logprobs(sharded)
                        advantages = group_advantages(
                            rollout.batch["reward"], rollout.batch["group"], config.grpo.advantage
                        )
                        locations = np.repeat(
                            loader.batch_locations(), config.grpo.num_generations_per_prompt
                        ).tolist()
                        columns = {"advantages": advantages, **outputs}
                        trained = TrainedBatch(
                            step=step + 1, batch=rollout.batch, locations=locations, columns=columns
                        )
                        with job.timers("train"):
                            metrics = train(job, sharded, trained, loss)
                        with job.timers("weight_sync"):
                            job.sync_weights(step + 1)
                step += 1
                job.note(metrics | rollout.metrics() | plan_metrics(plan))
                save_rollout(job, rollout, advantages, step)
                if is_due(step, config.grpo.val_period, total):
                    job.note(score_answers(job, held_out, step, config.grpo.val_temperature))
                job.log_step(step, rollout.batch["length"], num_logprob_passes=1 + needs_reference)
                stop_if_too_many(job, step, loader)
                job.save_if_due(step, loader, is_last=step == total)
                phase.advance()
        return job.finish(step)


def roll_out(job: Job, config: GrpoRunConfig, loader: RowLoader[Prompt], step: int) -> Rollout:
    """The next prompts of the loader, answered and scored; at step 0 a few are shown."""
    generator, rewards = job.workers.generator, job.workers.rewards
    assert generator is not None and rewards is not None, "a GRPO run generates"
    prompts = job.next_rows(loader, step)
    group_size = config.grpo.num_generations_per_prompt
    with job.workers.generator_onloaded():
        rollout = collect(
            prompts,
            generator,
            rewards,
            job.encoder.tokenizer,
            group_size=group_size,
            sampling=SamplingParams.from_config(config.policy.generation),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=row_seeds(config.seed, step, len(prompts) * group_size),
            weight_version=step,
            timers=job.timers,
        )
    if step == 0:
        show_rollout(job, rollout, "rollout sample")
    return rollout


def save_rollout(job: Job, rollout: Rollout, advantages: np.ndarray, step: int) -> None:
    """Write `rollouts/step_<N>.jsonl`, one line per row."""
    if job.config.logger.save_rollouts:
        write_json_lines(
            job.run.rollouts(step), rollout.records(advantages), f"the rollouts of step {step}"
        )
