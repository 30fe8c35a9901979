"""Supervised fine-tuning: rows -> plan -> one optimizer step, until the steps or the epochs are
over.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

from nemo_like.config.paths import resolve_paths
from nemo_like.config.schema import SftRunConfig
from nemo_like.data.collate import EncodedRow, collate
from nemo_like.data.loader import RowLoader
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from nemo_like.losses import NllLoss
from nemo_like.metrics import Metrics, merge_metrics
from nemo_like.rollout.prompt import Prompt
from nemo_like.training.dataset import SftSource
from nemo_like.training.evaluation import is_due, score_answers
from nemo_like.training.run import Job, RunResult, open_job, plan_metrics
from nemo_like.training.skipped_steps import TrainedBatch, stop_if_too_many, train


def run_sft(config: SftRunConfig) -> RunResult:
    """Train as `config` says and return the paths and last metrics. Raises ConfigError for wrong
    input.
    """
    config = resolve_paths(config)
    source = SftSource.open(config)
    loader = source.loader()
    with closing(source.rows):
        source.start_encoding(loader)
        return _train(config, source, loader)


def _train(config: SftRunConfig, source: SftSource, loader: RowLoader[EncodedRow]) -> RunResult:
    total = source.num_steps
    held_out = HeldOut(
        list(source.validation_batches()),
        source.validation_prompts() if config.sft.val_generate else [],
    )
    with open_job(
        config,
        source.encoder,
        generates=config.sft.val_generate,
        needs_reference=False,
        num_steps=total,
        num_optimizer_steps=total,
    ) as job:
        source.finish_encoding(job.progress)
        step = job.begin(loader)
        total = source.last_step(loader, step)
        if step == 0:
            job.show_rows(loader)
            if config.sft.val_at_start:
                job.note(validate(job, held_out, step))
                job.log(step)
        loss = NllLoss()
        with job.progress.phase("sft", total, unit="steps", done=step) as phase:
            while step < total:
                job.stop_if_requested(step, loader)
                with job.timers("step"):
                    batch = BatchedDataDict(collate(job.next_rows(loader, step)))
                    plan, sharded = job.plan_and_shard(batch, step)
                    with job.timers("train"), job.workers.policy_onloaded():
                        trained = TrainedBatch(
                            step=step + 1,
                            batch=batch,
                            locations=loader.batch_locations(),
                            columns={},
                        )
                        job.note(train(job, sharded, trained, loss))
                step += 1
                job.note(plan_metrics(plan))
                if is_due(step, config.sft.val_period, total):
                    job.note(validate(job, held_out, step))
                job.log_step(step, batch["length"])
                stop_if_too_many(job, step, loader)
                job.save_if_due(step, loader, is_last=step == total)
                phase.advance()
        return job.finish(step)


@dataclass(frozen=True)
class HeldOut:
    """Rows a run is validated on, encoded before it starts, so that a bad one cannot end it at its
    last step.
    """

    batches: list[list[EncodedRow]]
    prompts: list[Prompt]
    """Empty unless answers are generated."""


def validate(job: Job, held_out: HeldOut, step: int) -> Metrics:
    """Loss on the held-out rows, and with `sft.val_generate` the reward of answers generated for
    their prompts.
    """
    metrics: Metrics = {}
    with job.timers("validation"):
        with job.workers.policy_onloaded():
            for rows in held_out.batches:
                batch = BatchedDataDict(collate(rows))
                sharded = job.policy.shard(batch, job.policy.plan(batch["length"], "evaluate"))
                part = job.policy.evaluate(sharded, NllLoss())
                metrics = merge_metrics([metrics, {"validation/loss": part["policy/loss"]}])
        if held_out.prompts:
            with job.workers.policy_onloaded():
                job.sync_weights(step)
            metrics |= score_answers(job, held_out.prompts, step)
    return metrics
