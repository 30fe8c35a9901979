"""Rows of SFT that are no conversations: raw text, and rows that are tokenized already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.collate import EncodedRow
from nemo_like.data.row_files import Row, shown_json

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatEncoder

NO_LABEL = -100
"""Label of a token without loss, as in the Hugging Face libraries."""
_MAX_TOKEN_ID = 2**31 - 1
_MASKS_OF_OTHER_TOOLS = ("assistant_masks", "completion_mask", "loss_mask")
"""Names of a loss mask in TRL, transformers and others."""


def token_row_problem(row: Row) -> str | None:
    """Describe the problem of a row with `input_ids`, or return None."""
    ids = row["input_ids"]
    if ids == []:
        return "column 'input_ids' is an empty list, without a token"
    if not isinstance(ids, list):
        return f"column 'input_ids' is {shown_json(ids)}, not a list of token ids"
    for index, token in enumerate(ids):
        if not _is_int(token) or not 0 <= token <= _MAX_TOKEN_ID:
            return f"input_ids[{index}] is {shown_json(token)}, not a token id"
    if row.get("labels") is not None and row.get("token_mask") is not None:
        return "the row has both 'labels' and 'token_mask'; remove one of them"
    for column in ("labels", "token_mask"):
        values = row.get(column)
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != len(ids):
            return f"column {column!r} is {shown_json(values)}, not a list of {len(ids)} numbers"
        problem = _mask_problem(ids, values, column)
        if problem:
            return problem
    # Nothing predicts the first token.
    if not trained_tokens(row)[1:].any():
        return (
            "no token of 'input_ids' after the first has a loss; set a label or a token_mask of 1"
        )
    return _ignored_mask_problem(row)


def _ignored_mask_problem(row: Row) -> str | None:
    """Describe a mask of another tool that would be ignored, or return None."""
    mask = row.get("attention_mask")
    if isinstance(mask, list) and 0 in mask:
        return (
            f"attention_mask[{mask.index(0)}] is 0, so 'input_ids' has padding; remove it: rows are"
            " padded or packed when a microbatch is formed"
        )
    if row.get("labels") is not None or row.get("token_mask") is not None:
        return None
    for column in _MASKS_OF_OTHER_TOOLS:
        mask = row.get(column)
        if isinstance(mask, list) and 0 in mask:
            return (
                f"column {column!r} has tokens without loss, but only 'labels' and 'token_mask' are"
                f" read; set data.columns.token_mask to {column}"
            )
    return None


def trained_tokens(row: Row) -> np.ndarray:
    """Return the loss mask of a row with `input_ids`, uint8 [L]; all 1 without a mask."""
    if row.get("token_mask") is not None:
        return np.array(row["token_mask"], dtype=np.uint8)
    if row.get("labels") is not None:
        return (np.array(row["labels"]) != NO_LABEL).astype(np.uint8)
    return np.ones(len(row["input_ids"]), dtype=np.uint8)


def encode_token_row(encoder: ChatEncoder, row: Row) -> EncodedRow:
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


def encode_text(encoder: ChatEncoder, text: str) -> EncodedRow:
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


def _mask_problem(ids: list[int], values: list[Any], column: str) -> str | None:
    """Describe the first entry that is no label or mask of its token, or return None."""
    for index, (token, value) in enumerate(zip(ids, values, strict=True)):
        if column == "token_mask" and (not _is_int(value) or value not in (0, 1)):
            return f"token_mask[{index}] is {shown_json(value)}, not 0 or 1"
        if column == "labels" and (not _is_int(value) or value not in (token, NO_LABEL)):
            return (
                f"labels[{index}] is {shown_json(value)}, neither the token id {token} at the same"
                f" position nor {NO_LABEL} (no loss); labels are not shifted"
            )
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
