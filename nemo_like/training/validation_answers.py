"""Validation by answers: the model answers the prompts of the validation files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_like.config.rollout import GenerationConfig
from nemo_like.generation.requests import SamplingParams
from nemo_like.metrics import Metrics
from nemo_like.rollout.answers import answer_metrics
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.records import record_sample
from nemo_like.rollout.rows import Rollout, row_seeds
from nemo_like.training.prompts import PromptSet
from nemo_like.training.run import TrainingRun
from nemo_like.training.run_data import named_metrics

_SEED_OFFSET = 2**31
"""Separates the sampling streams of validation and of training steps."""


@dataclass(frozen=True, kw_only=True)
class AnswerSampling:
    """How validation answers are sampled and counted."""

    temperature: float = 0.0
    num_samples: int = 1
    """Answers per prompt."""
    pass_reward: float = 1.0
    """An answer with at least this reward is correct, for avg@n and pass@k."""
    top_p: float | None = None
    """None, here and below: as in training."""
    top_k: int | None = None
    max_new_tokens: int | None = None

    def applied(self, config: GenerationConfig) -> GenerationConfig:
        """Return the config of generation with the values of validation answers."""
        return replace(
            config,
            temperature=self.temperature,
            top_p=config.top_p if self.top_p is None else self.top_p,
            top_k=config.top_k if self.top_k is None else self.top_k,
            max_new_tokens=self.max_new_tokens or config.max_new_tokens,
        )


def answer_seeds(seed: int, step: int, num_rows: int) -> np.ndarray:
    """Return the seed of each validation answer, uint64 [num_rows].

    `seed` is the seed of the run. Fewer rows have the seeds of the first ones.
    """
    return row_seeds(seed, _SEED_OFFSET + step, num_rows)


def score_answers(
    run: TrainingRun,
    sets: Sequence[PromptSet],
    step: int,
    sampling: AnswerSampling = AnswerSampling(),
) -> Metrics:
    """Generate answers to the prompts of all sets, score them and return `validation/*`.

    Without prompts there are no metrics. The generator must have the weights of `step`: raises
    RuntimeError if its completions have another version.
    """
    prompts: list[Prompt] = []
    for each in sets:
        prompts += each.prompts
    if not prompts:
        return {}
    policy, rollouts = run.settings.policy, run.rollouts
    with run.progress.phase("validation", len(prompts)) as phase, rollouts.generating():
        # One job for all sets, so that the generator is idle once, at the end.
        job = rollouts.collector.start(
            prompts,
            group_size=sampling.num_samples,
            sampling=SamplingParams.from_config(sampling.applied(policy.generation)),
            max_total_length=policy.max_total_sequence_length,
            seeds=answer_seeds(run.settings.seed, step, len(prompts) * sampling.num_samples),
        )
        rollout = rollouts.finish(job)
        rollout.check_versions(step, step)
        phase.advance(len(prompts))
    show_rollout(run, rollout, "validation", f"validation samples at step {step}")
    metrics: Metrics = {}
    first_row = 0
    for each in sets:
        num_rows = len(each.prompts) * sampling.num_samples
        rows = np.arange(first_row, first_row + num_rows)
        metrics |= _set_metrics(rollout, each, rows, sampling)
        first_row += num_rows
    return metrics


def _set_metrics(
    rollout: Rollout, prompts: PromptSet, rows: np.ndarray, sampling: AnswerSampling
) -> Metrics:
    """Return the metrics of one set, whose answers are `rows` int64 [n]."""
    if len(rows) == 0:
        return {}
    metrics = answer_metrics(
        rollout, rows, num_samples=sampling.num_samples, pass_reward=sampling.pass_reward
    )
    return named_metrics(prompts.name, metrics)


def show_rollout(run: TrainingRun, rollout: Rollout, name: str, title: str) -> None:
    """Print and log the first `logger.num_samples_shown` rows of a rollout with their rewards."""
    num_shown = min(run.logger.num_samples_shown, rollout.batch.size)
    samples = [record_sample(record) for record in rollout.records(rows=range(num_shown))]
    run.progress.show_table(samples, title)
    run.log.media.samples[f"samples/{name}"] = samples
