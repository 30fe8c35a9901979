"""Samples the answers to the prompts of the validation files, and keeps a record of each prompt.

A record is one JSON object, appended to a file as a complete line when its prompt is finished, so
that a killed command loses none of them. The settings are in a file beside it, and a resume with
others is refused.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import counted
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import PROMPT_ROWS, RowSchema
from nemo_like.data.row_columns import check_columns
from nemo_like.data.rows import Rows
from nemo_like.environments.environment_workers import load_environment
from nemo_like.environments.reward_worker import load_reward_functions
from nemo_like.generation.requests import SamplingParams
from nemo_like.rollout.answers import Answer, answer_prompts
from nemo_like.run.files import AppendedFile, reporting_write_errors, write_json, write_json_lines
from nemo_like.run.progress import Progress
from nemo_like.training.model_files import open_encoder, open_model_spec
from nemo_like.training.rollout_workers import (
    RolloutWorkers,
    open_collector,
    start_environment,
    start_generator,
    start_rewards,
)
from nemo_like.training.run_data import PromptSet, load_validation, prompt_sets, validation_key
from nemo_like.training.steps import answer_seeds
from nemo_like.training.workers import group_starter

Record = dict[str, Any]
Key = tuple[str, int]
"""Name of the set of prompts, and the row in its file."""
MakeRecord = Callable[[PromptSet, int, Sequence[Answer]], Record]


class AnswerFile:
    """Records of prompts, in a JSON-lines file that grows while a command runs, or in memory."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], *, resume: bool) -> None:
        """Open a new file, or with `resume` one that an earlier command began.

        Raises ConfigError if the file exists without `resume`, or was written with other settings,
        and WriteError.
        """
        self.path = path
        self.records: dict[Key, Record] = {}
        """The finished prompts."""
        self._file: AppendedFile | None = None
        if path is None:
            if resume:
                raise ConfigError("--resume continues earlier results; name them with --out")
            return
        settings_path = path.with_name(f"{path.name}.settings.json")
        # As in the file: JSON has no tuples.
        plain = json.loads(json.dumps(settings))
        if path.exists():
            if not resume:
                raise ConfigError(
                    f"{shown_path(path)} exists already; continue it with --resume, choose another"
                    " --out, or remove it"
                )
            _check_settings(settings_path, plain)
            self.records = {_key(record): record for record in _complete_lines(path)}
        else:
            with reporting_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
        write_json(settings_path, plain)
        self._file = AppendedFile(path)

    def is_finished(self, key: Key, digest: str) -> bool:
        """Return True if the prompt has a record.

        Raises ConfigError if its row had another content, `digest`.
        """
        record = self.records.get(key)
        if record is not None and record["digest"] != digest:
            name, row = key
            raise ConfigError(
                f"row {row} of {name or 'the prompts'} has changed since {self.path} was written;"
                " choose another --out"
            )
        return record is not None

    def add(self, record: Record) -> None:
        """Append the record of a finished prompt. Raises WriteError."""
        self.records[_key(record)] = record
        if self._file is not None:
            self._file.append_json(record)

    def finish(self, order: Sequence[Key]) -> None:
        """Sort the file by `order`. Raises WriteError.

        Records of other prompts, which a resume with fewer rows did not ask for, stay at the end.
        """
        self.close()
        if self.path is not None:
            others = sorted(set(self.records) - set(order))
            write_json_lines(self.path, [self.records[key] for key in (*order, *others)])

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._file is not None:
            self._file.close()


