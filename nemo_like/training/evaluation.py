"""Validation by reward: completions for the validation prompts, generated and scored."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.generation.sampling_params import SamplingParams
from nemo_like.metrics import Metrics
from nemo_like.rollout.prompt import Prompt
from nemo_like.rollout.records import record_sample
from nemo_like.rollout.rollout import Rollout, row_seeds
from nemo_like.training.run import TrainingRun

_SEED_OFFSET = 2**31
"""Separates the sampling streams of validation from those of training steps."""
_VALIDATION_METRICS = (
    "reward/mean",
    "generation/completion_length_mean",
    "generation/truncated_share",
)


def is_due(step: int, period: int, *, is_last: bool) -> bool:
    """Return True every `period` steps (0: never) and always at the last step."""
    return is_last or (period > 0 and step % period == 0)


def score_answers(
    run: TrainingRun,
    prompts: Sequence[Prompt],
    step: int,
    temperature: float = 0.0,
) -> Metrics:
    """Generate one completion per prompt, score it and return the metrics `validation/*`.

    Without prompts there are no metrics. The generator must have the weights of `step`: raises
    RuntimeError if its completions have another version.
    """
    if not prompts:
        return {}
    config = run.config
    with run.progress.phase("validation", len(prompts)) as phase, run.generating():
        job = run.rollouts.start(
            prompts,
            # At temperature 0, the default, all completions of a prompt would be equal.
            group_size=1,
            sampling=SamplingParams.from_config(config.policy.generation, temperature=temperature),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=row_seeds(
                config.seed,
                _SEED_OFFSET + step,
                len(prompts),
            ),
        )
        rollout = run.finish_rollout(job)
        rollout.check_versions(step, step)
        phase.advance(len(prompts))
    show_rollout(run, rollout, f"validation sample at step {step}")
    values = rollout.metrics()
    metrics: Metrics = {}
    for name in _VALIDATION_METRICS:
        metrics[f"validation/{name.replace('/', '_')}"] = values[name]
    # The value of each reward function, because the weights of the sum are a choice of the run.
    for name in rollout.components:
        metrics[f"validation/{name}_mean"] = values[f"reward/{name}_mean"]
    return metrics


def show_rollout(
    run: TrainingRun,
    rollout: Rollout,
    title: str,
) -> None:
    """Print the first `logger.num_samples_shown` rows of a rollout with their rewards."""
    records = rollout.records()[: run.config.logger.num_samples_shown]
    run.progress.show_samples([record_sample(record) for record in records], title)
