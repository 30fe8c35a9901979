"""Samples the answers to files of prompts, and writes a record of each prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.commands.answer_config import AnswerRunConfig, with_longest_prompt
from nemo_like.commands.answer_files import AnswerFile, Key, Record
from nemo_like.commands.answer_rows import PromptFile
from nemo_like.config.errors import shown_path
from nemo_like.config.text import counted
from nemo_like.data.chat import ChatEncoder
from nemo_like.generation.requests import SamplingParams
from nemo_like.rollout.answers import Answer, answer_prompts
from nemo_like.run.progress import Progress
from nemo_like.training.answer_workers import start_answer_workers
from nemo_like.training.evaluation import answer_seeds
from nemo_like.training.rollout_workers import open_collector

MakeRecord = Callable[[PromptFile, int, Sequence[Answer]], Record]


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """Answers to all prompts of some files."""

    config: AnswerRunConfig
    encoder: ChatEncoder
    files: Sequence[PromptFile]
    num_samples: int
    make_record: MakeRecord
    """Returns the record of a prompt, given its file, its index in it, and its answers."""
    out: Path | None
    """A file of records; None keeps them in memory."""
    settings: Mapping[str, Any]
    """What determines the records; a resume needs the same."""
    resume: bool
    finish: Callable[[Sequence[tuple[PromptFile, int, Record]]], None] | None = None
    """Completes the records when all answers are sampled."""


def collect_records(request: AnswerRequest, progress: Progress) -> list[Record]:
    """Return the record of every prompt, in the order of files and rows.

    The prompts that have a record in `out` are not sampled again. The answers depend on the seed of
    the config and on the position of their prompt among all prompts. Raises ConfigError, WriteError
    and the errors of `answer_prompts`. A KeyboardInterrupt keeps the records of finished prompts.
    """
    keys: list[Key] = []
    places: list[tuple[PromptFile, int]] = []
    for file in request.files:
        for index, number in enumerate(file.row_numbers):
            keys.append((file.name, number))
            places.append((file, index))
    if request.out is None:
        records: dict[Key, Record] = {}
        _sample(request, list(range(len(keys))), keys, places, records.__setitem__, progress)
        _finish(request, keys, places, records)
        return [records[key] for key in keys]
    answer_file = AnswerFile(request.out, request.settings, resume=request.resume)
    with closing(answer_file):
        missing = []
        for position, (file, index) in enumerate(places):
            if not answer_file.is_finished(keys[position], file.digest(index)):
                missing.append(position)

        def add(key: Key, record: Record) -> None:
            answer_file.add(record)

        try:
            _sample(request, missing, keys, places, add, progress)
            _finish(request, keys, places, answer_file.records)
        except BaseException:
            progress.print_line(
                f"{len(answer_file.records):,} of {counted(len(keys), 'prompt')} finished in"
                f" {shown_path(request.out)}; --resume continues"
            )
            raise
        return answer_file.finish(keys)


def _finish(
    request: AnswerRequest,
    keys: Sequence[Key],
    places: Sequence[tuple[PromptFile, int]],
    records: Mapping[Key, Record],
) -> None:
    """Complete the records of all prompts."""
    if request.finish is None:
        return
    placed = []
    for key, (file, index) in zip(keys, places, strict=True):
        placed.append((file, index, records[key]))
    request.finish(placed)


def _sample(
    request: AnswerRequest,
    missing: Sequence[int],
    keys: Sequence[Key],
    places: Sequence[tuple[PromptFile, int]],
    add: Callable[[Key, Record], None],
    progress: Progress,
) -> None:
    """Sample the answers to the prompts at positions `missing`; call `add` with each record."""
    if not missing:
        return
    prompts = [file.prompts[index] for file, index in places]
    longest = max(len(prompt.token_ids) for prompt in prompts)
    config = with_longest_prompt(request.config, longest)
    num_samples = request.num_samples
    # Those of all prompts, so that the answers to the missing ones do not depend on the others.
    seeds = answer_seeds(config.seed, 0, len(prompts) * num_samples).reshape(-1, num_samples)
    end_token_ids = request.encoder.end_token_ids
    with start_answer_workers(config, progress, end_token_ids=end_token_ids) as workers:
        answered = answer_prompts(
            open_collector(config, workers, request.encoder),
            [prompts[position] for position in missing],
            num_samples=num_samples,
            sampling=SamplingParams.from_config(config.policy.generation),
            max_total_length=config.policy.max_total_sequence_length,
            seeds=seeds[np.array(missing)].reshape(-1),
        )
        with progress.phase("sampling", len(missing), unit="prompts") as phase:
            for order, answers in answered:
                position = missing[order]
                file, index = places[position]
                add(keys[position], request.make_record(file, index, answers))
                phase.advance()


def prompt_record(file: PromptFile, index: int, answers: Sequence[Answer]) -> Record:
    """Return the part of a record that all commands write."""
    prompt = file.prompts[index]
    record: Record = {"data": file.name} if file.name else {}
    record |= {
        "row": file.row_numbers[index],
        "location": file.location(index),
        "digest": file.digest(index),
        "prompt": prompt.text,
    }
    if prompt.answer is not None:
        record["answer"] = prompt.answer
    record |= {
        "completions": [answer.text for answer in answers],
        "finish_reasons": [answer.finish_reason for answer in answers],
        "num_tokens": [len(answer.token_ids) for answer in answers],
        "logprob_sums": [answer.logprob for answer in answers],
    }
    return record
