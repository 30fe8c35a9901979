"""`nemo-like generate`, and what `nemo-like eval` and `nemo-like chat` share with it.

They take a config and sample answers to the prompts of its validation files. A record is one JSON
object per prompt, appended to a file as a complete line when its prompt is finished, so that a
killed command loses none of them. The settings are in a file beside it, and a resume with others is
refused.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_like.algorithms.grpo.config import GrpoRunConfig
from nemo_like.algorithms.grpo.loop import answer_sampling
from nemo_like.algorithms.registry import load_any_config
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.commands.start import model_of
from nemo_like.config.errors import ConfigError, counted, shown_path
from nemo_like.config.needs import BatchNeeds, RolloutNeeds, RunNeeds
from nemo_like.config.paths import resolve_paths
from nemo_like.config.plain import to_dict
from nemo_like.config.rollout import RewardConfig
from nemo_like.config.schema import (
    ClusterConfig,
    DataConfig,
    ParallelConfig,
    PolicyConfig,
    RunConfig,
)
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.formats import PROMPT_ROWS, RowSchema
from nemo_like.data.rows import Rows
from nemo_like.environments.reward_calls import load_reward_functions
from nemo_like.generation.requests import SamplingParams
from nemo_like.models.weight_files import weight_paths
from nemo_like.rollout.answers import Answer, answer_prompts
from nemo_like.run.files import AppendedFile, reporting_write_errors, write_json, write_json_lines
from nemo_like.run.progress import Progress
from nemo_like.training.encoding import RowLimits
from nemo_like.training.groups import group_starter
from nemo_like.training.images import open_images
from nemo_like.training.model_files import open_encoder, open_model_config, open_model_spec
from nemo_like.training.prompts import PromptSet, prompt_sets
from nemo_like.training.rollout_workers import (
    GeneratorStart,
    RolloutWorkers,
    check_environment,
    open_collector,
    start_environment,
    start_generator,
    start_rewards,
)
from nemo_like.training.run_data import check_all_columns, load_validation, validation_key
from nemo_like.training.validation_answers import AnswerSampling, answer_seeds

_DEFAULTS = Path(__file__).with_name("answers.yaml")
_WITH_GPU = ("cluster.gpus_per_node=1", "policy.precision=bfloat16")
"""Keys of the default config on a machine with a GPU."""
_SETTINGS = (
    *("model_name", "tokenizer_name", "chat_template", "precision", "max_total_sequence_length"),
    *("oversize_rows", "generation", "vision"),
)
"""Keys of `policy` that determine the answers."""
_CHAT_LENGTH = 16384
"""Tokens of a conversation with `nemo-like chat`, if the model has as many positions."""
_CHAT_SAMPLING = {"temperature": 0.7, "top_p": 0.95}
"""Sampling of `nemo-like chat` for a model that declares none."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
"""Keys of `policy.generation` with the name that they have in generation_config.json."""
_BATCHES = (
    *("sequence_packing", "dynamic_batching", "train_micro_batch_size", "logprob_chunk_size"),
    "train_global_batch_size",
)
"""Keys of `policy` that limit the memory of a forward pass, for the perplexity of rows."""
_NO_INFLUENCE = ("hf", "vllm", "check_weights", "progress_timeout_s")
"""Keys of `policy.generation` that change the answers by rounding only."""

