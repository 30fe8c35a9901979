"""`nemo-like eval`: score a model on validation files, or compute its perplexity on SFT rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.algorithms.sft.loop import evaluate_batches
from nemo_like.commands.answers import (
    Answers,
    AnswerSettings,
    Record,
    answer_config,
    described_settings,
    load_prompts,
    no_short_row,
    prompt_record,
    weight_files,
)
from nemo_like.commands.start import ANSWER_REWARD
from nemo_like.config.errors import ConfigError, counted, shown_path
from nemo_like.config.plain import to_dict
from nemo_like.config.schema import ClusterConfig
from nemo_like.console import say
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.formats import SFT_ROWS
from nemo_like.data.jagged import EncodedRow
from nemo_like.environments.reward import RewardSample, finite_number
from nemo_like.generation.requests import SamplingParams
from nemo_like.metrics import metric_values
from nemo_like.rollout.answers import Answer, Estimate, ScoredAnswers, answer_means, estimates
from nemo_like.rollout.collector import RolloutJob
from nemo_like.run.files import reporting_write_errors, write_text
from nemo_like.run.progress import Progress
from nemo_like.training.encoding import RowLimits, encode_conversation
from nemo_like.training.groups import group_starter
from nemo_like.training.model_files import RewardModelFiles
from nemo_like.training.prompts import PromptSet
from nemo_like.training.rollout_workers import (
    RewardModelStart,
    open_reward_models,
    start_reward_models,
)
from nemo_like.training.run_data import report_skipped, validation_key
from nemo_like.training.workers import local_policy

RESULTS = "results.json"
ANSWERS = "answers.jsonl"
CONFIDENCE = 0.95
"""Level of the intervals."""
_BATCH_ROWS = 64
_NO_INFLUENCE = ("mb_tokens", "num_workers")
"""Keys of a reward model that change its scores by rounding only."""

Results = dict[str, Any]
"""Results of one set as JSON values: `metrics` has each metric with its interval."""


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the results and return the exit code. Raises ConfigError."""
    out: Path | None = arguments.out
    if out is not None and not arguments.resume and (out / RESULTS).exists():
        raise ConfigError(
            f"--out {out} has results already; choose another directory, or keep its answers with"
            " --resume"
        )
    config = answer_config(arguments)
    if arguments.perplexity:
        results = _measure_perplexity(config)
    else:
        results = _score(config, out, resume=arguments.resume)
    text = json.dumps(results, indent=2)
    if out is not None:
        path = out / RESULTS
        with reporting_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n")
    say(text if arguments.json else _table(results))
    return 0


def _measure_perplexity(config: AnswerSettings) -> dict[str, Any]:
    """Return loss, perplexity and token accuracy of every file, computed by this process."""
    encoder = config.open_encoder()
    limits = RowLimits.of(config.policy, config.data)
    sets: dict[str, Results] = {}
    encoded: dict[str, list[EncodedRow]] = {}
    for name, rows in load_prompts(config.data, SFT_ROWS, encoder).items():
        found = EncodedRows(rows, partial(encode_conversation, encoder, limits))
        encoded[name] = [row for row in found.fetch(range(len(rows))) if row is not None]
        report_skipped(found.skipped, validation_key(name))
        num_rows = len(encoded[name])
        if num_rows == 0:
            raise no_short_row(config, name)
        sets[name or "data"] = {"num_prompts": num_rows, "num_left_out": len(rows) - num_rows}
    progress = Progress(sys.stderr)
    with local_policy(config.policy, config.cluster, seed=config.seed) as policy:
        for name, rows in encoded.items():
            batches = [rows[i : i + _BATCH_ROWS] for i in range(0, len(rows), _BATCH_ROWS)]
            with progress.phase("computing the loss"):
                values = metric_values(evaluate_batches(policy, batches))
            found = {
                metric: asdict(Estimate(value=value, low=None, high=None, method="none"))
                for metric, value in values.items()
            }
            sets[name or "data"] |= {"metrics": found}
    return {"sets": sets, "settings": described_settings(config)}


