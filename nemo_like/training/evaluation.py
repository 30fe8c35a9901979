"""Validation by reward: completions for the validation prompts, generated and scored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.generation.requests import SamplingParams
from nemo_like.metrics import Metrics
from nemo_like.rollout.conversations import Prompt
from nemo_like.rollout.metrics import answer_metrics
from nemo_like.rollout.records import record_sample
from nemo_like.rollout.rows import Rollout, row_seeds
from nemo_like.training.data_sets import PromptSet, named_metrics, source_metrics
from nemo_like.training.run import TrainingRun

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


def is_due(step: int, period: int, *, is_last: bool) -> bool:
    """Return True every `period` steps (0: never) and always at the last step."""
    return is_last or (period > 0 and step % period == 0)


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
    config = run.config
    with run.progress.phase("validation", len(prompts)) as phase, run.generating():
        # One job for all sets, so that the generator is idle once, at the end.
        job = run.rollouts.start(
            prompts,
            group_size=sampling.num_samples,
            sampling=SamplingParams.from_config(
                config.policy.generation, temperature=sampling.temperature
            ),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=answer_seeds(config.seed, step, len(prompts) * sampling.num_samples),
        )
        rollout = run.finish_rollout(job)
        rollout.check_versions(step, step)
        phase.advance(len(prompts))
    show_rollout(run, rollout, f"validation sample at step {step}")
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
    """Return the metrics of one set, whose answers are `rows` int64 [n], and of its sources."""

    def metrics_of(selected: np.ndarray) -> Metrics:
        return answer_metrics(
            rollout, selected, num_samples=sampling.num_samples, pass_reward=sampling.pass_reward
        )

    if len(rows) == 0:
        return {}
    metrics = named_metrics(prompts.name, metrics_of(rows))
    if prompts.sources is None:
        return metrics
    source_of_row = np.repeat(np.array(prompts.sources), sampling.num_samples)
    for source in sorted(set(prompts.sources)):
        of_source = metrics_of(rows[source_of_row == source])
        metrics |= source_metrics(prompts.name, source, of_source)
    return metrics


def show_rollout(run: TrainingRun, rollout: Rollout, title: str) -> None:
    """Print the first `logger.num_samples_shown` rows of a rollout with their rewards."""
    records = rollout.records()[: run.config.logger.num_samples_shown]
    run.progress.show_samples([record_sample(record) for record in records], title)
