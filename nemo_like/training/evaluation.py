"""Answers to held-out prompts, generated and scored: the number a run is judged by."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.generation.generator import SamplingParams
from nemo_like.metrics import Metrics, Timers
from nemo_like.progress import Sample
from nemo_like.rollout.prompt import Prompt
from nemo_like.rollout.rollout import Rollout, collect, row_seeds
from nemo_like.training.run import Job

_SEED_OFFSET = 2**31
"""Keeps the sampling streams of validation apart from those of training steps."""


def is_due(step: int, period: int, total: int) -> bool:
    """Whether something with `period` (0: never in between) happens after `step` of `total`; it
    always does at the end.
    """
    return step == total or (period > 0 and step % period == 0)


def score_answers(
    job: Job, prompts: Sequence[Prompt], step: int, temperature: float = 0.0
) -> Metrics:
    """Metrics `validation/*` of one completion per prompt; none without prompts.

    The generator must have the weights of `step`; RuntimeError if its completions carry another
    version.
    """
    if not prompts:
        return {}
    assert job.workers.generator is not None and job.workers.rewards is not None, (
        "a run that validates generates"
    )
    config = job.config
    with job.progress.phase("validation", len(prompts)) as phase, job.workers.generator_onloaded():
        rollout = collect(
            prompts,
            job.workers.generator,
            job.workers.rewards,
            job.encoder.tokenizer,
            group_size=1,
            sampling=SamplingParams.from_config(config.policy.generation, temperature=temperature),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=row_seeds(config.seed, _SEED_OFFSET + step, len(prompts)),
            weight_version=step,
            timers=Timers(),
        )
        phase.advance(len(prompts))
    show_rollout(job, rollout, f"validation sample at step {step}")
    wanted = ("reward/mean", "generation/completion_length_mean", "generation/truncated_share")
    values = rollout.metrics()
    metrics: Metrics = {f"validation/{name.replace('/', '_')}": values[name] for name in wanted}
    metrics |= {
        f"validation/{name}_mean": values[f"reward/{name}_mean"] for name in rollout.components
    }
    return metrics


def show_rollout(job: Job, rollout: Rollout, title: str) -> None:
    """Print the first few samples with their rewards."""
    samples = []
    for record in rollout.records()[: job.config.logger.num_samples_shown]:
        notes = {
            name.removeprefix("reward_"): f"{record[name]:g}"
            for name in record
            if name.startswith("reward_")
        }
        samples.append(
            Sample(
                ((record["prompt"], False), ("\n", False), (record["completion"], True)),
                reward=record["reward"],
                notes={"answer": str(record["answer"]), **notes, "finish": record["finish_reason"]},
            )
        )
    job.progress.show_samples(samples, title)
