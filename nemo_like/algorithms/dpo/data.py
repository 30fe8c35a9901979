"""The training pairs of DPO."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nemo_like.algorithms.dpo.config import DpoRunConfig
from nemo_like.algorithms.pair_data import (
    check_pairs,
    encode_row,
    pair_examples,
    pair_lengths,
    rewarded_rows,
)
from nemo_like.data.preferences import PREFERENCE_ROWS, PreferencePair
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Progress
from nemo_like.training.diagnostics import Diagnostics
from nemo_like.training.run_data import ExampleSource, RunData, open_data, training_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "ROW_SCHEMA",
    "check_rows",
    "encode_row",
    "first_lengths",
    "open_source",
    "rewarded_rows",
]

ROW_SCHEMA = PREFERENCE_ROWS


def open_source(config: DpoRunConfig, data: RunData | None = None) -> ExampleSource[PreferencePair]:
    """Return the training pairs of a run, from `data` or read from the files of the config.

    Raises ConfigError for a missing or bad file or row.
    """
    if data is None:
        data = open_data(config, ROW_SCHEMA)
    return ExampleSource(config, data, encode_row, pair_examples)


def check_rows(
    config: DpoRunConfig, data: RunData, model: PretrainedConfig | None, diagnostics: Diagnostics
) -> None:
    """Check texts, lengths and budgets; if all are fine, plan the first step."""
    source = open_source(config, data)
    check_pairs(source, config.dpo, lambda pair: pair, model, diagnostics)


def first_lengths(
    config: DpoRunConfig, data: RunData, num_steps: int, progress: Progress
) -> RowLengths:
    """Return the row lengths of the first steps, those of a pair next to each other."""
    source = open_source(config, data)
    pairs = source.first_examples(min(num_steps, source.num_steps(config.dpo)), progress)
    return pair_lengths(pairs, training_name(config))
