"""The training pairs of a reward model, with margins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from nemo_like.algorithms.pair_data import (
    check_pairs,
    collate_pairs,
    encode_row,
    pair_lengths,
    rewarded_rows,
)
from nemo_like.algorithms.reward_model.config import RewardModelRunConfig
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.preferences import MARGIN_ROWS, PreferencePair, pair_margin, split_pair
from nemo_like.data.rows import Rows
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress
from nemo_like.training.diagnostics import Diagnostics
from nemo_like.training.run_data import ExampleSource, RunData, open_data, training_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_like.distributed.batched_data_dict import BatchedDataDict

__all__ = [
    "ROW_SCHEMA",
    "MarginPair",
    "check_rows",
    "collate_margin_pairs",
    "encode_row",
    "first_lengths",
    "open_source",
    "preference_pair",
    "rewarded_rows",
]

ROW_SCHEMA = MARGIN_ROWS


class MarginPair(NamedTuple):
    """A preference pair and by how much the score of its first completion should be higher."""

    pair: PreferencePair
    margin: float


def margin_examples(rows: Rows, encoded: EncodedRows) -> Examples[MarginPair]:
    """Return the encoded rows as preference pairs with margins."""
    return Examples(
        encoded, lambda row, joined: MarginPair(split_pair(joined), pair_margin(rows[row]))
    )


def open_source(
    config: RewardModelRunConfig, data: RunData | None = None
) -> ExampleSource[MarginPair]:
    """Return the training pairs of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, ROW_SCHEMA)
    return ExampleSource(config, data, encode_row, margin_examples)


def preference_pair(example: MarginPair) -> PreferencePair:
    """Return the pair without its margin."""
    return example.pair


def collate_margin_pairs(pairs: Sequence[MarginPair]) -> BatchedDataDict:
    """Return the batch of 2N rows of N pairs; see `collate_pairs`.

    It has the column `margin` float32 [2N], equal in the rows of a pair.
    """
    batch = collate_pairs([each.pair for each in pairs])
    margins = np.array([each.margin for each in pairs], dtype=np.float32)
    batch["margin"] = np.repeat(margins, 2)
    return batch


def check_rows(
    config: RewardModelRunConfig,
    data: RunData,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check texts, lengths and budgets; if all are fine, plan the first step."""
    source = open_source(config, data)
    check_pairs(source, config.rm, preference_pair, model, diagnostics)


def first_lengths(
    config: RewardModelRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps, those of a pair next to each other."""
    source = open_source(config, data)
    examples = source.first_examples(min(num_steps, source.num_steps(config.rm)), progress)
    return pair_lengths([each.pair for each in examples], training_name(config))
