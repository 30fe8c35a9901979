"""Formats of rows: recognized from the columns, checked, and converted to messages.

A `RowSchema` has the formats that a job understands. The formats of SFT and of rollouts are
`messages` (optionally `answer`), `prompt` with `completion` or `answer` or neither, GSM8K's
`question` and `answer` with `####`; each optionally with `tools`, the functions that the model may
call. Rows are converted to a conversation (for SFT) or a question (for a rollout). Nothing is
tokenized here; `rows` reads the files.

`known_rows` makes the columns of other tools columns of this project.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.column_names import column_guesses, shown_columns, shown_names
from nemo_like.data.image_rows import with_placeholders
from nemo_like.data.known_rows import MESSAGE_COLUMNS, known_row
from nemo_like.data.messages import (
    ROLES_FIX,
    Message,
    Tool,
    clean_message,
    row_tools,
    unknown_roles,
)
from nemo_like.data.row_files import Row, shown_json

UNDERSTOOD = (
    "messages [+ answer]; conversations (ShareGPT); prompt + completion; prompt + answer;"
    " instruction [+ input] + output (Alpaca); question + answer with '#### result' (GSM8K)"
)
_ASSISTANT_COLUMNS = ("completion", "answer", "text", "chosen", "rejected")
"""Columns whose text is a turn of the assistant."""
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
_NAMES_FIX = "Columns of other names are given by data.columns={prompt: NAME}"
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
    """Content of the last user turn, as in the file, with `<image>` for images."""
    answer: str | None
    row: Row
    tools: list[Tool] | None = None


_OTHER_FORMAT = "remove the row, or give rows of another format a file of their own"


@dataclass(frozen=True)
class RowSchema:
    """The row formats that a job understands."""

    formats: tuple[tuple[str, ...], ...]
    """Columns of each format, in order of recognition: a row has the first that it has all of."""
    understood: str
    """The formats in words, for messages."""
    check_format: Callable[[Row, tuple[str, ...]], None]
    """Raises ConfigError for a row with these columns that the job cannot use."""

    def recognize(self, row: Row) -> tuple[str, ...]:
        """Return the columns of the row's format. Raises ConfigError for no known format."""
        columns = self._recognized(row)
        if columns:
            return columns
        fix = _other_job(row, self.formats)
        guess = self.guess(row)
        if guess is not None:
            fix = f"Set data.columns={shown_columns(guess)} if that is what they mean"
        raise ConfigError(
            f"columns {shown_names(row)} match no known format."
            f" {fix or _NAMES_FIX}. Understood: {self.understood}"
        )

    def guess(self, row: Row) -> dict[str, str] | None:
        """Return the value of `data.columns` with which the job can use a row; None without."""
        # With its own columns first. Rollouts need the answer, and SFT trains on it as well.
        formats = sorted(self.formats, key=lambda columns: "completion" in columns)
        guesses = column_guesses(row, [*formats, ("conversations",)])
        if ("text",) in formats:
            # A column `answer` may have only the result of the text to train on.
            guesses = [*column_guesses(row, [("prompt", "completion")]), *guesses]
        for columns in ({}, *guesses):
            with suppress(ConfigError):
                renamed = known_row(row, columns)
                recognized = self._recognized(renamed)
                if recognized:
                    self.check(renamed, recognized)
                    return columns
        return None

    def _recognized(self, row: Row) -> tuple[str, ...]:
        """Return the columns of the row's format; none for no known format."""
        for columns in self.formats:
            if all(row.get(column) is not None for column in columns):
                return columns
        return ()

    def check(self, row: Row, columns: tuple[str, ...]) -> None:
        """Raise ConfigError unless the row has the format of `columns` and can be used."""
        for column in columns:
            if row.get(column) is None:
                found = "null" if column in row else "missing"
                raise ConfigError(
                    f"column {column!r} is {found}; the rows before have {' + '.join(columns)},"
                    f" this one has {shown_names(row)}; {_OTHER_FORMAT}"
                )
        if self._recognized(row) != columns:
            raise ConfigError(
                f"columns {shown_names(row)} are another format than {' + '.join(columns)}, which"
                f" the rows before have; {_OTHER_FORMAT}"
            )
        for column in columns:
            if column == "input_ids":
                _check_tokens(row)
            else:
                _check_text(row[column], column)
        row_tools(row)
        for column in (*columns, "tools"):
            if not is_unicode(row.get(column)):
                raise ConfigError(
                    f"column {column!r} has half of a surrogate pair, which is not text; remove it"
                )
        self.check_format(row, columns)


