"""Preference pairs of DPO and of reward models: encoding, batches, checks and lengths."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nemo_like.algorithms.preferences.config import PreferenceRunConfig
from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import RowSchema
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.messages import Message
from nemo_like.data.planning.token_counts import TokenCounts, count_tokens
from nemo_like.data.preferences import (
    MARGIN_ROWS,
    PREFERENCE_ROWS,
    PreferencePair,
    encode_preference,
    join_pair,
    pair_margin,
    preference,
    split_pair,
)
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress, Sample
from nemo_like.training.diagnostics import (
    Diagnostics,
    check_lengths,
    check_num_steps,
    check_texts,
    describe_plan,
    encode_sample,
)
from nemo_like.training.row_sample import NUM_SAMPLES, length_lines
from nemo_like.training.run_data import ExampleSource, RunData, fit_row, open_data, training_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_like.distributed.batched_data_dict import BatchedDataDict


def row_schemas(config: PreferenceRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    schema = MARGIN_ROWS if config.kind == "rm" else PREFERENCE_ROWS
    return schema, schema


def open_source(
    config: PreferenceRunConfig, data: RunData | None = None
) -> ExampleSource[PreferencePair]:
    """Return the training pairs of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    return ExampleSource(config, data, encode_row, partial(_pair_examples, config))


def encode_row(encoder: ChatEncoder, config: PreferenceRunConfig, row: Row) -> EncodedRow | None:
    """Encode a pair as joined rows; None if `policy.oversize_rows` drops one of them.

    Raises ConfigError if a row is too long and `policy.oversize_rows` is error, if no token of a
    completion is left, or if both rows are equal.
    """
    rows = []
    encoded_pair = encode_preference(encoder, row)
    for name, encoded in zip(("chosen", "rejected"), encoded_pair.rows, strict=True):
        fitted = fit_row(encoded, config)
        if fitted is None:
            return None
        # Position 0 predicts nothing, so its token is never compared.
        # A pair without one of its completions would train towards an arbitrary margin.
        if fitted.num_trained == 0:
            raise ConfigError(
                f"the {name} completion has no token within policy.max_total_sequence_length"
                f" {config.policy.max_total_sequence_length}; raise it, set policy.oversize_rows to"
                " drop, or remove the row"
            )
        rows.append(fitted)
    pair = PreferencePair(*rows)
    if np.array_equal(pair.chosen.input_ids, pair.rejected.input_ids):
        raise ConfigError(
            "the chosen and the rejected row have the same"
            f" {len(pair.chosen.input_ids)} tokens within policy.max_total_sequence_length"
            f" {config.policy.max_total_sequence_length}, so there is no preference; raise it, set"
            " policy.oversize_rows to drop, or remove the row"
        )
    return join_pair(pair)


def _pair_examples(
    config: PreferenceRunConfig, rows: Rows, encoded: EncodedRows
) -> Examples[PreferencePair]:
    """Return encoded rows as preference pairs, for a reward model with their margins."""

    def pair_of(row: int, joined: EncodedRow) -> PreferencePair:
        pair = split_pair(joined)
        if config.kind == "rm":
            pair = pair._replace(margin=pair_margin(rows[row]))
        return pair

    return Examples(encoded, pair_of)


def collate_pairs(pairs: Sequence[PreferencePair]) -> BatchedDataDict:
    """Return the batch of 2N rows of N pairs: chosen, rejected, chosen, ...

    Besides the columns of `collate` it has `pair` int64 [2N], the index of the pair, `is_chosen`
    bool [2N], and `margin` float32 [2N], equal in the rows of a pair.
    """
    rows = [row for pair in pairs for row in pair.rows]
    margins = np.array([pair.margin for pair in pairs], dtype=np.float32)
    # The module imports torch, which `validate` does not need.
    from nemo_like.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(
        {
            **collate(rows),
            "pair": np.repeat(np.arange(len(pairs), dtype=np.int64), 2),
            "is_chosen": np.tile([True, False], len(pairs)),
            "margin": np.repeat(margins, 2),
        }
    )


def check_rows(
    config: PreferenceRunConfig,
    data: RunData,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check texts, lengths and budgets of pairs; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    source = open_source(config, data)
    encoder = data.encoder
    check_texts(encoder, data.train, _messages, diagnostics)
    check_num_steps(source, diagnostics)
    for rows in (data.train, *data.validation.values()):
        pairs = encode_sample(rows, lambda row: encode_preference(encoder, row), diagnostics)
        # The limit of a row holds for each of the two.
        longer = {
            index: max(pair.rows, key=lambda row: len(row.input_ids))
            for index, pair in pairs.items()
        }
        lengths = {index: len(row.input_ids) for index, row in longer.items()}
        check_lengths(config, rows, lengths, diagnostics)
        if rows is data.train:
            trained = {index: row.num_trained for index, row in longer.items()}
            lines = length_lines(rows, lengths, config.policy, trained)
            diagnostics.add_lines("lengths", *lines)
            for index in sorted(pairs)[:NUM_SAMPLES]:
                diagnostics.samples += pair_samples(encoder, pairs[index])
    if len(diagnostics.problems) == num_problems_before:
        batch = diagnostics.check(lambda: next(source.loader())) or []
        counts = _count_tokens(batch)
        describe_plan(config, "the first step", counts, model, diagnostics)


def pair_samples(encoder: ChatEncoder, pair: PreferencePair) -> list[Sample]:
    """Return both rows of a pair for the console, the compared tokens highlighted."""
    samples = []
    for name, row in zip(("chosen", "rejected"), pair.rows, strict=True):
        samples.append(Sample(encoder.segments(row), notes={"completion": name}))
    return samples


def first_lengths(
    config: PreferenceRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps, those of a pair next to each other."""
    source = open_source(config, data)
    pairs = source.first_examples(min(num_steps, source.num_steps()), progress)
    description = f"{training_name(config)}, two rows per pair"
    return RowLengths(_count_tokens(pairs), description, is_ordered=True)


def _count_tokens(pairs: Sequence[PreferencePair]) -> TokenCounts:
    """Count the tokens of the 2N rows of N pairs."""
    pair_ids = np.repeat(np.arange(len(pairs)), 2)
    return count_tokens([row for pair in pairs for row in pair.rows], pair_ids)


def _messages(row: Row) -> list[Message]:
    texts = preference(row)
    return [*texts.prompt, *texts.chosen, *texts.rejected]
