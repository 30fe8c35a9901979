"""Rows of a file as the token ids a run works with: encoded once, ahead of the steps, long ones as
the config says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import GrpoRunConfig, RunConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.collate import EncodedRow
from nemo_like.data.datasets import Row, Rows, conversation, question
from nemo_like.data.encoded_rows import EncodedRows
from nemo_like.data.tools import row_tools
from nemo_like.progress import Progress
from nemo_like.rollout.prompt import Prompt

WORKER_MODULE = "nemo_like.training.encoding_worker"
_POLICY_KEYS = (
    "model_name",
    "tokenizer_name",
    "chat_template",
    "max_total_sequence_length",
    "oversize_rows",
)


def encode_conversation(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """One SFT row; None if it is too long and `policy.oversize_rows` is drop. Raises ConfigError if
    that is error.
    """
    encoded = encoder.encode_sft(conversation(row), row_tools(row))
    limit, length = config.policy.max_total_sequence_length, len(encoded.input_ids)
    if length <= limit or config.policy.oversize_rows == "singleton":
        return encoded
    if config.policy.oversize_rows == "truncate":
        return EncodedRow(encoded.input_ids[:limit], encoded.token_mask[:limit])
    if config.policy.oversize_rows == "drop":
        return None
    raise ConfigError(
        f"the row has {length} tokens, policy.max_total_sequence_length is {limit}; raise it, or"
        f" set policy.oversize_rows"
        " to truncate (cut the end), drop (leave the row out) or singleton (run it alone)"
    )


def encode_question(encoder: ChatEncoder, config: RunConfig, row: Row) -> EncodedRow | None:
    """The prompt of one row, without trained tokens.

    A prompt that leaves no room for a completion is cut at its beginning, so that `max_new_tokens`
    fit behind it, or None, or a ConfigError, as `policy.oversize_rows` says.
    """
    asked = question(row)
    token_ids = encoder.encode_prompt(asked.messages, asked.tools)
    policy = config.policy
    limit, length = policy.max_total_sequence_length, len(token_ids)
    if length >= limit:
        if policy.oversize_rows == "drop":
            return None
        if policy.oversize_rows != "truncate":
            raise ConfigError(
                f"the prompt has {length} tokens, policy.max_total_sequence_length is {limit}, so"
                f" there is no room for a"
                " completion; raise it, or set policy.oversize_rows to truncate (cut the beginning)"
                " or drop (leave the row out)"
            )
        token_ids = token_ids[-max(limit - policy.generation.max_new_tokens, 1) :]
    return EncodedRow(token_ids, np.zeros(len(token_ids), dtype=np.uint8))


class PromptRows:
    """Encoded rows as prompts."""

    def __init__(self, rows: Rows, encoded: EncodedRows) -> None:
        self._rows, self._encoded = rows, encoded
        self.digests = rows.digests

    def fetch(self, rows: Sequence[int]) -> list[Prompt | None]:
        """See `loader.FetchableRows`."""
        prompts: list[Prompt | None] = []
        for row, encoded in zip(rows, self._encoded.fetch(rows), strict=True):
            if encoded is None:
                prompts.append(None)
                continue
            asked = question(self._rows[row])
            prompts.append(
                Prompt(
                    token_ids=encoded.input_ids, text=asked.text, answer=asked.answer, row=asked.row
                )
            )
        return prompts

    def location(self, row: int) -> str:
        """See `loader.FetchableRows`."""
        return self._encoded.location(row)


def encoding_setup(config: RunConfig) -> dict[str, Any]:
    """What of a config the encoding of a row depends on, as JSON values."""
    return {
        "purpose": "rl" if isinstance(config, GrpoRunConfig) else "sft",
        "policy": {key: getattr(config.policy, key) for key in _POLICY_KEYS},
        "max_new_tokens": config.policy.generation.max_new_tokens,
        "data": dataclasses.asdict(config.data),
    }


def open_training_rows(config: RunConfig, encoder: ChatEncoder, rows: Rows) -> EncodedRows:
    """The training rows, which encoding processes may work on."""
    encode = encode_question if isinstance(config, GrpoRunConfig) else encode_conversation
    return EncodedRows(
        rows,
        partial(encode, encoder, config),
        module=WORKER_MODULE,
        setup=encoding_setup(config),
        num_processes=config.data.num_encoding_workers,
    )


def start_encoding(
    config: RunConfig, rows: EncodedRows, order: np.ndarray, num_needed: int
) -> None:
    """Begin to encode the rows that the run will visit: the first `num_needed` of `order`, int64
    [N].

    With `policy.oversize_rows=drop` that is every row, and all are encoded when this returns,
    because the number of steps depends on how many are left. Raises ConfigError for a bad row that
    is found at once.
    """
    if config.policy.oversize_rows != "drop":
        rows.start(order[:num_needed])
        return
    rows.start(order)
    finish_encoding(config, rows, Progress())


def finish_encoding(config: RunConfig, rows: EncodedRows, progress: Progress) -> None:
    """Wait for the rows that `start_encoding` began with, at most `data.encoding_timeout_s`, and
    say what was left out.

    Raises ConfigError for a bad row.
    """
    if rows.is_finished:
        return
    must_wait = config.policy.oversize_rows == "drop"
    with progress.phase("encoding rows", rows.num_started) as phase:
        done = rows.finish(phase.advance, None if must_wait else config.data.encoding_timeout_s)
    if not done:
        progress.say(
            f"{rows.num_encoded:,} of {rows.num_started:,} rows are encoded after"
            f" data.encoding_timeout_s; the others are"
            " encoded and checked during training"
        )
    dropped = np.flatnonzero(~rows.is_kept)
    if len(dropped):
        progress.say(
            f"policy.oversize_rows=drop leaves {len(dropped):,} of {len(rows):,} rows out, the"
            f" first is"
            f" {rows.location(int(dropped[0]))}: longer than policy.max_total_sequence_length"
            f" {config.policy.max_total_sequence_length}"
        )