def conversation(row: Row) -> list[Message]:
    """Return the turns that SFT trains on.

    The last is an assistant turn if the row has a completion or an answer. Raw text is one turn of
    the assistant; a row of token ids has no turns. Raises ConfigError for a bad message.
    """
    return [message for column in SFT_ROWS.recognize(row) for message in turns(row, column)]


def flagged_conversation(row: Row) -> list[Message]:
    """Return the turns of `conversation` as in the file, with the loss flags of messages."""
    messages: list[Message] = []
    for column in SFT_ROWS.recognize(row):
        messages += _own_turns(row[column], column)
    return messages


def turns(row: Row, column: str) -> list[Message]:
    """Return the text of a column as one turn, or its list of messages, each checked."""
    messages = _own_turns(row[column], column)
    return [clean_message(message, f"{column}[{index}]") for index, message in enumerate(messages)]


def _own_turns(value: Any, column: str) -> list[Any]:
    """Return the turns of a column as in the file."""
    if column == "input_ids":
        return []
    if isinstance(value, list):
        return value
    role = "assistant" if column in _ASSISTANT_COLUMNS else "user"
    return [{"role": role, "content": str(value)}]


def question(row: Row) -> Question:
    """Return the turns before the last answer, and the answer.

    The answer of GSM8K is the text after `####`, without thousands separators.
    """
    columns = SFT_ROWS.recognize(row)
    messages = turns(row, columns[0])
    if columns == ("messages",) and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    answer = row.get("answer")
    if columns == ("question", "answer"):
        answer = row["answer"].rpartition("####")[2].strip().replace(",", "")
    text = ""
    for message in with_placeholders(messages):
        if message["role"] == "user":
            text = message.get("content", "")
    return Question(messages, text, None if answer is None else str(answer), row, row_tools(row))


def _check_sft(row: Row, columns: tuple[str, ...]) -> None:
    if columns == ("question", "answer"):
        _check_gsm8k(row, ("prompt", "completion"))
    if columns == ("input_ids",):
        return
    # A text in a CSV file.
    if str(row.get("label")).lower() == "false":
        raise ConfigError(
            "the row's label is false, which marks an undesirable completion (KTO), and it would be"
            " trained like the others; remove such rows (data.on_bad_row=skip leaves them out), or"
            " the column 'label' if it means something else"
        )
    if row[columns[0]] == "" and columns == ("text",):
        raise ConfigError("column 'text' is empty, so there is nothing to learn; remove the row")
    roles = [turn["role"] for turn in flagged_conversation(row)]
    if "assistant" in roles:
        return
    if "completion" in row and columns == ("prompt",):
        raise ConfigError("column 'completion' is null; write the completion, or remove the row")
    text = f"there is no assistant turn to learn from in {' + '.join(columns)}"
    unknown = unknown_roles(roles)
    if unknown:
        raise ConfigError(f"{text}; {unknown}; {ROLES_FIX}")
    # A prompt whose completion has another name.
    for guess in column_guesses(row, [("completion",)]):
        raise ConfigError(f"{text}. Set data.columns={shown_columns(guess)} to train on it")
    other = _other_job(row, SFT_ROWS.formats)
    raise ConfigError(f"{text}. {other or f'SFT needs {UNDERSTOOD}'}")


