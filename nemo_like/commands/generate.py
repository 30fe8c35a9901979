"""`nemo-like generate`: sample completions of the prompts of a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial

from nemo_like.commands.answer_config import answer_config, described_settings
from nemo_like.commands.answer_files import Record
from nemo_like.commands.answer_records import AnswerRequest, collect_records, prompt_record
from nemo_like.commands.answer_rows import PromptFile, left_out_text, open_prompts
from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.text import counted
from nemo_like.rollout.answers import Answer
from nemo_like.run.progress import Progress
from nemo_like.training.model_files import open_encoder, open_model_spec


def run(arguments: argparse.Namespace) -> int:
    """Sample and write the completions; return the exit code. Raises ConfigError."""
    num_samples = checked_num_samples(arguments.num_samples)
    if arguments.resume and arguments.out is None:
        raise ConfigError("--resume continues a file; name it with --out")
    config = answer_config(arguments, files={"": arguments.prompts})
    encoder = open_encoder(config, open_model_spec(config).vocab_size)
    files = open_prompts(config, encoder, {"": arguments.prompts}, "--prompts")
    progress = Progress(sys.stderr)
    request = AnswerRequest(
        config=config,
        encoder=encoder,
        files=files,
        num_samples=num_samples,
        make_record=partial(_record, with_token_ids=arguments.token_ids),
        out=arguments.out,
        settings=described_settings(config) | {"num_samples": num_samples},
        resume=arguments.resume,
    )
    records = collect_records(request, progress)
    if arguments.out is None:
        for record in records:
            # Escaped, so that a completion cannot control the terminal.
            print(json.dumps(record))
    num_completions = sum(len(record["completions"]) for record in records)
    place = "" if arguments.out is None else f" in {shown_path(arguments.out)}"
    progress.print_line(
        f"{counted(num_completions, 'completion')} of {counted(len(records), 'prompt')}{place}"
    )
    left_out = left_out_text(files)
    if left_out is not None:
        progress.print_line(left_out)
    return 0


def checked_num_samples(given: int | None) -> int:
    """Return `--num-samples`, by default 1. Raises ConfigError for less than 1."""
    if given is not None and given < 1:
        raise ConfigError(f"--num-samples is {given}; it must be at least 1")
    return given or 1


def _record(
    file: PromptFile, index: int, answers: Sequence[Answer], *, with_token_ids: bool
) -> Record:
    record = prompt_record(file, index, answers)
    if with_token_ids:
        record["token_ids"] = [answer.token_ids.tolist() for answer in answers]
    return record
