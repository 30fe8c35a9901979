"""The encoding of rows: conversations, texts, tokens and prompts, within the limits of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, counted
from nemo_like.config.schema import DataConfig, PolicyConfig
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.encoded_rows import OversizeError
from nemo_like.data.formats import (
    SFT_ROWS,
    conversation,
    flagged_conversation,
    question,
    trained_tokens,
)
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import TrainOn, mask_turns, row_tools, trained_turns
from nemo_like.data.row_files import Row
from nemo_like.parallel_layout import Oversize


@dataclass(frozen=True, kw_only=True)
class RowLimits:
    """What decides about the tokens of a row beside the tokenizer."""

    length: int
    """`policy.max_total_sequence_length`."""
    oversize: Oversize
    """`policy.oversize_rows`."""
    max_prompt_tokens: int | None
    """`data.max_prompt_tokens`."""
    max_new_tokens: int
    """`policy.generation.max_new_tokens`."""
    train_on: TrainOn
    """`data.train_on`."""

    @classmethod
    def of(cls, policy: PolicyConfig, data: DataConfig) -> RowLimits:
        """Return the limits of a run."""
        return cls(
            length=policy.max_total_sequence_length,
            oversize=policy.oversize_rows,
            max_prompt_tokens=data.max_prompt_tokens,
            max_new_tokens=policy.generation.max_new_tokens,
            train_on=data.train_on,
        )


EncodeRow = Callable[[ChatEncoder, RowLimits, Row], EncodedRow | None]
"""Encodes one row of a file. None drops the row; raises ConfigError for a bad row."""


def encode_conversation(encoder: ChatEncoder, limits: RowLimits, row: Row) -> EncodedRow | None:
    """Encode one SFT row; return None if it is too long and `policy.oversize_rows` is drop.

    Raises ConfigError if it is too long and `policy.oversize_rows` is error.
    """
    return fit_row(encode_sft_row(encoder, limits.train_on, row), limits)


def encode_sft_row(encoder: ChatEncoder, train_on: TrainOn, row: Row) -> EncodedRow:
    """Encode one SFT row of any format and length; see `data.train_on`.

    Raises ConfigError for loss flags that contradict `train_on` or leave nothing to learn.
    """
    columns = SFT_ROWS.recognize(row)
    if columns == ("input_ids",):
        return _encode_tokens(encoder, row)
    if columns == ("text",):
        return _encode_text(encoder, row["text"])
    turns = trained_turns(flagged_conversation(row), train_on)
    encoded = encoder.encode_sft(conversation(row), row_tools(row))
    if turns is not None:
        encoded = mask_turns(encoded, turns)
    return encoded if encoder.images is None else encoder.images.expand(encoded, row)


def _encode_tokens(encoder: ChatEncoder, row: Row) -> EncodedRow:
    """Return the tokens of a row with `input_ids`; nothing is added.

    Raises ConfigError for an id that the tokenizer or the model does not have.
    """
    ids = encoder.checked_ids(row["input_ids"])
    num_tokens = len(encoder.tokenizer)
    if ids.max() >= num_tokens:
        raise ConfigError(
            f"input_ids has the token id {ids.max()}, but the tokenizer"
            f" {encoder.tokenizer.name_or_path!r} has {num_tokens} tokens; was the row made with"
            " another tokenizer?"
        )
    return EncodedRow(ids, trained_tokens(row))


def _encode_text(encoder: ChatEncoder, text: str) -> EncodedRow:
    """Encode raw text with loss on all tokens.

    The tokenizer adds its own special tokens, such as the beginning of a sequence, unless the text
    has it already, as a rendered conversation does; the end-of-sequence token follows the text.
    """
    encoded: Any = encoder.tokenizer(text)["input_ids"]
    ids = list(encoded)
    bos_token_id = encoder.tokenizer.bos_token_id
    if bos_token_id is not None and ids[:2] == [bos_token_id, bos_token_id]:
        del ids[0]
    if not ids or ids[-1] != encoder.eos_token_id:
        ids.append(encoder.eos_token_id)
    return EncodedRow(encoder.checked_ids(ids), np.ones(len(ids), dtype=np.uint8))


def fit_row(encoded: EncodedRow, limits: RowLimits) -> EncodedRow | None:
    """Apply `policy.oversize_rows` to a row: return it, its beginning, or None to drop it.

    Raises ConfigError if it is too long and `policy.oversize_rows` is error.
    """
    length = len(encoded.input_ids)
    limit = limits.length
    # The planner gives a singleton a microbatch of its own.
    if length <= limit or limits.oversize == "singleton":
        return encoded
    if limits.oversize == "truncate":
        return encoded.beginning(limit)
    if limits.oversize == "drop":
        return None
    raise OversizeError(
        f"the row has {length} tokens, policy.max_total_sequence_length is {limit}"
        f"{_of_images(encoded)}; raise it, or set policy.oversize_rows to truncate (remove the"
        " end), drop (skip the row) or singleton (a separate microbatch)"
    )


def _of_images(encoded: EncodedRow) -> str:
    """Return the part of a message about the tokens of a row; empty without images."""
    num_tokens = sum(image.num_tokens for image in encoded.images)
    images = counted(len(encoded.images), "image")
    return f" ({num_tokens} of the tokens are of {images})" if encoded.images else ""


def encode_question(encoder: ChatEncoder, limits: RowLimits, row: Row) -> EncodedRow | None:
    """Encode the prompt of one row, with a token mask of zeros.

    Returns None for a prompt above `data.max_prompt_tokens`. For one that leaves no room for a
    completion, `policy.oversize_rows` decides: truncate removes its beginning, so that
    `max_new_tokens` fit behind it; drop returns None; the other values raise ConfigError.
    """
    prompt = question(row)
    token_ids = encoder.encode_prompt(prompt.messages, prompt.tools)
    encoded = EncodedRow(token_ids, np.zeros(len(token_ids), dtype=np.uint8))
    if encoder.images is not None:
        encoded = encoder.images.expand(encoded, row)
    length = len(encoded.input_ids)
    max_tokens = limits.max_prompt_tokens
    if max_tokens is not None and length > max_tokens:
        return None
    limit = limits.length
    if length >= limit:
        if limits.oversize == "drop":
            return None
        if limits.oversize != "truncate" or encoded.images:
            raise OversizeError(
                f"the prompt has {length} tokens, policy.max_total_sequence_length is {limit}, so"
                f" there is no room for a completion{_of_images(encoded)}; raise it, or set"
                " policy.oversize_rows to truncate (remove the beginning, without images only) or"
                " drop (skip the row)"
            )
        # The end of a prompt has the question and the opening of the assistant turn.
        num_kept = max(limit - limits.max_new_tokens, 1)
        return EncodedRow(encoded.input_ids[-num_kept:], encoded.token_mask[-num_kept:])
    return encoded


def encoding_settings(
    encode: EncodeRow, encoder: ChatEncoder, limits: RowLimits, data: DataConfig
) -> str:
    """Return all that the encoding of a row depends on, as text."""
    tokenizer: Any = encoder.tokenizer
    values = (
        f"{encode.__module__}.{encode.__qualname__}",
        data,
        limits,
        encoder.vocab_size,
        str(tokenizer.chat_template),
        tokenizer.special_tokens_map,
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else tokenizer.get_vocab(),
        *([] if encoder.images is None else [encoder.images]),
    )
    return repr(values)