class Answers:
    """The answers to all prompts of the validation files."""

    def __init__(self, config: RunConfig, *, num_samples: int) -> None:
        """Read and encode the prompts.

        Raises ConfigError for a missing or empty file, a bad row, and a row that is too long unless
        `policy.oversize_rows` is `drop` or `truncate`.
        """
        self.config = config
        self.progress = Progress(sys.stderr)
        self.encoder: ChatEncoder = open_encoder(config, open_model_spec(config).vocab_size)
        self.sets = prompt_sets(config, self.encoder, load_prompts(config, PROMPT_ROWS))
        self.places: list[tuple[PromptSet, int]] = []
        """Set and index in it of every prompt."""
        for each in self.sets:
            if not each.prompts:
                raise no_short_row(config, each.name)
            self.places += [(each, index) for index in range(len(each.prompts))]
        self.keys: list[Key] = [
            (prompts.name, prompts.row_numbers[index]) for prompts, index in self.places
        ]
        self._num_samples = num_samples

    @contextmanager
    def opened(
        self, path: Path | None, settings: dict[str, Any], *, resume: bool
    ) -> Iterator[AnswerFile]:
        """Open the records of the prompts; sort them at the end of the block.

        An exception in the block, such as KeyboardInterrupt, keeps the finished prompts. Raises
        ConfigError and WriteError as `AnswerFile` does.
        """
        file = AnswerFile(path, settings, resume=resume)
        try:
            yield file
            file.finish(self.keys)
        except BaseException:
            if path is not None:
                self.progress.print_line(
                    f"{len(file.records):,} of {counted(len(self.keys), 'prompt')} finished in"
                    f" {shown_path(path)}; --resume continues"
                )
            raise
        finally:
            file.close()
        self._report_left_out()

    def sample(self, file: AnswerFile, make_record: MakeRecord) -> None:
        """Add the records of the prompts that have none.

        The answers depend on the seed and on the position of their prompt among all prompts.
        `make_record` gets a set, the index of a prompt in it and the answers. Raises the errors of
        `answer_prompts`.
        """
        missing = []
        for position, (prompts, index) in enumerate(self.places):
            if not file.is_finished(self.keys[position], _digest(prompts, index)):
                missing.append(position)
        if not missing:
            return
        all_prompts = [prompts.prompts[index] for prompts, index in self.places]
        config = _fitted(self.config, max(len(prompt.token_ids) for prompt in all_prompts))
        # Of all prompts, so that the answers to the missing ones do not depend on the others.
        seeds = answer_seeds(config.seed, 0, len(all_prompts) * self._num_samples)
        seeds = seeds.reshape(-1, self._num_samples)
        with _started(config, self.encoder, self.progress) as workers:
            answered = answer_prompts(
                open_collector(config, workers, self.encoder),
                [all_prompts[position] for position in missing],
                num_samples=self._num_samples,
                sampling=SamplingParams.from_config(config.policy.generation),
                max_total_length=config.policy.max_total_sequence_length,
                seeds=seeds[np.array(missing)].reshape(-1),
            )
            with self.progress.phase("sampling", len(missing), unit="prompts") as phase:
                for order, answers in answered:
                    prompts, index = self.places[missing[order]]
                    file.add(make_record(prompts, index, answers))
                    phase.advance()

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


def load_prompts(config: RunConfig, schema: RowSchema) -> dict[str, Rows]:
    """Read the validation files by name. Raises ConfigError if there are none."""
    if not config.data.validation_files:
        raise ConfigError("there are no prompts; set data.validation_path to their file")
    check_columns(config.data.columns)
    return load_validation(config, schema)


def no_short_row(config: RunConfig, name: str) -> ConfigError:
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


def _fitted(config: RunConfig, num_tokens: int) -> RunConfig:
    """Return the config for prompts of at most `num_tokens` tokens.

    The engine then reserves no memory for longer rows. The answers are the same.
    """
    policy = config.policy
    needed = num_tokens + policy.generation.max_new_tokens
    if config.environment.path is not None or needed >= policy.max_total_sequence_length:
        return config
    return replace(config, policy=replace(policy, max_total_sequence_length=needed))


@contextmanager
def _started(
    config: RunConfig, encoder: ChatEncoder, progress: Progress
) -> Iterator[RolloutWorkers]:
    """Start generator, reward functions and environment; stop them with the block.

    Raises ConfigError for functions that cannot be imported, before anything is started, and
    ClusterError if the cluster has too few resources.
    """
    load_reward_functions(config.reward.functions)
    if config.environment.path is not None:
        load_environment(config.environment)
    with ExitStack() as closing:
        with progress.phase("loading the model"):
            start = group_starter(config, closing, progress, logs=None)
            generator = start_generator(
                config, start, encoder.end_token_ids, progress, can_sleep=False
            )
            closing.callback(generator.shutdown)
            environment = start_environment(config, start, closing, progress)
            rewards = None
            if config.reward.functions:
                rewards = start_rewards(config, start)
        yield RolloutWorkers(generator, rewards, environment)


def _key(record: Record) -> Key:
    return str(record.get("data", "")), int(record["row"])


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


def _complete_lines(path: Path) -> Iterable[Record]:
    """Return the records, after an incomplete last line has been removed."""
    with reporting_write_errors(path):
        content = path.read_bytes()
        complete, end, rest = content.rpartition(b"\n")
        if rest:
            os.truncate(path, len(content) - len(rest))
    return [json.loads(line) for line in complete.split(b"\n")] if end else []
