"""Rows as prompts: training examples of rollouts, and the prompts of validation sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import EncodedRows, Examples
from nemo_like.data.formats import question
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.rows import Rows
from nemo_like.rollout.conversations import Prompt
from nemo_like.training.encoding import RowLimits, encode_question
from nemo_like.training.run_data import report_skipped, validation_key


@dataclass(frozen=True, kw_only=True)
class PromptSet:
    """The prompts of one validation set, P of them."""

    name: str
    """"" for `data.validation_path`."""
    rows: Rows
    prompts: Sequence[Prompt]
    row_numbers: Sequence[int]
    """Row of each prompt, counted from 0: rows that are too long have no prompt."""


def prompt_sets(
    encoder: ChatEncoder, limits: RowLimits, validation: Mapping[str, Rows]
) -> list[PromptSet]:
    """Return the validation rows as prompts, without the rows dropped as too long.

    Raises ConfigError for a bad row.
    """
    sets = []
    for name, rows in validation.items():
        encoded = EncodedRows(rows, partial(encode_question, encoder, limits))
        prompts = []
        numbers = []
        for number, prompt in enumerate(prompt_examples(rows, encoded).fetch(range(len(rows)))):
            if prompt is not None:
                prompts.append(prompt)
                numbers.append(number)
        report_skipped(encoded.skipped, validation_key(name))
        sets.append(PromptSet(name=name, rows=rows, prompts=prompts, row_numbers=numbers))
    return sets


def prompt_examples(rows: Rows, encoded: EncodedRows) -> Examples[Prompt]:
    """Return encoded rows as prompts."""
    return Examples(encoded, partial(prompt_of, rows))


def prompt_of(rows: Rows, row: int, encoded: EncodedRow) -> Prompt:
    """Return an encoded row of `rows` as a prompt."""
    fields = question(rows[row])
    return Prompt(
        token_ids=encoded.input_ids,
        text=fields.text,
        answer=fields.answer,
        row=fields.row,
        images=encoded.images,
    )
