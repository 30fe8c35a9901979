"""The training rows of SFT: conversations, their checks and their lengths."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.errors import ConfigError, counted, plural
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.config.parallel import policy_layout
from nemo_like.data.formats import SFT_ROWS, RowSchema, conversation
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.loader import BatchLoader
from nemo_like.data.planning.token_counts import count_tokens
from nemo_like.data.row_files import Row
from nemo_like.data.row_order import Curriculum
from nemo_like.data.rows import Rows
from nemo_like.data.streaming.former import WindowWarning
from nemo_like.data.streaming.planner import RowNumbers, StreamLoader
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec, stream_spec
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress
from nemo_like.training.diagnostics import (
    Diagnostics,
    check_conversations,
    check_num_steps,
    check_prompts_agree,
    check_texts,
    describe_plan,
)
from nemo_like.training.run_data import (
    ExampleSource,
    RunData,
    encode_conversation,
    encoded_examples,
    open_data,
    training_name,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig


encode_row = encode_conversation


def row_schemas(config: SftRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    return SFT_ROWS, SFT_ROWS


def open_source(config: SftRunConfig, data: RunData | None = None) -> ExampleSource[EncodedRow]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    return ExampleSource(config, data, encode_row, encoded_examples)


def open_loader(
    config: SftRunConfig, source: ExampleSource[EncodedRow], model: ModelSpec | None
) -> BatchLoader[EncodedRow]:
    """Return the loader of the training rows; see `open_stream`."""
    if config.data.batching.is_streaming:
        return open_stream(config, source, model)
    return source.loader(_curriculum(config, source))


def _curriculum(
    config: SftRunConfig, source: ExampleSource[EncodedRow], progress: Progress | None = None
) -> Curriculum | None:
    """Return the difficulty of the rows by `data.curriculum`; None without one.

    For `length` every row is encoded. Raises ConfigError for a row without a finite number.
    """
    name = config.data.curriculum
    if name is None:
        return None
    rows = source.data.train
    if name == "length":
        phase_name = "encoding rows for data.curriculum=length"
        with (progress or Progress()).phase(phase_name, len(rows)) as phase:
            source.rows.encode_ahead(np.arange(len(rows)), phase.advance)
        return Curriculum(name, source.rows.lengths.astype(np.float64))
    column = name.removeprefix("column:")
    measure: Callable[[Row], Any] = methodcaller("get", column)
    if column == name:
        measure = import_function(
            "data.curriculum", name, "my_package.difficulty", "row of the file"
        )
    difficulty = np.empty(len(rows), dtype=np.float64)
    for index, row in enumerate(rows):
        place = f"{rows.location(index)}: data.curriculum {name}"
        try:
            value = measure(row)
        except Exception as error:
            # A function of the user can fail in any way.
            raise ConfigError(f"{place} failed with {user_error_text(error)}") from error
        is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        if not is_number or not np.isfinite(np.float32(value)):
            raise ConfigError(f"{place} is {value!r}; every row needs a finite number")
        difficulty[index] = float(value)
    return Curriculum(name, difficulty)


def open_stream(
    config: SftRunConfig, source: ExampleSource[EncodedRow], model: ModelSpec | None
) -> StreamLoader[EncodedRow]:
    """Return the loader of streamed rows, which also plans them.

    `model` gives the work of a row; without it, that of a dense 7B model is used.
    Raises ConfigError for values of `data.batching` that do not fit together.
    """
    batching = config.data.batching
    plan = plan_spec(
        config.policy,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model,
        seed=config.seed,
    )
    return StreamLoader(
        source.rows,
        stream_spec(batching, plan),
        _row_numbers,
        num_epochs=None if batching.tail == "wrap" else config.sft.max_num_epochs,
        seed=config.seed,
        shuffle=config.data.shuffle,
        curriculum=_curriculum(config, source),
        mixture=source.data.train.mixture,
    )


def _row_numbers(row: EncodedRow) -> RowNumbers:
    return RowNumbers(len(row.input_ids), row.num_trained)


def check_rows(
    config: SftRunConfig, data: RunData, model: PretrainedConfig | None, diagnostics: Diagnostics
) -> None:
    """Check texts, lengths, budgets and loss masks; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    check_texts(encoder, data.train, conversation, diagnostics)
    check_prompts_agree(encoder, diagnostics)
    source = open_source(config, data)
    is_streaming = config.data.batching.is_streaming
    if is_streaming:
        diagnostics.add_lines("data", _describe_stream(config, len(data.train)))
    else:
        check_num_steps(source, diagnostics)
    for rows in (data.train, *data.validation.values()):
        encoded = check_conversations(config, data, rows, diagnostics)
        if rows is data.train:
            _check_trained(config, rows, encoded, diagnostics)
    if len(diagnostics.problems) > num_problems_before:
        return
    if is_streaming:
        spec = None if model is None else ModelSpec.from_config(model)
        _describe_first_step(config, source, spec, diagnostics)
        return
    loader = diagnostics.check(lambda: open_loader(config, source, None))
    batch = None if loader is None else diagnostics.check(lambda: next(loader))
    describe_plan(config, "the first step", count_tokens(batch or ()), model, diagnostics)


