"""The training and validation sets of a run, from the files that `data` names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import MAIN_SET, RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.datasets import RowSchema
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.mixture import Mixture
from nemo_like.data.row_columns import check_columns
from nemo_like.data.rows import PassRateFilter, Rows, load_rows
from nemo_like.metrics import Metrics
from nemo_like.rollout.conversations import Prompt
from nemo_like.run.progress import Progress
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


def load_training(config: RunConfig, schema: RowSchema, progress: Progress) -> Rows:
    """Read the training rows. Raises ConfigError for a missing or empty file, or a bad line."""
    check_columns(config.data.columns)
    sets = {name: load_set(config, schema, name, progress) for name in training_files(config)}
    return mixed_rows(sets, config.data.train_weights)


def training_files(config: RunConfig) -> dict[str, str]:
    """Return the path of each training set by its name."""
    return {MAIN_SET: config.data.train_path, **config.data.train_sets}


def training_name(config: RunConfig) -> str:
    """Return the training rows by name, for messages: the file, or the sets of a mixture."""
    names = list(training_files(config))
    return config.data.train_path if len(names) == 1 else f"the training sets {', '.join(names)}"


def load_set(config: RunConfig, schema: RowSchema, name: str, progress: Progress) -> Rows:
    """Read one training set. Raises ConfigError for a missing or empty file, or a bad line."""
    data = config.data
    key = training_key(name)
    with progress.phase(f"reading {key}") as phase:
        rows = load_rows(
            training_files(config)[name],
            schema,
            max_rows=data.max_train_rows,
            key=key,
            columns=data.columns,
            selection=_selection(config),
            advance=phase.advance,
        )
    if rows.num_left_out:
        progress.print_line(
            f"{key}: data.min_pass_rate and data.max_pass_rate leave out {rows.num_left_out:,}"
            f" rows, {len(rows):,} are left"
        )
    return rows


def describe_mixture(mixture: Mixture) -> str:
    """Describe the shares of the sources.

    Example: `mixture: train 0.7 (0.9 passes per epoch), code 0.3 (2.1 passes per epoch)`.
    """
    total = sum(mixture.weights)
    parts = []
    for name, size, weight in zip(mixture.names, mixture.sizes, mixture.weights, strict=True):
        passes = weight / total * sum(mixture.sizes) / size
        parts.append(f"{name} {weight / total:.4g} ({passes:.3g} passes per epoch)")
    return f"mixture: {', '.join(parts)}"


def _selection(config: RunConfig) -> PassRateFilter | None:
    """Return the filter of the training rows; None if all are kept."""
    data = config.data
    if data.min_pass_rate is None and data.max_pass_rate is None:
        return None
    return PassRateFilter(
        minimum=0.0 if data.min_pass_rate is None else data.min_pass_rate,
        maximum=1.0 if data.max_pass_rate is None else data.max_pass_rate,
    )


def training_key(name: str) -> str:
    """Return the config key of a training set."""
    return "data.train_path" if name == MAIN_SET else f"data.train_sets.{name}"


def mixed_rows(sets: Mapping[str, Rows], weights: Mapping[str, float]) -> Rows:
    """Return the rows of several sets with their mixture; a single set is unchanged.

    Without `weights` these are the numbers of rows, so each row is visited once per epoch.
    """
    if len(sets) == 1:
        return next(iter(sets.values()))
    sizes = tuple(map(len, sets.values()))
    by_name = weights or dict(zip(sets, map(float, sizes), strict=True))
    mixture = Mixture(names=tuple(sets), sizes=sizes, weights=tuple(by_name[name] for name in sets))
    first, *others = sets.values()
    return first.mixed_with(others, mixture)
