"""`nemo-like eval`: score a model on files of prompts, or compute its perplexity on SFT rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.registry import load_any_config
from nemo_like.commands.answer_config import AnswerRunConfig, answer_config, described_settings
from nemo_like.commands.answer_files import Record
from nemo_like.commands.answer_records import AnswerRequest, collect_records, prompt_record
from nemo_like.commands.answer_rows import PromptFile, left_out_text, named_files, open_prompts
from nemo_like.commands.answer_scores import add_model_scores, described_models, open_models
from nemo_like.commands.eval_results import Results, evaluation_results, results_json, results_table
from nemo_like.commands.generate import checked_num_samples
from nemo_like.commands.reward_names import INCLUDED, named_models, reward_functions
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import printable
from nemo_like.rollout.answers import Answer
from nemo_like.run.files import reporting_write_errors, write_text
from nemo_like.run.progress import Progress
from nemo_like.training.evaluation import AnswerSampling
from nemo_like.training.model_files import open_encoder, open_model_spec

RESULTS = "results.json"
ANSWERS = "answers.jsonl"


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print the results and return the exit code. Raises ConfigError."""
    _check(arguments)
    base = None
    if arguments.from_config is not None:
        base = load_any_config(arguments.from_config)
        if arguments.model is None:
            arguments.model = base.policy.model_name
    files = named_files(arguments.data)
    if not files and base is not None:
        files = dict(base.data.validation_files)
    if not files:
        raise ConfigError("there is no file to evaluate on; give --data FILE")
    if arguments.perplexity:
        from nemo_like.commands.perplexity import measure_perplexity

        results = measure_perplexity(arguments, files, base)
    else:
        results = _score(arguments, files, base)
    text = json.dumps(results_json(results), indent=2)
    if arguments.out is not None:
        path = arguments.out / RESULTS
        with reporting_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text + "\n")
    encoding = sys.stdout.encoding or "utf-8"
    print(printable(text if arguments.json else results_table(results), encoding))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for options that contradict each other."""
    if arguments.model is None and arguments.from_config is None:
        raise ConfigError("there is no model to evaluate; give --model DIR")
    if arguments.resume and arguments.out is None:
        raise ConfigError("--resume continues the results of --out; name their directory with it")
    if not 0 < arguments.confidence < 1:
        raise ConfigError(
            f"--confidence is {arguments.confidence:g}; it must be between 0 and 1, e.g. 0.95"
        )
    out = arguments.out
    if out is not None and not arguments.resume and (out / RESULTS).exists():
        raise ConfigError(
            f"--out {out} has results already; choose another directory, or keep its answers with"
            " --resume"
        )


def _sampling_of(base: RunConfig | None, arguments: argparse.Namespace) -> AnswerSampling:
    """Return the sampling of a training config's validation, replaced by the options."""
    sampling = AnswerSampling()
    if isinstance(base, GrpoRunConfig):
        sampling = AnswerSampling(
            temperature=base.grpo.val_temperature,
            num_samples=base.grpo.val_num_samples,
            pass_reward=base.grpo.val_pass_reward,
        )
    given = {
        "temperature": arguments.temperature,
        "num_samples": arguments.num_samples,
        "pass_reward": arguments.pass_reward,
    }
    checked_num_samples(arguments.num_samples)
    return replace(sampling, **{name: value for name, value in given.items() if value is not None})


def _score(
    arguments: argparse.Namespace, paths: Mapping[str, str], base: RunConfig | None
) -> Results:
    """Sample answers, score them, and return the results."""
    sampling = _sampling_of(base, arguments)
    if sampling.num_samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"--num-samples is {sampling.num_samples}, but --temperature is 0, and greedy"
            " answers to one prompt are all equal; set --temperature above 0"
        )
    config = answer_config(
        arguments,
        files=paths,
        rewards=_rewards(arguments),
        base=base,
        temperature=sampling.temperature,
    )
    if not config.reward.weights and config.environment.path is None:
        raise ConfigError(
            f"there is no reward to score answers with; give --reward, e.g. one of"
            f" {', '.join(INCLUDED)}, or --reward-model"
        )
    models = open_models(config)
    encoder = open_encoder(config, open_model_spec(config).vocab_size)
    files = open_prompts(config, encoder, paths, "--data")
    progress = Progress(sys.stderr)
    request = AnswerRequest(
        config=config,
        encoder=encoder,
        files=files,
        num_samples=sampling.num_samples,
        make_record=_record,
        out=None if arguments.out is None else arguments.out / ANSWERS,
        settings=_settings(config, sampling),
        resume=arguments.resume,
        finish=partial(add_model_scores, config, models) if models else None,
    )
    records = collect_records(request, progress)
    left_out = left_out_text(files)
    if left_out is not None:
        progress.print_line(left_out)
    return evaluation_results(
        records,
        files,
        pass_reward=sampling.pass_reward,
        confidence=arguments.confidence,
        settings=_settings(config, sampling) | {"pass_reward": sampling.pass_reward},
    )


def _rewards(arguments: argparse.Namespace) -> dict[str, Mapping[str, Any]] | None:
    """Return the sections of `reward` that the options set; None without such an option."""
    if not arguments.reward and not arguments.reward_model:
        return None
    models = named_models(arguments.reward_model)
    precision = arguments.precision
    if precision is not None:
        models = {name: model | {"precision": precision} for name, model in models.items()}
    return {"functions": reward_functions(arguments.reward), "models": models}


def _settings(config: AnswerRunConfig, sampling: AnswerSampling) -> dict[str, Any]:
    """Return what determines answers and rewards, as JSON values."""
    rewards = {}
    for name, function in config.reward.functions.items():
        rewards[name] = {
            "path": function.path,
            "weight": function.weight,
            "options": function.options,
        }
    return described_settings(config) | {
        "num_samples": sampling.num_samples,
        "rewards": rewards,
        "reward_models": described_models(config),
        "on_reward_error": config.reward.on_error,
    }


def _record(file: PromptFile, index: int, answers: Sequence[Answer]) -> Record:
    record = prompt_record(file, index, answers)
    if file.sources is not None:
        record["source"] = file.sources[index]
    record["rewards"] = [answer.reward for answer in answers]
    names = answers[0].components
    record["components"] = {name: [answer.components[name] for answer in answers] for name in names}
    record["is_scored"] = [answer.is_scored for answer in answers]
    problems = [answer.problem for answer in answers]
    if any(problem is not None for problem in problems):
        record["errors"] = problems
    return record
