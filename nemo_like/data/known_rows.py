"""Rows with the columns of this project, made from rows of other tools.

`data.columns` renames columns, ShareGPT's `conversations` become `messages`, and Alpaca's
`instruction`, `input` and `output` become `prompt` and `completion`. The columns `system` and
`history` become the first turns of any conversation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.data.column_names import renamed_columns
from nemo_like.data.messages import (
    MEANT,
    SPEAKERS,
    Message,
    clean_message,
    content_text,
    parsed_items,
)
from nemo_like.data.row_files import Row, shown_json

MESSAGE_COLUMNS = ("messages", "prompt", "question", "completion", "chosen", "rejected")
"""Columns that may have a list of messages."""
_PROMPT_TEXTS = (
    *("messages", "conversations", "prompt", "question", "instruction"),
    *("input", "system", "history"),
)
"""Columns whose text is part of a prompt."""
_DIALOGUE_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):[ ]?")
"""Beginning of a turn in a dialogue that is one text, as in Anthropic/hh-rlhf."""
_LIST_COLUMNS = ("messages", "conversations", "input_ids", "labels", "token_mask", "history")
"""Columns that are always lists, which a CSV file has as JSON text."""


def known_row(row: Row, columns: Mapping[str, str]) -> Row:
    """Return `row` with the columns of this project.

    `columns` maps a known column to the name that the file has for it. Raises ConfigError without
    a location for a conversation that is not ShareGPT's, and MissingColumnError for a column that
    the row does not have.
    """
    if columns:
        row = renamed_columns(row, columns)
    for column in {*_LIST_COLUMNS, *MESSAGE_COLUMNS}:
        value = row.get(column)
        if isinstance(value, str) and value.lstrip().startswith("["):
            row = {**row, column: _parsed_list(value, column)}
    row = _with_parsed_items(row)
    is_known = row.get("messages") is not None or row.get("prompt") is not None
    is_known = is_known or (row.get("question") is not None and row.get("answer") is not None)
    if not is_known and row.get("conversations") is not None:
        row = _from_sharegpt(row)
    elif not is_known and row.get("instruction") is not None:
        row = _from_alpaca(row)
    elif "input" in columns and isinstance(row.get("prompt"), str):
        row = {**_without(row, "input"), "prompt": _with_input(row["prompt"], row["input"])}
    elif not is_known:
        row = _from_dialogue_texts(row)
    return _with_first_turns(row)


def check_columns_used(row: Row, names: tuple[str, ...], columns: Mapping[str, str]) -> None:
    """Raise ConfigError if `columns` maps a text of the prompt that a row of this format loses.

    `names` are the columns of the format of `row`, which `known_row` returned.
    """
    for column in _PROMPT_TEXTS:
        if column in columns and column not in names and row.get(column):
            raise ConfigError(
                f"data.columns maps {column!r}, but rows of the format {' + '.join(names)} do not"
                f" use it, so its text would be lost; remove {column} from data.columns, or map the"
                " columns of another format"
            )


def _parsed_list(text: str, column: str) -> Any:
    """Return the list of a JSON text, in a column that may be a text only one of messages; the text
    itself if it is not one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    # A prompt may be a text that begins with a bracket.
    if column in _LIST_COLUMNS or (value and all(map(_is_message, value))):
        return value
    return text


def _is_message(value: object) -> bool:
    """Return True for an object with the role of a message, also as ShareGPT names it."""
    return isinstance(value, dict) and not value.keys().isdisjoint(("role", "from"))


def _from_sharegpt(row: Row) -> Row:
    """Convert `conversations` to `messages`, or to `prompt` if there are two completions."""
    others = _without(row, "conversations")
    messages = _sharegpt_messages(row["conversations"], "conversations")
    if row.get("chosen") is None or row.get("rejected") is None:
        return {**others, "messages": messages}
    others["prompt"] = messages
    for column in ("chosen", "rejected"):
        value = row[column]
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, list):
            others[column] = _sharegpt_messages(value, column)
    return others


def _sharegpt_messages(value: Any, column: str) -> list[Message]:
    """Convert a list of turns with `from` and `value`; turns with `role` are kept."""
    if not isinstance(value, list):
        raise ConfigError(
            f"column {column!r} is {shown_json(value)}, not a list of turns with 'from' and 'value'"
        )
    messages = []
    for index, turn in enumerate(value):
        if isinstance(turn, dict) and "from" in turn:
            messages.append(_sharegpt_message(turn, f"{column}[{index}]"))
        elif isinstance(turn, dict) and turn.get("role") in SPEAKERS:
            messages.append({**turn, "role": MEANT[turn["role"]]})
        else:
            # With role and content; anything else is reported as a bad message.
            messages.append(turn)
    return messages