Record = dict[str, Any]
Key = tuple[str, int]
"""Name of the set of prompts, and the row in its file."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """The sections of a config that a command reads which only samples answers."""

    policy: PolicyConfig
    data: DataConfig
    cluster: ClusterConfig
    rollouts: RolloutNeeds
    seed: int
    sampling: AnswerSampling = field(default_factory=AnswerSampling)
    """As the validation of the job samples them."""

    def with_policy(self, policy: PolicyConfig) -> AnswerSettings:
        """Return the settings with another section `policy`."""
        rollouts = replace(self.rollouts, generation=policy.generation)
        return replace(self, policy=policy, rollouts=rollouts)

    @property
    def needs(self) -> RunNeeds:
        """What sampling needs of a run."""
        batch = BatchNeeds.of_one_step(self.policy.train_global_batch_size)
        return RunNeeds(job="answers", batch=batch, rollouts=self.rollouts)

    def open_encoder(self) -> ChatEncoder:
        """Open the tokenizer of the model. Raises ConfigError."""
        vocab_size = open_model_spec(self.policy).vocab_size
        return open_encoder(self.policy, self.data, vocab_size, open_images(self.policy, self.data))


def generate(arguments: argparse.Namespace) -> int:
    """Sample and write the completions; return the exit code. Raises ConfigError."""
    # Completions are not scored; an environment has its own rewards.
    config = answer_config(arguments)
    config = replace(config, rollouts=replace(config.rollouts, rewards=RewardConfig()))
    answers = Answers(config, num_samples=arguments.num_samples)
    settings = described_settings(config) | {"num_samples": arguments.num_samples}

    def make_record(prompts: PromptSet, index: int, sampled: Sequence[Answer]) -> Record:
        record = prompt_record(prompts, index, sampled)
        if arguments.token_ids:
            record["token_ids"] = [answer.token_ids.tolist() for answer in sampled]
        return record

    records = answers.sample(arguments.out, settings, make_record, resume=arguments.resume)
    if arguments.out is None:
        for record in records:
            # JSON escapes control characters, so that a completion cannot control the terminal.
            print(json.dumps(record))
    num_completions = counted(len(records) * arguments.num_samples, "completion")
    place = "" if arguments.out is None else f" in {shown_path(arguments.out)}"
    answers.progress.print_line(f"{num_completions} of {counted(len(records), 'prompt')}{place}")
    return 0


def answer_config(arguments: argparse.Namespace) -> AnswerSettings:
    """Return the config of `--config` with the overrides, with absolute paths.

    A run directory stands for its config with the model that the run exported. Raises ConfigError.
    """
    source: Path | None = arguments.config
    overrides = list(arguments.overrides)
    if arguments.model is not None:
        if source is not None:
            raise ConfigError("--config and --model exclude each other; give one of them")
        if model_of(arguments.model) == arguments.model:
            overrides.append(f"policy.model_name={arguments.model}")
        else:
            source = Path(arguments.model)
    if source is None:
        device = _WITH_GPU if torch.cuda.is_available() else ()
        # `grpo.val_*` are keys of the evaluation; only GRPO refuses to sample greedily.
        kind = GrpoRunConfig.kind if arguments.command == "eval" else SftRunConfig.kind
        base = load_any_config(_DEFAULTS, [*device, *overrides], arguments.kind or kind)
    elif source.is_dir():
        base = load_any_config(source / "config.yaml", overrides, arguments.kind)
        if not any(text.lstrip("+").startswith("policy.model_name=") for text in overrides):
            model_name = model_of(str(source))
            base = replace(base, policy=replace(base.policy, model_name=model_name))
    else:
        base = load_any_config(source, overrides, arguments.kind)
    config = _without_training(base)
    if arguments.command == "eval":
        generation = config.sampling.applied(config.policy.generation)
        config = config.with_policy(replace(config.policy, generation=generation))
    if arguments.command == "chat" and (source is None or source.is_dir()):
        # The config of a run has the values of its rollouts and the length of its rows.
        given = {text.lstrip("+").partition("=")[0] for text in overrides}
        values = _declared_sampling(Path(config.policy.model_name))
        kept = {name: values[name] for name in values if f"policy.generation.{name}" not in given}
        policy = replace(config.policy, generation=replace(config.policy.generation, **kept))
        if "policy.max_total_sequence_length" not in given:
            positions = open_model_spec(policy).max_positions or _CHAT_LENGTH
            policy = replace(policy, max_total_sequence_length=min(positions, _CHAT_LENGTH))
        config = config.with_policy(policy)
    return config


def _declared_sampling(model: Path) -> dict[str, Any]:
    """Return the keys of `policy.generation` that generation_config.json of a model sets.

    Raises ConfigError for a damaged file.
    """
    path = model / "generation_config.json"
    try:
        declared = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error}") from error
    if declared.get("do_sample") is False:
        return {"temperature": 0.0}
    values = _CHAT_SAMPLING
    if "temperature" in declared or "top_p" in declared:
        # The defaults of transformers.
        values = {"temperature": 1.0, "top_p": 1.0, "top_k": 50}
    found = {name: declared[name] for name in _SAMPLING if declared.get(name) is not None}
    return {**values, **found}


def _without_training(base: RunConfig) -> AnswerSettings:
    """Return the keys that matter for answers; keys of training have their defaults."""
    base = resolve_paths(base)
    # An exported model contains its adapters.
    policy = PolicyConfig(**{name: getattr(base.policy, name) for name in (*_SETTINGS, *_BATCHES)})
    # Reward models score when all answers are sampled, in this process.
    models = {name: replace(model, num_workers=0) for name, model in base.reward.models.items()}
    limit = open_model_spec(policy).max_positions
    if limit is not None and policy.max_total_sequence_length > limit:
        max_new_tokens = min(policy.generation.max_new_tokens, max(limit // 2, 1))
        generation = replace(policy.generation, max_new_tokens=max_new_tokens)
        policy = replace(policy, max_total_sequence_length=limit, generation=generation)
    config = AnswerSettings(
        policy=policy,
        data=base.data,
        cluster=base.cluster,
        rollouts=RolloutNeeds(
            generation=policy.generation,
            rewards=replace(base.reward, models=models),
            environment=base.environment,
        ),
        seed=base.seed,
        sampling=(
            answer_sampling(base.grpo) if isinstance(base, GrpoRunConfig) else AnswerSampling()
        ),
    )
    open_model_config(policy, ParallelConfig(), config.cluster, config.needs, is_trained=False)
    return config


def described_settings(config: AnswerSettings) -> dict[str, Any]:
    """Return the settings that determine the answers, as JSON values."""
    policy = to_dict(config.policy)
    settings = {name: policy[name] for name in _SETTINGS}
    for name in _NO_INFLUENCE:
        del settings["generation"][name]
    return settings | {
        "seed": config.seed,
        "system_prompt": config.data.system_prompt,
        "prompt_template": config.data.prompt_template,
        "chat_template_kwargs": config.data.chat_template_kwargs,
        "environment": to_dict(config.rollouts.environment),
        "weights": weight_files(config.policy.model_name),
    }


def weight_files(directory: str) -> dict[str, list[int]]:
    """Return size and time of change of the weight files of a local model, by name."""
    files = {}
    for path in weight_paths(Path(directory)):
        status = path.stat()
        files[path.name] = [status.st_size, status.st_mtime_ns]
    return files


class Answers:
    """The answers to all prompts of the validation files."""

    def __init__(self, config: AnswerSettings, *, num_samples: int) -> None:
        """Read and encode the prompts.

        Raises ConfigError for a missing or empty file, a bad row, and a row that is too long unless
        `policy.oversize_rows` is `drop` or `truncate`.
        """
        self.progress = Progress(sys.stderr)
        self._config = config
        self._num_samples = num_samples
        self._encoder = config.open_encoder()
        limits = RowLimits.of(config.policy, config.data)
        prompts = load_prompts(config.data, PROMPT_ROWS, self._encoder)
        self.sets = prompt_sets(self._encoder, limits, prompts)
        self.places: list[tuple[PromptSet, int]] = []
        """Set and index in it of every prompt."""
        for each in self.sets:
            if not each.prompts:
                raise no_short_row(config, each.name)
            self.places += [(each, index) for index in range(len(each.prompts))]

    def sample(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        make_record: Callable[[PromptSet, int, Sequence[Answer]], Record],
        *,
        resume: bool,
        complete: Callable[[list[Record]], None] = lambda records: None,
    ) -> list[Record]:
        """Return the records of all prompts, which are also in the file `path` if it is given.

        `make_record` gets a set, the index of a prompt in it and its answers; `complete` may change
        the records before the file is written in their order. With `resume` the prompts in the file
        are not sampled again. The answers depend on the seed and on the position of their prompt
        among all prompts. An exception, such as KeyboardInterrupt, keeps the finished prompts.

        Raises ConfigError if the file exists without `resume`, or was written with other settings
        or prompts, the errors of `answer_prompts`, and WriteError.
        """
        finished = _finished_records(path, settings, resume=resume)
        keys = [(prompts.name, prompts.row_numbers[index]) for prompts, index in self.places]
        missing = []
        for position, key in enumerate(keys):
            record = finished.get(key)
            if record is None:
                missing.append(position)
            elif record["digest"] != _digest(*self.places[position]):
                raise ConfigError(
                    f"row {key[1]} of {key[0] or 'the prompts'} has changed since {path} was"
                    " written; choose another --out"
                )
        try:
            with ExitStack() as stack:
                file = None if path is None else stack.enter_context(closing(AppendedFile(path)))
                for position, answers in stack.enter_context(closing(self._sampled(missing))):
                    finished[keys[position]] = make_record(*self.places[position], answers)
                    if file is not None:
                        file.append_json(finished[keys[position]])
            records = [finished[key] for key in keys]
            complete(records)
        except BaseException:
            if path is not None:
                self.progress.print_line(
                    f"{len(finished):,} of {counted(len(keys), 'prompt')} finished in"
                    f" {shown_path(path)}; --resume continues"
                )
            raise
        if path is not None:
            # A resume with fewer rows keeps the others, at the end.
            others = sorted(set(finished) - set(keys))
            write_json_lines(path, [*records, *(finished[key] for key in others)])
        self._report_left_out()
        return records

    def _sampled(
        self, missing: Sequence[int]
    ) -> Generator[tuple[int, Sequence[Answer]], None, None]:
        """Yield the positions `missing` of prompts with their answers, as they are finished."""
        if not missing:
            return
        prompts = [each.prompts[index] for each, index in self.places]
        config = _fitted(self._config, max(len(prompt.token_ids) for prompt in prompts))
        # Of all prompts, so that the answers to the missing ones do not depend on the others.
        seeds = answer_seeds(config.seed, 0, len(prompts) * self._num_samples)
        seeds = seeds.reshape(-1, self._num_samples)
        with self._workers(config) as workers:
            answered = answer_prompts(
                open_collector(config.rollouts, workers, self._encoder),
                [prompts[position] for position in missing],
                num_samples=self._num_samples,
                sampling=SamplingParams.from_config(config.policy.generation),
                max_total_length=config.policy.max_total_sequence_length,
                seeds=seeds[np.array(missing)].reshape(-1),
            )
            with self.progress.phase("sampling", len(missing), unit="prompts") as phase:
                for order, answers in answered:
                    yield missing[order], answers
                    phase.advance()

    @contextmanager
    def _workers(self, config: AnswerSettings) -> Iterator[RolloutWorkers]:
        """Start generator, reward functions and environment; stop them with the block.

        Raises ConfigError for functions that cannot be imported, before anything is started, and
        ClusterError if the cluster has too few resources.
        """
        rollouts = config.rollouts
        load_reward_functions(rollouts.rewards.functions)
        check_environment(rollouts.environment)
        with ExitStack() as stack:
            with self.progress.phase("loading the model"):
                start = group_starter(config.cluster, stack, self.progress, rollouts=rollouts)
                settings = GeneratorStart(
                    policy=config.policy,
                    seed=config.seed,
                    end_token_ids=self._encoder.end_token_ids,
                )
                generator = start_generator(settings, config.cluster, start, self.progress)
                stack.callback(generator.shutdown)
                environment = start_environment(
                    rollouts.environment, config.cluster, start, stack, self.progress
                )
                rewards = None
                if rollouts.rewards.functions:
                    rewards = start_rewards(rollouts.rewards, start)
            yield RolloutWorkers(generator, rewards, environment)

    def _report_left_out(self) -> None:
        """Print the number of rows that are too long, and the first of them."""
        places = []
        for each in self.sets:
            for number in sorted(set(range(len(each.rows))) - set(each.row_numbers)):
                places.append(each.rows.location(number))
        if places:
            self.progress.print_line(
                f"{counted(len(places), 'row')} left out, too long for the model or above"
                f" data.max_prompt_tokens; the first is {places[0]}"
            )


def load_prompts(data: DataConfig, schema: RowSchema, encoder: ChatEncoder) -> dict[str, Rows]:
    """Read the validation files by name. Raises ConfigError if there are none."""
    if not data.validation_files:
        raise ConfigError("there are no prompts; set data.validation_path to their file")
    check_all_columns(data)
    return load_validation(data, schema, encoder.images)


def no_short_row(config: AnswerSettings, name: str) -> ConfigError:
    """Return the error for a validation file without a row that fits into the model."""
    path = config.data.validation_files[name]
    limit = config.policy.max_total_sequence_length
    return ConfigError(
        f"{validation_key(name)}: no row of {path} is short enough for"
        f" policy.max_total_sequence_length {limit}"
    )


def prompt_record(prompts: PromptSet, index: int, answers: Sequence[Answer]) -> Record:
    """Return the part of a record that all commands write."""
    prompt = prompts.prompts[index]
    number = prompts.row_numbers[index]
    record: Record = {"data": prompts.name} if prompts.name else {}
    record |= {
        "row": number,
        "location": prompts.rows.location(number),
        "digest": _digest(prompts, index),
        "prompt": prompt.text,
    }
    if prompt.answer is not None:
        record["answer"] = prompt.answer
    return record | {
        "completions": [answer.text for answer in answers],
        "finish_reasons": [answer.finish_reason for answer in answers],
        "num_tokens": [len(answer.token_ids) for answer in answers],
        "logprob_sums": [answer.logprob for answer in answers],
    }


def _digest(prompts: PromptSet, index: int) -> str:
    """Return a hash of the row of a prompt."""
    return prompts.rows.digest(prompts.row_numbers[index])


def _fitted(config: AnswerSettings, num_tokens: int) -> AnswerSettings:
    """Return the config for prompts of at most `num_tokens` tokens.

    The engine then reserves no memory for longer rows. The answers are the same.
    """
    policy = config.policy
    needed = num_tokens + policy.generation.max_new_tokens
    if config.rollouts.environment.is_used or needed >= policy.max_total_sequence_length:
        return config
    return config.with_policy(replace(policy, max_total_sequence_length=needed))


def _finished_records(
    path: Path | None, settings: Mapping[str, Any], *, resume: bool
) -> dict[Key, Record]:
    """Return the records in the file of an earlier command, after checking and writing settings.

    An incomplete last line is removed. Raises ConfigError and WriteError as `Answers.sample` does.
    """
    if path is None:
        if resume:
            raise ConfigError("--resume continues earlier results; name them with --out")
        return {}
    settings_path = path.with_name(f"{path.name}.settings.json")
    # As in the file: JSON has no tuples.
    settings = json.loads(json.dumps(settings))
    records = {}
    with reporting_write_errors(path):
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not resume:
            raise ConfigError(
                f"{shown_path(path)} exists already; continue it with --resume, choose another"
                " --out, or remove it"
            )
        else:
            _check_settings(settings_path, settings)
            content = path.read_bytes()
            complete = content[: content.rfind(b"\n") + 1]
            os.truncate(path, len(complete))
            for line in complete.splitlines():
                record = json.loads(line)
                records[str(record.get("data", "")), int(record["row"])] = record
    write_json(settings_path, settings)
    return records


def _check_settings(path: Path, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the file has the same settings."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--resume needs {shown_path(path)}, which cannot be read: {error}; choose another"
            " --out"
        ) from error
    names = [name for name in {**before, **settings} if before.get(name) != settings.get(name)]
    if names:
        raise ConfigError(
            f"--resume: {shown_path(path)} has other values of {', '.join(names)}; use the same"
            " ones, or choose another --out"
        )
