"""Files of prompts of the commands that sample answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import plural
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import PROMPT_ROWS
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.row_files import Location, Row
from nemo_like.data.rows import Rows, load_rows, store_rows
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.encoding import PromptRows, encode_question
from nemo_like.training.validation_sets import row_sources

_NAME = re.compile(r"[a-z0-9][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class PromptFile:
    """The prompts of one file, P of them."""

    name: str
    """"" for the file without a name."""
    rows: Rows
    prompts: Sequence[Prompt]
    row_numbers: Sequence[int]
    """Row of each prompt in the file, counted from 0."""
    sources: Sequence[str] | None = None
    """Source of each prompt, with `--source-column`."""

    @property
    def num_left_out(self) -> int:
        """Rows that are too long and were left out."""
        return len(self.rows) - len(self.prompts)

    def digest(self, index: int) -> str:
        """Return a hash of the row of a prompt."""
        return self.rows.digest(self.row_numbers[index])

    def location(self, index: int) -> str:
        """Return file and line of a prompt."""
        return self.rows.location(self.row_numbers[index])


def named_files(given: Sequence[str]) -> dict[str, str]:
    """Return the paths of `--data [NAME=]FILE` by name. Raises ConfigError for equal names."""
    files: dict[str, str] = {}
    for text in given:
        name, separator, path = text.partition("=")
        if not separator or _NAME.fullmatch(name) is None:
            name = ""
            path = text
        if name in files:
            problem = f"the name {name!r} twice" if name else "two files without a name"
            raise ConfigError(f"--data has {problem}; write NAME=FILE with different names")
        files[name] = path
    return files


def open_prompts(
    config: RunConfig, encoder: ChatEncoder, files: Mapping[str, str], option: str
) -> list[PromptFile]:
    """Read and encode the rows of every file.

    `option` is the argument that named the files. Raises ConfigError for a missing or empty file, a
    bad row, and a row that is too long unless `policy.oversize_rows` is `drop` or `truncate`.
    """
    opened = []
    for name, path in files.items():
        key = f"{option} {name}" if name else option
        rows = _load(path, config, key)
        encoded = EncodedRows(rows, partial(encode_question, encoder, config))
        prompts = []
        numbers = []
        for number, prompt in enumerate(PromptRows(rows, encoded).fetch(range(len(rows)))):
            if prompt is not None:
                prompts.append(prompt)
                numbers.append(number)
        if not prompts:
            raise ConfigError(f"{key}: no row of {path} is short enough for the model")
        sources = None
        if config.data.source_column is not None:
            columns = [prompt.row for prompt in prompts]
            sources = row_sources(columns, config.data.source_column, key)
        opened.append(
            PromptFile(name=name, rows=rows, prompts=prompts, row_numbers=numbers, sources=sources)
        )
    return opened


def left_out_text(files: Sequence[PromptFile]) -> str | None:
    """Return a sentence about the rows that are too long; None if there are none."""
    places = []
    for file in files:
        missing = sorted(set(range(len(file.rows))) - set(file.row_numbers))
        places += [file.rows.location(number) for number in missing]
    if not places:
        return None
    return (
        f"{len(places):,} {plural(len(places), 'row')} left out, too long for the model or above"
        f" data.max_prompt_tokens; the first is {places[0]}"
    )


def _load(path: str, config: RunConfig, key: str) -> Rows:
    """Return the rows of a file; of a .txt file each line that is not empty."""
    max_rows = config.data.max_validation_rows
    if Path(path).suffix != ".txt":
        return load_rows(path, PROMPT_ROWS, max_rows=max_rows, key=key, columns=config.data.columns)
    file = Path(path).expanduser()
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {shown_path(file)} cannot be read: {error}") from error
    prompts: list[tuple[Location, Row, None]] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and (max_rows is None or len(prompts) < max_rows):
            prompts.append((Location(f"{shown_path(file)}:", number), {"prompt": line}, None))
    if not prompts:
        raise ConfigError(f"{key}: {shown_path(file)} has no rows")
    return store_rows(prompts, lambda: ("prompt",))
