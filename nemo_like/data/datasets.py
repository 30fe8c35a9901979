"""Rows of text from a file: the format is recognized from the columns, and errors name the row.

A `RowSchema` has the formats that a job understands. Those of SFT and of rollouts are `messages`
(optionally `answer`), `prompt` with `completion` or `answer` or neither, GSM8K's `question` and
`answer` with `####`; each optionally with `tools`, the functions that the model may call. Rows are
converted to a conversation (for SFT) or a question (for a rollout). Nothing is tokenized here;
`row_loading` reads the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import printable, shortened
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.messages import (
    Message,
    Tool,
    calls_problem,
    clean_message,
    flags_problem,
    row_tools,
    tools_problem,
    unknown_roles,
)
from nemo_like.data.row_files import UNDERSTOOD, Row, shown_json

if TYPE_CHECKING:
    from nemo_like.data.chat import ChatEncoder

__all__ = [
    "MESSAGE_COLUMNS",
    "PROMPT_ROWS",
    "SFT_ROWS",
    "Message",
    "Question",
    "Row",
    "RowSchema",
    "conversation",
    "question",
]

_SURROGATE = re.compile("[\\ud800-\\udfff]")
MESSAGE_COLUMNS = ("messages", "prompt", "completion", "chosen", "rejected")
"""Columns that may have a list of messages."""
_PROMPT_FORMATS = (
    ("messages",),
    ("prompt", "completion"),
    ("prompt", "answer"),
    ("prompt",),
    ("question", "answer"),
)
_SFT_FORMATS = (*_PROMPT_FORMATS, ("input_ids",), ("text",))
"""Raw text comes last: data sets have it beside the columns from which it was made."""
_SFT_UNDERSTOOD = f"{UNDERSTOOD}; input_ids [+ labels or token_mask]; text"
NO_LABEL = -100
"""Label of a token without loss, as in the Hugging Face libraries."""
_MAX_TOKEN_ID = 2**31 - 1
_MASKS_OF_OTHER_TOOLS = ("assistant_masks", "completion_mask", "loss_mask")
"""Names of a loss mask in TRL, transformers and others."""


@dataclass(frozen=True, slots=True)
class Question:
    """Prompt of a rollout and its reference answer.

    Example: the row `{"prompt": "2+2=?", "answer": "4"}` is `Question(messages=[{"role": "user",
    "content": "2+2=?"}], text="2+2=?", answer="4", row=...)`.
    """

    messages: list[Message]
    text: str
    """Content of the last user turn, as in the file."""
    answer: str | None
    row: Row
    tools: list[Tool] | None = None


@dataclass(frozen=True)
class RowSchema:
    """The row formats that a job understands."""

    formats: tuple[tuple[str, ...], ...]
    """Columns of each format, in order of recognition: a row has the first that it has all of."""
    understood: str
    """The formats in words, for messages."""
    problem: Callable[[Row, tuple[str, ...]], str | None]
    """Describes the problem of a row with these columns, or returns None."""

    def recognize(self, row: Row, location: str) -> tuple[str, ...]:
        """Return the columns of the row's format. Raises ConfigError for no known format."""
        for columns in self.formats:
            if all(row.get(column) is not None for column in columns):
                return columns
        raise ConfigError(
            f"{location}: columns {_names(row)} match no known format. Understood:"
            f" {self.understood}. Columns of other names are given by data.columns (prompt: NAME)"
            f"{_preference_hint(row)}"
        )


def conversation(row: Row) -> list[Message]:
    """Return the turns that SFT trains on.

    The last is an assistant turn if the row has a completion or an answer. Raw text is one turn of
    the assistant; a row of token ids has no turns.
    """
    return [clean_message(message) for message in flagged_conversation(row)]


