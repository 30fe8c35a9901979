"""Preference pairs of DPO and of reward models: their encoding and their batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from nemo_like.algorithms.preferences.config import PreferenceRunConfig
from nemo_like.algorithms.rows import open_data, row_settings
from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import RowSchema
from nemo_like.data.jagged import EncodedRow, collate
from nemo_like.data.preferences import (
    MARGIN_ROWS,
    PREFERENCE_ROWS,
    PreferencePair,
    encode_preference,
    join_pair,
    pair_margin,
    split_pair,
)
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.run.progress import Sample
from nemo_like.training.encoding import RowLimits, fit_row
from nemo_like.training.run_data import ExampleSource, RunData

if TYPE_CHECKING:
    from nemo_like.distributed.batched_data_dict import BatchedDataDict


def row_schemas(config: PreferenceRunConfig) -> tuple[RowSchema, RowSchema]:
    """Return the row formats of the training and of the validation files."""
    schema = MARGIN_ROWS if config.needs.head == "scores" else PREFERENCE_ROWS
    return schema, schema


def open_source(
    config: PreferenceRunConfig, data: RunData | None = None
) -> ExampleSource[PreferencePair]:
    """Return the training pairs of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, *row_schemas(config))
    # The loss of a reward model has the margins of the pairs.
    examples = partial(_pair_examples, has_margins=config.needs.head == "scores")
    return ExampleSource(row_settings(config), data, encode_row, examples)


def encode_row(encoder: ChatEncoder, limits: RowLimits, row: Row) -> EncodedRow | None:
    """Encode a pair as joined rows; None if `policy.oversize_rows` drops one of them.

    Raises ConfigError if a row is too long and `policy.oversize_rows` is error, if no token of a
    completion is left, or if both rows are equal.
    """
    rows = []
    encoded_pair = encode_preference(encoder, row)
    for name, encoded in zip(("chosen", "rejected"), encoded_pair.rows, strict=True):
        fitted = fit_row(encoded, limits)
        if fitted is None:
            return None
        # Position 0 predicts nothing, so its token is never compared.
        # A pair without one of its completions would train towards an arbitrary margin.
        if fitted.num_trained == 0:
            raise ConfigError(
                f"the {name} completion has no token within policy.max_total_sequence_length"
                f" {limits.length}; raise it, set policy.oversize_rows to"
                " drop, or remove the row"
            )
        rows.append(fitted)
    pair = PreferencePair(*rows)
    if np.array_equal(pair.chosen.input_ids, pair.rejected.input_ids):
        raise ConfigError(
            "the chosen and the rejected row have the same"
            f" {len(pair.chosen.input_ids)} tokens within policy.max_total_sequence_length"
            f" {limits.length}, so there is no preference; raise it, set"
            " policy.oversize_rows to drop, or remove the row"
        )
    return join_pair(pair)


def _pair_examples(
    rows: Rows, encoded: EncodedRows, *, has_margins: bool
) -> Examples[PreferencePair]:
    """Return encoded rows as preference pairs, with their margins if the loss has them."""

    def pair_of(row: int, joined: EncodedRow) -> PreferencePair:
        pair = split_pair(joined)
        if has_margins:
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


def pair_samples(encoder: ChatEncoder, pair: PreferencePair) -> list[Sample]:
    """Return both rows of a pair for the console, the compared tokens highlighted."""
    samples = []
    for name, row in zip(("chosen", "rejected"), pair.rows, strict=True):
        samples.append(Sample(encoder.segments(row), notes={"completion": name}))
    return samples