def _check_trained(
    config: SftRunConfig, rows: Rows, encoded: Mapping[int, EncodedRow], diagnostics: Diagnostics
) -> None:
    """Warn about rows of which no token is trained, by index in `rows`."""
    limit = None
    if config.policy.oversize_rows == "truncate":
        limit = config.policy.max_total_sequence_length
    # Nothing predicts the first token.
    untrained = [index for index, row in encoded.items() if not row.token_mask[1:limit].any()]
    if untrained:
        cut = "" if limit is None else f" within policy.max_total_sequence_length {limit}"
        diagnostics.warnings.append(
            f"{len(untrained)} of the rows sampled have no token with loss{cut}, e.g."
            f" {rows.location(untrained[0])}"
        )


def _describe_stream(config: SftRunConfig, num_rows: int) -> str:
    """Describe the length of a run whose steps have different numbers of rows."""
    batching = config.data.batching
    limits = config.sft
    length = f"{counted(limits.max_num_epochs, 'epoch')} of {counted(num_rows, 'row')}"
    if limits.max_num_steps is not None:
        steps = counted(limits.max_num_steps, "step")
        length = f"{steps}" if batching.tail == "wrap" else f"{length}, at most {steps}"
    return (
        f"{length}; data.batching.kind {batching.kind} forms steps of"
        f" {batching.microbatches_per_step} full"
        f" {plural(batching.microbatches_per_step, 'microbatch', 'microbatches')} per worker"
    )


def _describe_first_step(
    config: SftRunConfig,
    source: ExampleSource[EncodedRow],
    model: ModelSpec | None,
    diagnostics: Diagnostics,
) -> None:
    """Form the first step of a stream; warn if the window is too small to fill a microbatch."""
    loader = diagnostics.check(lambda: open_stream(config, source, model))
    with warnings.catch_warnings(category=WindowWarning, action="ignore"):
        rows = None if loader is None else diagnostics.check(lambda: next(loader))
    if loader is None or rows is None:
        return
    step = loader.planned
    metrics = step.metrics()
    num_microbatches = step.plan.num_microbatches
    diagnostics.add_lines(
        "plan",
        f"the first step: {counted(len(rows), 'row')}, {int(step.plan.lengths.sum()):,} tokens,"
        f" {metrics['packing/padding_share']:.1%} padding,"
        f" {metrics['packing/utilization']:.1%} of the token budget used; microbatches per worker"
        f" and optimizer step: {num_microbatches}",
    )
    max_tokens = step.plan.spec.max_tokens or 0
    window_rows = config.data.batching.num_window_rows
    mean_length = float(step.plan.lengths.mean())
    counts_rows = loader.spec.window_tokens == 0
    is_small = window_rows * mean_length < max_tokens and len(source.data.train) > window_rows
    if counts_rows and is_small:
        diagnostics.warnings.append(
            f"data.batching.window_rows is {window_rows}, which at {mean_length:.0f} tokens per row"
            f" cannot fill a microbatch of {max_tokens:,} tokens; set it to"
            f" {math.ceil(4 * max_tokens / mean_length):,} or more"
        )


def first_lengths(
    config: SftRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps."""
    source = open_source(config, data)
    curriculum = _curriculum(config, source, progress)
    num_batches = min(num_steps, source.num_steps())
    rows = source.first_examples(num_batches, progress, curriculum)
    return RowLengths(count_tokens(rows), training_name(config), is_ordered=True)
