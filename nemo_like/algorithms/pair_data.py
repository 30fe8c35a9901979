"""Preference pairs of DPO and of reward models: encoding, batches, checks and lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import EpochLoopConfig, RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.jagged import EncodedRow, TokenCounts, collate, count_tokens
from nemo_like.data.messages import Message
from nemo_like.data.preferences import (
    PreferencePair,
    encode_preference,
    join_pair,
    preference,
    split_pair,
)
from nemo_like.data.row_files import Row
from nemo_like.data.rows import Rows
from nemo_like.prediction.lengths import RowLengths
from nemo_like.run.progress import Sample
from nemo_like.training.diagnostics import (
    NUM_SAMPLES,
    Diagnostics,
    check_lengths,
    check_texts,
    describe_plan,
    encode_sample,
)
from nemo_like.training.encoding import fit_row
from nemo_like.training.reporting import step_warnings
from nemo_like.training.run_data import ExampleSource, describe_run

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from nemo_like.distributed.batched_data_dict import BatchedDataDict

ExampleT = TypeVar("ExampleT")


def encode_row(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """Encode a pair as joined rows; None if `policy.oversize_rows` drops one of them.

    Raises ConfigError if a row is too long and `policy.oversize_rows` is error, if no token of a
    completion is left, or if both rows are equal.
    """
    rows = []
    for name, encoded in encode_preference(encoder, row)._asdict().items():
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


def rewarded_rows(train: Rows | None, validation: Rows | None) -> Rows | None:
    """Return None: a preference run samples no completions."""
    return None


def pair_examples(rows: Rows, encoded: EncodedRows) -> Examples[PreferencePair]:
    """Return the encoded rows as preference pairs."""
    return Examples(encoded, lambda _, joined: split_pair(joined))


def collate_pairs(pairs: Sequence[PreferencePair]) -> BatchedDataDict:
    """Return the batch of 2N rows of N pairs: chosen, rejected, chosen, ...

    Besides the columns of `collate` it has `pair` int64 [2N], the index of the pair, and
    `is_chosen` bool [2N].
    """
    rows: list[EncodedRow] = []
    for pair in pairs:
        rows.extend(pair)
    # The module imports torch, which `validate` does not need.
    from nemo_like.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict(
        {
            **collate(rows),
            "pair": np.repeat(np.arange(len(pairs), dtype=np.int64), 2),
            "is_chosen": np.tile([True, False], len(pairs)),
        }
    )


def check_pairs(
    source: ExampleSource[ExampleT],
    limits: EpochLoopConfig,
    pair_of: Callable[[ExampleT], PreferencePair],
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Check texts, lengths and budgets of pairs; if all are fine, plan the first step."""
    num_problems_before = len(diagnostics.problems)
    config = source.config
    data = source.data
    encoder = data.encoder
    check_texts(encoder, data.train, _messages, diagnostics)
    num_steps = diagnostics.check(lambda: source.num_steps(limits))
    if num_steps is not None:
        diagnostics.add_lines("data", describe_run(config, num_steps, len(data.train)))
        diagnostics.warnings += step_warnings(config, num_steps)
    for rows in (data.train, *data.validation.values()):
        pairs = encode_sample(rows, lambda row: encode_preference(encoder, row), diagnostics)
        # The limit of a row holds for each of the two.
        lengths = {index: max(_lengths(pair)) for index, pair in pairs.items()}
        check_lengths(config, rows, lengths, diagnostics)
        if rows is data.train:
            for index in sorted(pairs)[:NUM_SAMPLES]:
                diagnostics.samples += pair_samples(encoder, pairs[index])
    if len(diagnostics.problems) == num_problems_before:
        batch = diagnostics.check(lambda: next(source.loader())) or []
        counts = _count_tokens([pair_of(example) for example in batch])
        describe_plan(config, "the first step", counts, model, diagnostics)


def pair_samples(encoder: ChatEncoder, pair: PreferencePair) -> list[Sample]:
    """Return both rows of a pair for the console, the compared tokens highlighted."""
    samples = []
    for name, row in pair._asdict().items():
        samples.append(Sample(encoder.segments(row), notes={"completion": name}))
    return samples


def pair_lengths(pairs: Sequence[PreferencePair], name: str) -> RowLengths:
    """Return the lengths of the rows of pairs of the training set `name`, in their order."""
    lengths, num_trained = _count_tokens(pairs)
    description = f"{name}, two rows per pair"
    return RowLengths(lengths, description, is_ordered=True, num_trained=num_trained)


def _count_tokens(pairs: Sequence[PreferencePair]) -> TokenCounts:
    """Count the tokens of the 2N rows of N pairs."""
    return count_tokens([row for pair in pairs for row in pair])


def _lengths(pair: PreferencePair) -> tuple[int, int]:
    return len(pair.chosen.input_ids), len(pair.rejected.input_ids)


def _messages(row: Row) -> list[Message]:
    texts = preference(row)
    return [*texts.prompt, *texts.chosen, *texts.rejected]
