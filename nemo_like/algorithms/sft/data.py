"""The training rows of SFT: conversations, their checks and their lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nemo_like.algorithms.sft.config import SftRunConfig
from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import policy_layout
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import SFT_ROWS, Rows, conversation
from nemo_like.data.loader import RowLoader
from nemo_like.data.streaming.loader import RowNumbers, StreamLoader
from nemo_like.data.tools import row_tools
from nemo_like.diagnostics.chat_checks import check_prompts_agree, check_texts
from nemo_like.diagnostics.plan_preview import describe_plan
from nemo_like.diagnostics.report import Diagnostics
from nemo_like.diagnostics.row_checks import (
    NUM_SAMPLES,
    check_lengths,
    check_vocabulary,
    encode_sample,
)
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec, stream_spec
from nemo_like.prediction.lengths import RowLengths
from nemo_like.progress import Progress, Sample
from nemo_like.training.dataset import (
    ExampleSource,
    RunData,
    describe_run,
    encoded_examples,
    open_data,
)
from nemo_like.training.encoding import encode_conversation
from nemo_like.training.model_files import open_model_spec
from nemo_like.training.run_warnings import answer_warnings, step_warnings

if TYPE_CHECKING:
    from transformers import PretrainedConfig


SftLoader = RowLoader[EncodedRow] | StreamLoader[EncodedRow]

ROW_SCHEMA = SFT_ROWS
encode_row = encode_conversation


def rewarded_rows(train: Rows | None, validation: Rows | None) -> Rows | None:
    """Return the rows whose completions the reward functions score."""
    return validation


def open_source(config: SftRunConfig, data: RunData | None = None) -> ExampleSource[EncodedRow]:
    """Return the training rows of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, ROW_SCHEMA)
    return ExampleSource(config, data, encode_row, encoded_examples)


def open_loader(
    config: SftRunConfig,
    source: ExampleSource[EncodedRow],
    model: ModelSpec | None = None,
) -> SftLoader:
    """Return the loader of the training rows, which also plans them if they are streamed.

    `model` gives the work of a row; None reads it from the files of the model.
    Raises ConfigError for values of `data.batching` that do not fit together.
    """
    batching = config.data.batching
    if not batching.is_streaming:
        return source.loader()
    plan = plan_spec(
        config.policy,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model or open_model_spec(config),
        seed=config.seed,
    )
    try:
        spec = stream_spec(batching, plan)
    except ValueError as error:
        raise ConfigError(f"data.batching: {error}") from error
    return StreamLoader(
        encoded_examples(source.data.train, source.rows),
        spec,
        _row_numbers,
        num_epochs=None if batching.tail == "wrap" else config.sft.max_num_epochs,
        seed=config.seed,
        shuffle=config.data.shuffle,
    )


def _row_numbers(row: EncodedRow) -> RowNumbers:
    return RowNumbers(len(row.input_ids), int(row.token_mask.sum()))


def check_rows(
    config: SftRunConfig,
    data: RunData,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check texts, lengths, budgets and loss masks; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    encoder = data.encoder
    check_texts(encoder, data.train, conversation, diagnostics)
    check_prompts_agree(encoder, data.train, diagnostics)
    source = open_source(config, data)
    diagnostics.warnings += answer_warnings(config, data.train)
    num_steps = diagnostics.check(lambda: source.num_steps(config.sft))
    if num_steps is not None:
        diagnostics.add_lines("data", describe_run(config, num_steps, len(data.train)))
        diagnostics.warnings += step_warnings(config, num_steps)
    for rows in (data.train, data.validation):
        if rows is None:
            continue
        encoded = encode_sample(
            rows, lambda row: encoder.encode_sft(conversation(row), row_tools(row)), diagnostics
        )
        lengths = {index: len(row.input_ids) for index, row in encoded.items()}
        check_lengths(config, rows, lengths, diagnostics)
        if rows is data.train:
            check_vocabulary(model, [row.input_ids for row in encoded.values()], diagnostics)
            untrained = [index for index, row in encoded.items() if not row.token_mask.any()]
            if untrained:
                diagnostics.warnings.append(
                    f"{len(untrained)} of the rows sampled have no token with loss, e.g."
                    f" {rows.locations[untrained[0]]}"
                )
            for index in sorted(encoded)[:NUM_SAMPLES]:
                diagnostics.samples.append(Sample(encoder.segments(encoded[index])))
    if len(diagnostics.problems) == num_problems_before:
        batch = diagnostics.check(lambda: next(source.loader()))
        lengths_of_step = np.array([len(row.input_ids) for row in batch or ()], dtype=np.int64)
        describe_plan(config, "the first step", lengths_of_step, model, diagnostics)


def first_lengths(
    config: SftRunConfig,
    data: RunData,
    num_steps: int,
    progress: Progress,
) -> RowLengths:
    """Return the row lengths of the first steps."""
    source = open_source(config, data)
    num_batches = min(num_steps, source.num_steps(config.sft))
    rows = source.first_examples(num_batches, progress)
    lengths = np.array([len(row.input_ids) for row in rows], dtype=np.int64)
    return RowLengths(lengths, config.data.train_path, is_ordered=True)
