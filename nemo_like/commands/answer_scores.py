"""Scores of reward models for sampled answers, computed when all answers are complete.

The generator has ended by then, so that a reward model has the device for itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from nemo_like.commands.answer_config import AnswerRunConfig, weight_files
from nemo_like.commands.answer_files import Record
from nemo_like.commands.answer_rows import PromptFile
from nemo_like.config.build import to_dict
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import ClusterConfig
from nemo_like.environments.reward import RewardSample
from nemo_like.generation.requests import SamplingParams
from nemo_like.rollout.collector import RolloutJob
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress
from nemo_like.training.rollout_workers import (
    RewardModelFiles,
    open_reward_models,
    start_reward_models,
)
from nemo_like.training.workers import group_starter

_NO_INFLUENCE = ("mb_tokens", "num_workers", "max_restarts")
"""Keys of a reward model that change its scores by rounding only."""

Placed = tuple[PromptFile, int, Record]
"""A file of prompts, the index of a prompt in it, and the record of the prompt."""


def open_models(config: AnswerRunConfig) -> dict[str, RewardModelFiles]:
    """Open the files of `reward.models`, before answers are sampled.

    Raises ConfigError for a model that cannot be used, and with an environment.
    """
    if config.reward.models and config.environment.path is not None:
        raise ConfigError(
            "reward.models and environment.path are both set, and `nemo-like eval` keeps the last"
            " turn of a conversation only, which a reward model cannot score by itself; name other"
            " rewards in --reward"
        )
    return open_reward_models(config)


def described_models(config: AnswerRunConfig) -> dict[str, Any]:
    """Return what determines the scores, as JSON values."""
    described = {}
    for name, model in config.reward.models.items():
        values = to_dict(model)
        for key in _NO_INFLUENCE:
            del values[key]
        described[name] = values | {"weights": weight_files(model.model_name)}
    return described


def add_model_scores(
    config: AnswerRunConfig, files: Mapping[str, RewardModelFiles], placed: Sequence[Placed]
) -> None:
    """Score the answers of all records that have no scores yet; add them to their rewards.

    The models run one after the other in this process. Raises RewardError as
    `ModelRewards.score` does.
    """
    names = list(config.reward.models)
    missing = [each for each in placed if not set(names) <= set(each[2]["components"])]
    if not missing:
        return
    # In one process, whatever the layout of the generator was.
    cluster = ClusterConfig(
        backend="local", gpus_per_node=min(config.cluster.gpus_per_node, 1), env=config.cluster.env
    )
    local = replace(config, cluster=cluster)
    progress = Progress(sys.stderr)
    job = _job(config, missing)
    with ExitStack() as closing, progress.phase("scoring with reward models"):
        start = group_starter(local, closing, progress, logs=None)
        models = start_reward_models(local, dict(files), start, progress)
        assert models is not None, "called with reward models"
        models.score(job)
    first = 0
    for _, _, record in missing:
        rows = range(first, first + len(record["completions"]))
        first = rows.stop
        _add(record, job, rows, names)


def _job(config: AnswerRunConfig, placed: Sequence[Placed]) -> RolloutJob:
    """Return the answers of some records as a rollout without rewards."""
    prompts: list[Prompt] = []
    samples: list[RewardSample] = []
    for file, index, record in placed:
        prompt = file.prompts[index]
        for text in record["completions"]:
            prompts.append(prompt)
            sample = RewardSample(
                prompt=prompt.text, completion=text, answer=prompt.answer, row=prompt.row
            )
            samples.append(sample)
    job = RolloutJob(prompts, 1, SamplingParams.from_config(config.policy.generation))
    job.samples = dict(enumerate(samples))
    return job


def _add(record: Record, job: RolloutJob, rows: range, names: Sequence[str]) -> None:
    """Add the scores of the answers `rows` of a job to their record."""
    for position, row in enumerate(rows):
        record["rewards"][position] += float(job.rewards[row])
        problem = job.reward_problems.get(row)
        if problem is None:
            continue
        errors = record.setdefault("errors", [None] * len(rows))
        errors[position] = errors[position] or str(problem)
        if job.drops_problems:
            record["is_scored"][position] = False
    for name in names:
        record["components"][name] = [float(job.components[name][row]) for row in rows]
