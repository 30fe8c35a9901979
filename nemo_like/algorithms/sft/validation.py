"""Answers to the validation prompts of SFT (`sft.val_generate`)."""

from __future__ import annotations

from collections.abc import Callable

from nemo_like.data.jagged import EncodedRow
from nemo_like.metrics import Metrics
from nemo_like.training.prompts import prompt_sets
from nemo_like.training.run import TrainingRun
from nemo_like.training.run_data import ExampleSource
from nemo_like.training.validation_answers import score_answers


def open_answers(source: ExampleSource[EncodedRow]) -> Callable[[TrainingRun, int], Metrics]:
    """Return a function that samples and scores answers after a step, and returns their metrics.

    Raises ConfigError for a bad row of a validation file.
    """
    data = source.data
    sets = prompt_sets(data.encoder, source.settings.limits, data.validation)

    def score(run: TrainingRun, step: int) -> Metrics:
        # SFT generates only here, so the weights are not copied after every step.
        with run.workers.policy_onloaded():
            run.rollouts.sync_weights(step)
        return score_answers(run, sets, step)

    return score