def _sharegpt_message(turn: dict[str, Any], place: str) -> Message:
    """Convert one turn. Raises ConfigError for an unknown role or without a text."""
    name = turn["from"]
    role = MEANT.get(name) if isinstance(name, str) else None
    if role is None:
        raise ConfigError(
            f"{place}.from is {shown_json(name)}; understood: {', '.join(sorted(MEANT))}"
        )
    content = turn.get("value")
    if not isinstance(content, str):
        raise ConfigError(f"{place}.value is {shown_json(content)}, not a text")
    others = _without(turn, "from", "value")
    if name != "function_call":
        return {**others, "role": role, "content": content}
    # The text of such a turn is the JSON of one call or of a list of them.
    try:
        calls = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}.value is a function_call that is not JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {**others, "role": role, "content": None, "tool_calls": calls}


def _from_alpaca(row: Row) -> Row:
    """Convert `instruction`, `input` and `output` to `prompt` and `completion`.

    The input follows the instruction in a line of its own.
    """
    others = _without(row, "instruction", "input", "output")
    if row.get("output") is not None:
        others["completion"] = row["output"]
    return {**others, "prompt": _with_input(row["instruction"], row.get("input"))}


def _with_input(prompt: Any, addition: Any) -> Any:
    """Return the prompt with the text of the column `input` in a line of its own."""
    if addition is not None and not isinstance(addition, str):
        raise ConfigError(f"column 'input' is {shown_json(addition)}, not a text")
    return f"{prompt}\n{addition}" if addition and isinstance(prompt, str) else prompt


def _from_dialogue_texts(row: Row) -> Row:
    r"""Convert `chosen` and `rejected` to messages if each is a dialogue in one text.

    Example: `\n\nHuman: 2+2=?\n\nAssistant: 4`. The turns that both begin with are the prompt.
    """
    columns = {}
    for column in ("chosen", "rejected"):
        text = row.get(column)
        parts = _DIALOGUE_TURN.split(text) if isinstance(text, str) else []
        # Text before the first turn belongs to no turn.
        if len(parts) < 3 or parts[0].strip():
            return row
        columns[column] = [
            {"role": "user" if name == "Human" else "assistant", "content": content}
            for name, content in zip(parts[1::2], parts[2::2], strict=True)
        ]
    return {**row, **columns}


def _with_first_turns(row: Row) -> Row:
    """Put the columns `system` and `history` in front of every column that begins a conversation.

    `history` is a list of [instruction, output] or of messages. Raises ConfigError for another
    value, and for a system turn beside another text in `system`.
    """
    system = row.get("system")
    history = row.get("history")
    if not system and not history:
        return row
    changed = {}
    for column in ("messages", "prompt", "question", "chosen", "rejected"):
        value = row.get(column)
        if isinstance(value, str) and column in ("prompt", "question"):
            value = [{"role": "user", "content": value}]
        if isinstance(value, list) and value and _begins(row, column, value[0]):
            changed[column] = _preceded(value, column, system, history or [])
    if not changed:
        return row
    return {**_without(row, "system", "history"), **changed}


def _begins(row: Mapping[str, Any], column: str, first: Any) -> bool:
    """Return False for a completion that follows the turns of `prompt`."""
    prompt = row.get("prompt")
    if column not in ("chosen", "rejected") or not prompt or _role(first) == "system":
        return True
    if isinstance(prompt, str):
        return first == {"role": "user", "content": prompt}
    return first == next((turn for turn in prompt if _role(turn) != "system"), None)


def _preceded(messages: list[Any], column: str, system: Any, history: Any) -> list[Any]:
    """Return messages after a system turn and earlier turns."""
    try:
        cleaned = [clean_message(message, column) for message in messages]
    except ConfigError:
        # The format refuses them, with their indices in the file.
        return messages
    first = []
    system = content_text(system, "system") if system else ""
    if cleaned[0]["role"] == "system":
        first = [messages[0]]
        messages = messages[1:]
        if system and cleaned[0]["content"] != system:
            raise ConfigError(
                f"column {column!r} begins with a system turn, and column 'system' has another"
                " text; remove one of them"
            )
    elif system:
        first = [{"role": "system", "content": system}]
    if not isinstance(history, list):
        raise ConfigError(
            f"column 'history' is {shown_json(history)}, not a list of turns; write a list of"
            " [instruction, output] or of messages, or rename the column if it is no conversation"
        )
    for index, turn in enumerate(_sharegpt_messages(history, "history")):
        pair = [turn]
        if isinstance(turn, list) and len(turn) == 2:
            roles = ("user", "assistant")
            pair = [{"role": role, "content": text} for role, text in zip(roles, turn, strict=True)]
        elif not _is_message(turn):
            raise ConfigError(
                f"history[{index}] is {shown_json(turn)}, not a list [instruction, output]"
            )
        for message in pair:
            clean_message(message, f"history[{index}]")
        first += pair
    return [*first, *messages]


def _role(message: object) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _with_parsed_items(row: Row) -> Row:
    """Parse messages that are JSON texts, as the type `List(Json())` of `datasets` writes them."""
    parsed = {}
    for column in (*MESSAGE_COLUMNS, "conversations"):
        value = row.get(column)
        if isinstance(value, list) and any(isinstance(item, str) for item in value):
            parsed[column] = parsed_items(value)
    return {**row, **parsed} if parsed else row


def _without(row: Mapping[str, Any], *columns: str) -> Row:
    """Return a copy without some columns."""
    return {name: value for name, value in row.items() if name not in columns}
