"""The validation sets of a run: `data.validation_path`, and those of `data.validation_sets`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import RowSchema
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.rows import Rows, load_rows
from nemo_like.metrics import Metrics
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.encoding import PromptRows, encode_question

MAX_SOURCES = 64
"""Different values of `data.source_column` in one set; each has metrics of its own."""


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one validation set, P of them."""

    name: str
    """"" for `data.validation_path`."""
    rows: Rows
    prompts: Sequence[Prompt]
    row_numbers: Sequence[int]
    """Row of each prompt, counted from 0: rows that are too long have no prompt."""
    sources: Sequence[str] | None = None
    """The source of each prompt, with `data.source_column`."""


def validation_key(name: str) -> str:
    """Return the config key of a set."""
    return f"data.validation_sets.{name}" if name else "data.validation_path"


def named_metrics(name: str, metrics: Metrics) -> Metrics:
    """Return the metrics of a set by their logged names."""
    named: Metrics = {}
    for metric, value in metrics.items():
        named[f"validation/{name}/{metric}" if name else f"validation/{metric}"] = value
    return named


def source_metrics(name: str, source: str, metrics: Metrics) -> Metrics:
    """Return the metrics of one source of a set by their logged names."""
    named = {f"source_{source}/{metric}": value for metric, value in metrics.items()}
    return named_metrics(name, named)


def load_validation(config: RunConfig, schema: RowSchema) -> dict[str, Rows]:
    """Read the rows of every validation set, by name.

    Raises ConfigError for a missing or empty file, or a bad line.
    """
    rows = {}
    for name, path in config.data.validation_files.items():
        rows[name] = load_rows(
            path,
            schema,
            max_rows=config.data.max_validation_rows,
            key=validation_key(name),
            columns=config.data.columns,
        )
    return rows


def prompt_sets(
    config: RunConfig, encoder: ChatEncoder, validation: Mapping[str, Rows]
) -> list[PromptSet]:
    """Return the validation rows as prompts, without the rows dropped as too long.

    Raises ConfigError for a bad row, and for rows without the column `data.source_column`.
    """
    sets = []
    for name, rows in validation.items():
        encoded = EncodedRows(rows, partial(encode_question, encoder, config))
        prompts = []
        numbers = []
        for number, prompt in enumerate(PromptRows(rows, encoded).fetch(range(len(rows)))):
            if prompt is not None:
                prompts.append(prompt)
                numbers.append(number)
        sources = None
        if config.data.source_column is not None:
            columns = [prompt.row for prompt in prompts]
            sources = row_sources(columns, config.data.source_column, validation_key(name))
        sets.append(
            PromptSet(name=name, rows=rows, prompts=prompts, row_numbers=numbers, sources=sources)
        )
    return sets


def check_sources(config: RunConfig, validation: Mapping[str, Rows]) -> None:
    """Raise ConfigError if a row has no source, or a set has too many."""
    column = config.data.source_column
    if column is None:
        return
    for name, rows in validation.items():
        columns = [rows[index] for index in range(len(rows))]
        row_sources(columns, column, validation_key(name))


def row_sources(rows: Sequence[Mapping[str, Any]], column: str, key: str) -> list[str]:
    """Return the source of each row as a part of a metric's name. Raises ConfigError."""
    sources = []
    for row in rows:
        value = row.get(column)
        if value is None:
            raise ConfigError(
                f"data.source_column is {column!r}, but a row of {key} has no value in it; its"
                f" columns are {', '.join(row)}. Add the column to every row, or set"
                " data.source_column to null"
            )
        sources.append(re.sub(r"[^A-Za-z0-9_.-]", "_", str(value)))
    num_sources = len(set(sources))
    if num_sources > MAX_SOURCES:
        raise ConfigError(
            f"data.source_column {column!r} has {num_sources} different values in {key}, each"
            f" of which has separate metrics; at most {MAX_SOURCES} are possible"
        )
    return sources