def flagged_conversation(row: Row) -> list[Message]:
    """Return the turns of `conversation` as in the file, with the loss flags of `loss_flags`."""
    columns = SFT_ROWS.recognize(row, "row")
    if columns == ("input_ids",):
        return []
    if columns == ("text",):
        return [{"role": "assistant", "content": row["text"]}]
    if columns == ("messages",):
        return list(row["messages"])
    if columns == ("question", "answer"):
        return [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
    prompt = _flagged_turns(row["prompt"], "user")
    if len(columns) == 1:
        return prompt
    return prompt + _flagged_turns(row[columns[1]], "assistant")


def question(row: Row) -> Question:
    """Return the turns before the last answer, and the answer.

    The answer of GSM8K is the text after `####`, without thousands separators.
    """
    columns = SFT_ROWS.recognize(row, "row")
    answer = row.get("answer")
    if columns == ("question", "answer"):
        messages = [{"role": "user", "content": row["question"]}]
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    elif columns == ("messages",):
        messages = _before_last_answer(conversation(row))
    else:
        messages = turns(row["prompt"], "user")
    text = ""
    for message in messages:
        if message["role"] == "user":
            text = message.get("content", "")
    answer = None if answer is None else str(answer)
    return Question(messages, text, answer, row, row_tools(row))


def row_problem(row: Row, columns: tuple[str, ...], schema: RowSchema) -> str | None:
    """Describe the problem of a row of this format, or return None."""
    for column in columns:
        if row.get(column) is None:
            found = "null" if column in row else "missing"
            return (
                f"column {column!r} is {found}; the rows before have {' + '.join(columns)}, this"
                f" one has {_names(row)}"
            )
        if column == "input_ids":
            problem = token_row_problem(row)
        else:
            problem = _text_problem(row[column], column) or surrogate_problem(row[column], column)
        if problem:
            return problem
    problem = tools_problem(row.get("tools")) or surrogate_problem(row.get("tools"), "tools")
    if problem:
        return problem
    if schema.recognize(row, "row") != columns:
        return (
            f"columns {_names(row)} are another format than {' + '.join(columns)}, which the rows"
            f" before have"
        )
    return schema.problem(row, columns)


def _sft_problem(row: Row, columns: tuple[str, ...]) -> str | None:
    if columns == ("question", "answer"):
        return _gsm8k_problem(row)
    if columns == ("text",):
        if row["text"]:
            return None
        return "column 'text' is empty, so there is nothing to learn; remove the row"
    if columns == ("input_ids",):
        return None
    # The usual case first: this is called for every row of a file.
    has_text = len(columns) == 2 and not isinstance(row[columns[1]], list)
    roles = [] if has_text else [turn["role"] for turn in flagged_conversation(row)]
    if has_text or "assistant" in roles:
        return None
    unknown = unknown_roles(roles)
    return f"there is no assistant turn to learn from in {' + '.join(columns)}; " + (
        unknown or f"SFT needs {UNDERSTOOD}{_preference_hint(row)}"
    )


def _preference_hint(row: Row) -> str:
    """Return the commands for a preference pair, which other jobs cannot use; else nothing."""
    if row.get("chosen") is None or row.get("rejected") is None:
        return ""
    return ". The columns chosen and rejected are for `nemo-like dpo` and `nemo-like rm`"


def _prompt_problem(row: Row, columns: tuple[str, ...]) -> str | None:
    if columns == ("question", "answer"):
        return _gsm8k_problem(row)
    if not isinstance(row.get("prompt"), str) and not question(row).messages:
        return "there is no turn before the assistant's, so nothing to ask the model"
    return None


def _gsm8k_problem(row: Row) -> str | None:
    if isinstance(row["answer"], str) and "####" in row["answer"]:
        return None
    return "the answer has no '#### result'; for plain answers name the columns prompt and answer"


SFT_ROWS = RowSchema(_SFT_FORMATS, _SFT_UNDERSTOOD, _sft_problem)
"""Conversations with an assistant turn to learn from, raw text, and rows of token ids."""
PROMPT_ROWS = RowSchema(_PROMPT_FORMATS, UNDERSTOOD, _prompt_problem)
"""Prompts of rollouts, with or without a reference answer."""


def _text_problem(value: Any, column: str) -> str | None:
    """Describe why a value is not a text or a list of messages, or return None."""
    if isinstance(value, str) and column != "messages":
        return None
    if isinstance(value, int | float) and not isinstance(value, bool) and column == "answer":
        if not isinstance(value, float) or math.isfinite(value):
            return None
        return f"column 'answer' is {shown_json(value)}, not a text or a finite number"
    if column not in MESSAGE_COLUMNS:
        return f"column {column!r} is {shown_json(value)}, not a text"
    if value == []:
        return f"column {column!r} is an empty list, without a message"
    if not isinstance(value, list):
        wanted = "a list of messages" if column == "messages" else "a text or a list of messages"
        return f"column {column!r} is {shown_json(value)}, not {wanted}"
    for index, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return (
                f"{column}[{index}] is {shown_json(message)}, not an object with role and content"
            )
        problem = calls_problem(message) or flags_problem(message)
        if problem:
            return f"{column}[{index}].{problem}"
        # A message with tool calls may have no content.
        is_text = isinstance(message.get("content"), str)
        if not is_text and not (message.get("content") is None and message.get("tool_calls")):
            return f"{column}[{index}].content is {shown_json(message.get('content'))}, not a text"
    return None


def _names(row: Row) -> str:
    """Return the columns of a row for an error message."""
    return shortened(printable(str(sorted(map(str, row)))), 300)


def surrogate_problem(value: Any, name: str) -> str | None:
    """Name the first text in a nested value with a lone surrogate, or return None.

    No tokenizer encodes a lone surrogate.
    """
    if isinstance(value, str):
        # ASCII texts are the common case and need no search.
        match = None if value.isascii() else _SURROGATE.search(value)
        if match is None:
            return None
        return (
            f"{name} has half of a surrogate pair at character {match.start() + 1}, which is no"
            f" text; remove it"
        )
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, part in inner:
        problem = surrogate_problem(part, f"{name}[{key}]")
        if problem:
            return problem
    return None


def turns(value: Any, role: str) -> list[Message]:
    """Convert a text to one turn of `role`, or clean a list of messages."""
    return [clean_message(message) for message in _flagged_turns(value, role)]


def _flagged_turns(value: Any, role: str) -> list[Message]:
    return list(value) if isinstance(value, list) else [{"role": role, "content": str(value)}]


def _before_last_answer(messages: list[Message]) -> list[Message]:
    """Return the messages without a final assistant turn."""
    if messages and messages[-1]["role"] == "assistant":
        return messages[:-1]
    return messages


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