def _score(config: AnswerSettings, out: Path | None, *, resume: bool) -> dict[str, Any]:
    """Sample answers, score them, and return the results."""
    if not config.rollouts.rewards.weights and not config.rollouts.environment.is_used:
        raise ConfigError(
            "there is no reward to score answers with; set reward.functions, e.g."
            " reward.functions={answer: {path: nemo_like.environments.math.answer_reward}}"
        )
    sampling = config.sampling
    models = _open_models(config)
    answers = Answers(config, num_samples=sampling.num_samples)
    _check_answers(config, answers)

    def add_model_scores(records: list[Record]) -> None:
        if models:
            placed = zip(answers.places, records, strict=True)
            _add_model_scores(config, models, [(*place, record) for place, record in placed])

    settings = _settings(config)
    path = None if out is None else out / ANSWERS
    records = iter(
        answers.sample(path, settings, _record, resume=resume, complete=add_model_scores)
    )
    sets = {}
    for each in answers.sets:
        own = list(islice(records, len(each.prompts)))
        found = scored_answers(own)
        problems = chain.from_iterable(record.get("errors", []) for record in own)
        sets[each.name or "data"] = {
            "num_prompts": len(own),
            "num_left_out": len(each.rows) - len(own),
            "num_reward_errors": sum(problem is not None for problem in problems),
            "metrics": _estimates(found, sampling.pass_reward),
        }
    settings |= {"pass_reward": sampling.pass_reward}
    return {"sets": sets, "settings": settings, "confidence": CONFIDENCE}


def _check_answers(config: AnswerSettings, answers: Answers) -> None:
    """Raise ConfigError if completions are compared with answers, and no row has one."""
    functions = config.rollouts.rewards.functions
    names = [name for name, each in functions.items() if each.path == ANSWER_REWARD]
    prompts = chain.from_iterable(each.prompts for each in answers.sets)
    if names and all(prompt.answer is None for prompt in prompts):
        files = ", ".join(shown_path(Path(each)) for each in config.data.validation_files.values())
        raise ConfigError(
            f"no row of {files} has an answer for reward.functions.{names[0]} to compare with; set"
            " data.columns={answer: NAME} or another reward, or measure the loss of the rows with"
            " --perplexity"
        )


def _open_models(config: AnswerSettings) -> dict[str, RewardModelFiles]:
    """Open the files of `reward.models`, before answers are sampled.

    Raises ConfigError for a model that cannot be used, and with an environment.
    """
    if config.rollouts.rewards.models and config.rollouts.environment.is_used:
        raise ConfigError(
            "reward.models and environment.path are both set, and `nemo-like eval` keeps the last"
            " turn of a conversation only, which a reward model cannot score by itself; set"
            " ~reward.models"
        )
    return open_reward_models(config.rollouts.rewards.models)


def _settings(config: AnswerSettings) -> dict[str, Any]:
    """Return what determines answers and rewards, as JSON values."""
    models = {}
    for name, model in config.rollouts.rewards.models.items():
        values = to_dict(model)
        for key in _NO_INFLUENCE:
            del values[key]
        models[name] = values | {"weights": weight_files(model.model_name)}
    return described_settings(config) | {
        "num_samples": config.sampling.num_samples,
        "rewards": {
            name: to_dict(each) for name, each in config.rollouts.rewards.functions.items()
        },
        "reward_models": models,
        "on_reward_error": config.rollouts.rewards.on_error,
    }


def _record(prompts: PromptSet, index: int, answers: Sequence[Answer]) -> Record:
    record = prompt_record(prompts, index, answers)
    record["rewards"] = [answer.reward for answer in answers]
    names = answers[0].components
    record["components"] = {
        name: [finite_number(answer.components[name]) for answer in answers] for name in names
    }
    record["is_scored"] = [answer.is_scored for answer in answers]
    problems = [answer.problem for answer in answers]
    if any(problem is not None for problem in problems):
        record["errors"] = problems
    return record