def _other_job(row: Row, formats: Sequence[tuple[str, ...]]) -> str:
    """Return the command for a row of a job other than the job of `formats`, else nothing."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return (
            "The columns chosen and rejected are for `nemo-like dpo` and `nemo-like rm`;"
            " data.columns={completion: chosen} trains on the chosen completion alone"
        )
    if isinstance(row.get("label"), bool) and row.get("completion") is not None:
        return (
            "Rows of one completion and a label (KTO) have no loss here; write pairs with columns"
            " chosen and rejected, or the rows whose label is true for `nemo-like sft`"
        )
    if formats[0][-1] == "rejected" and SFT_ROWS.guess(row) == {}:
        return "Rows of this form are for `nemo-like sft`"
    return ""


def _check_prompt(row: Row, columns: tuple[str, ...]) -> None:
    if columns == ("question", "answer"):
        _check_gsm8k(row, ("prompt", "answer"))
    if not question(row).messages:
        raise ConfigError("there is no turn before the assistant's, so nothing to ask the model")


def _check_gsm8k(row: Row, plain: tuple[str, ...]) -> None:
    """Raise ConfigError that names the columns `plain` for an answer of another form."""
    if not isinstance(row["answer"], str) or "####" not in row["answer"]:
        fix = shown_columns(column_guesses(row, [plain])[0])
        raise ConfigError(
            f"the answer has no '#### result'; for plain answers set data.columns={fix}"
        )


SFT_ROWS = RowSchema(_SFT_FORMATS, _SFT_UNDERSTOOD, _check_sft)
"""Conversations with an assistant turn to learn from, raw text, and rows of token ids."""
PROMPT_ROWS = RowSchema(_PROMPT_FORMATS, UNDERSTOOD, _check_prompt)
"""Prompts of rollouts, with or without a reference answer."""


def _check_text(value: Any, column: str) -> None:
    """Raise ConfigError for a value that is neither a text nor, if possible, a list of messages."""
    if isinstance(value, str) and column != "messages":
        return
    wanted = "a text"
    if column == "answer":
        wanted = "a text or a finite number"
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return
    if column in MESSAGE_COLUMNS:
        wanted = "a list of messages" if column == "messages" else "a text or a list of messages"
        if value == []:
            raise ConfigError(f"column {column!r} is an empty list, without a message")
        if isinstance(value, list):
            turns({column: value}, column)
            return
    raise ConfigError(f"column {column!r} is {shown_json(value)}, not {wanted}")


def is_unicode(value: Any) -> bool:
    """Return False for JSON values with a lone surrogate, which no tokenizer encodes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_tokens(row: Row) -> None:
    """Raise ConfigError for a bad row with `input_ids`."""
    ids = row["input_ids"]
    if ids == []:
        raise ConfigError("column 'input_ids' is an empty list, without a token")
    if not isinstance(ids, list):
        raise ConfigError(f"column 'input_ids' is {shown_json(ids)}, not a list of token ids")
    for index, token in enumerate(ids):
        if not _is_int(token) or not 0 <= token <= _MAX_TOKEN_ID:
            raise ConfigError(f"input_ids[{index}] is {shown_json(token)}, not a token id")
    if row.get("labels") is not None and row.get("token_mask") is not None:
        raise ConfigError("the row has both 'labels' and 'token_mask'; remove one of them")
    for column in ("labels", "token_mask"):
        if row.get(column) is not None:
            _check_mask(ids, row[column], column)
    # Nothing predicts the first token.
    if not trained_tokens(row)[1:].any():
        raise ConfigError(
            "no token of 'input_ids' after the first has a loss; set a label or a token_mask of 1"
        )
    padding = row.get("attention_mask")
    if isinstance(padding, list) and 0 in padding:
        raise ConfigError(
            f"attention_mask[{padding.index(0)}] is 0, so 'input_ids' has padding; remove it: rows"
            " are padded or packed when a microbatch is formed"
        )
    if row.get("labels") is not None or row.get("token_mask") is not None:
        return
    for column in _MASKS_OF_OTHER_TOOLS:
        mask = row.get(column)
        if isinstance(mask, list) and 0 in mask:
            raise ConfigError(
                f"column {column!r} has tokens without loss, but only 'labels' and 'token_mask' are"
                f" read; set data.columns.token_mask to {column}"
            )


def _check_mask(ids: list[int], values: Any, column: str) -> None:
    """Raise ConfigError for the first entry that is neither the label nor the mask of its token."""
    if not isinstance(values, list) or len(values) != len(ids):
        raise ConfigError(
            f"column {column!r} is {shown_json(values)}, not a list of {len(ids)} numbers"
        )
    for index, (token, value) in enumerate(zip(ids, values, strict=True)):
        if column == "token_mask" and (not _is_int(value) or value not in (0, 1)):
            raise ConfigError(f"token_mask[{index}] is {shown_json(value)}, not 0 or 1")
        if column == "labels" and (not _is_int(value) or value not in (token, NO_LABEL)):
            raise ConfigError(
                f"labels[{index}] is {shown_json(value)}, neither the token id {token} at the same"
                f" position nor {NO_LABEL} (no loss); labels are not shifted"
            )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def trained_tokens(row: Row) -> np.ndarray:
    """Return the loss mask of a row with `input_ids`, uint8 [L]; all 1 without a mask."""
    if row.get("token_mask") is not None:
        return np.array(row["token_mask"], dtype=np.uint8)
    if row.get("labels") is not None:
        return (np.array(row["labels"]) != NO_LABEL).astype(np.uint8)
    return np.ones(len(row["input_ids"]), dtype=np.uint8)


def check_missing_values(row: Row, names: tuple[str, ...]) -> None:
    """Raise ConfigError for a missing value in one of the columns `names` of a CSV file."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip().lower() == "nan":
            raise ConfigError(
                f"column {name!r} is {value!r}, as tables write a missing value; remove the row, or"
                " write the text otherwise"
            )
