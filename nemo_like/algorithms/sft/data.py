"""The training rows of SFT: conversations, in fixed batches or streamed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import numpy as np

from nemo_like.algorithms.rows import open_data, row_settings, training_plan_spec
from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.import_path import import_function, user_error_text
from nemo_like.config.schema import PolicyConfig
from nemo_like.data.formats import SFT_ROWS, RowSchema
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.loader import BatchLoader
from nemo_like.data.planning.token_counts import count_tokens
from nemo_like.data.row_files import Row
from nemo_like.data.row_order import Curriculum
from nemo_like.data.streaming.planner import RowNumbers, StreamLoader
from nemo_like.models.spec import ModelSpec
from nemo_like.models.vision import VisionSpec
from nemo_like.policy.batching import stream_spec, with_image_work
from nemo_like.run.progress import Progress
from nemo_like.training.encoding import encode_conversation
from nemo_like.training.run_data import ExampleSource, RunData, encoded_examples


def row_schemas(config: SftRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    return SFT_ROWS, SFT_ROWS


def open_source(config: SftRunConfig, data: RunData | None = None) -> ExampleSource[EncodedRow]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    return ExampleSource(row_settings(config), data, encode_conversation, encoded_examples)


def open_loader(
    config: SftRunConfig, source: ExampleSource[EncodedRow], model: ModelSpec | None
) -> BatchLoader[EncodedRow]:
    """Return the loader of the training rows; see `open_stream`."""
    if config.data.batching.is_streaming:
        return open_stream(config, source, model)
    return source.loader(open_curriculum(config.data.curriculum, source))


def open_curriculum(
    name: str | None, source: ExampleSource[EncodedRow], progress: Progress | None = None
) -> Curriculum | None:
    """Return the difficulty of the rows by `data.curriculum`; None without one.

    For `length` every row is encoded. Raises ConfigError for a row without a finite number.
    """
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

    `model` gives the work of a row; the default is the work in a dense 7B model.
    Raises ConfigError for values of `data.batching` that do not fit together.
    """
    batching = config.data.batching
    plan = training_plan_spec(config, model)
    return StreamLoader(
        source.rows,
        source.order(open_curriculum(config.data.curriculum, source)),
        stream_spec(batching, plan),
        partial(_row_numbers, config.policy, source.data.encoder.vision),
        num_epochs=None if batching.tail == "wrap" else config.sft.max_num_epochs,
    )


def _row_numbers(policy: PolicyConfig, vision: VisionSpec | None, row: EncodedRow) -> RowNumbers:
    numbers = RowNumbers(len(row.input_ids), row.num_trained)
    counts = with_image_work(count_tokens([row]), [row.images], policy, vision)
    if counts.image_tokens is None or counts.image_work is None:
        return numbers
    return numbers._replace(images=(int(counts.image_tokens[0]), int(counts.image_work[0])))