def _add_model_scores(
    config: AnswerSettings,
    files: dict[str, RewardModelFiles],
    placed: Sequence[tuple[PromptSet, int, Record]],
) -> None:
    """Score the answers of all records that have no scores yet; add them to their rewards.

    The generator has ended, so that each reward model has the device for itself; they run in this
    process. Raises RewardError as `ModelRewards.score` does.
    """
    names = list(config.rollouts.rewards.models)
    missing = [each for each in placed if not set(names) <= set(each[2]["components"])]
    if not missing:
        return
    # In one process, whatever the layout of the generator was.
    cluster = ClusterConfig(
        backend="local", gpus_per_node=min(config.cluster.gpus_per_node, 1), env=config.cluster.env
    )
    settings = RewardModelStart(
        rewards=config.rollouts.rewards, data=config.data, seed=config.seed, files=files
    )
    progress = Progress(sys.stderr)
    prompts = []
    samples = []
    for each, index, record in missing:
        prompt = each.prompts[index]
        for text in record["completions"]:
            prompts.append(prompt)
            samples.append(
                RewardSample(
                    prompt=prompt.text, completion=text, answer=prompt.answer, row=prompt.row
                )
            )
    job = RolloutJob(prompts, 1, SamplingParams.from_config(config.policy.generation))
    with ExitStack() as closing, progress.phase("scoring with reward models"):
        start = group_starter(cluster, closing, progress, rollouts=config.rollouts)
        models = start_reward_models(settings, cluster, start, progress)
        assert models is not None, "called with reward models"
        models.score(job, samples)
    first = 0
    for _, _, record in missing:
        rows = range(first, first + len(record["completions"]))
        first = rows.stop
        _add_scores(record, job, rows, names)


def _add_scores(record: Record, job: RolloutJob, rows: range, names: Sequence[str]) -> None:
    """Add the scores of the answers `rows` of a job to their record."""
    for position, row in enumerate(rows):
        record["rewards"][position] += float(job.rewards[row])
        problem = job.reward_problems.get(row)
        if problem is None:
            continue
        errors = record.setdefault("errors", [None] * len(rows))
        errors[position] = errors[position] or str(problem)
        if row in job.dropped_rows:
            record["is_scored"][position] = False
    for name in names:
        record["components"][name] = [finite_number(job.components[name][row]) for row in rows]


def scored_answers(records: Sequence[Record]) -> ScoredAnswers:
    """Return the answers of P records, which have equally many, as arrays [P, n]."""
    num_samples = len(records[0]["completions"])
    # An environment may return a component in some conversations only; it is 0 in the others.
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(record["components"])
    components = {}
    for name in names:
        values = [record["components"].get(name, [0.0] * num_samples) for record in records]
        components[name] = np.array(values, dtype=np.float64)
    reasons = np.array([record["finish_reasons"] for record in records])
    return ScoredAnswers(
        rewards=np.array([record["rewards"] for record in records], dtype=np.float64),
        is_scored=np.array([record["is_scored"] for record in records], dtype=bool),
        lengths=np.array([record["num_tokens"] for record in records], dtype=np.int64),
        is_truncated=reasons != "stop",
        components=components,
    )


def _estimates(answers: ScoredAnswers, pass_reward: float) -> dict[str, dict[str, Any]]:
    """Return the metrics by the names of a validation, each with its interval."""
    means = answer_means(answers, pass_reward=pass_reward)
    found = estimates(means, confidence=CONFIDENCE)
    return {name: asdict(estimate) for name, estimate in found.items()}


def _table(results: Mapping[str, Any]) -> str:
    """Return the results as a table for the terminal."""
    lines: list[str] = []
    for name, each in results["sets"].items():
        title = "" if name == "data" else f"{name}: "
        title += counted(each["num_prompts"], "prompt")
        if each["num_left_out"]:
            title += f", {each['num_left_out']:,} left out"
        if each.get("num_reward_errors"):
            title += f", {each['num_reward_errors']:,} failed rewards"
        if lines:
            lines.append("")
        lines += [title, *_metric_lines(each["metrics"])]
    return "\n".join(lines)


def _metric_lines(metrics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line per metric: name, value, interval and its method."""
    for name, estimate in metrics.items():
        line = f"  {name:<36}{estimate['value']:>12.4f}"
        if estimate["low"] is not None:
            interval = f"[{estimate['low']:.4f}, {estimate['high']:.4f}]"
            line += f"  {interval} {CONFIDENCE:.0%} {estimate['method']}"
        yield line
