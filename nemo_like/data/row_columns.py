"""Columns of other tools as the columns of this project.

`data.columns` renames columns; ShareGPT's `conversations` become `messages`, and Alpaca's
`instruction`, `input` and `output` become `prompt` and `completion`. Rows that have the columns of
this project are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import printable, shortened
from nemo_like.data.messages import MEANT, Message
from nemo_like.data.row_files import Row, shown_json

KNOWN_COLUMNS = (
    "messages",
    "conversations",
    "prompt",
    "completion",
    "answer",
    "question",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "text",
    "input_ids",
    "labels",
    "token_mask",
    "tools",
    "chosen",
    "rejected",
    "margin",
    "pass_rate",
)
"""Columns that have a meaning, so the possible keys of `data.columns`."""
_MISSING = object()
_JSON_COLUMNS = ("messages", "conversations", "input_ids", "labels", "token_mask", "history")
"""Columns of lists, which a CSV file has as JSON text."""


def check_columns(columns: Mapping[str, str], key: str = "data.columns") -> None:
    """Raise ConfigError that names `key` if a renamed column has no meaning."""
    for column in columns:
        if column not in KNOWN_COLUMNS:
            raise ConfigError(
                f"{key}: {column!r} is not a known meaning; give `meaning: column of the"
                f" file`, where the meaning is one of {', '.join(KNOWN_COLUMNS)}"
            )


def known_row(row: Row, columns: Mapping[str, str]) -> Row:
    """Return `row` with the columns of this project.

    `columns` maps a known column to the name that the file has for it. Raises ConfigError without
    a location for a column that is missing, or for a conversation that is not ShareGPT's.
    """
    if columns:
        row = _renamed(row, columns)
    for column in _JSON_COLUMNS:
        value = row.get(column)
        if isinstance(value, str):
            row = {**row, column: _parsed_list(value)}
    is_known = row.get("messages") is not None or row.get("prompt") is not None
    if is_known or (row.get("question") is not None and row.get("answer") is not None):
        return row
    if row.get("conversations") is not None:
        return _from_sharegpt(row)
    if row.get("instruction") is not None:
        return _from_alpaca(row)
    return row


def missing_value_problem(row: Row, names: tuple[str, ...]) -> str | None:
    """Describe a missing value in one of the columns `names` of a CSV file, or return None."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value.strip().lower() == "nan":
            return (
                f"column {name!r} is {value!r}, as tables write a missing value; remove the row, or"
                " write the text otherwise"
            )
    return None


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the row with renamed columns; a column of the new name is replaced."""
    values = {}
    for column, own_name in columns.items():
        value = _named_value(row, own_name)
        if value is _MISSING:
            names = shortened(printable(str(sorted(map(str, row)))), 300)
            raise ConfigError(
                f"data.columns gives {own_name!r} as the column of {column!r}, but the row has"
                f" {names}; correct the name, or rename the column: data.columns is for all files"
            )
        values[column] = value
    own_names = set(columns.values())
    others = {name: value for name, value in row.items() if name not in own_names}
    return others | values


def _named_value(row: Row, name: str) -> Any:
    """Return the column `name`, or the entry of nested objects if it has dots; else `_MISSING`."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return _MISSING
        value = value[part]
    return value


def _parsed_list(text: str) -> Any:
    """Return the list of a JSON text; the text itself if it is not one."""
    if not text.lstrip().startswith("["):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _from_sharegpt(row: Row) -> Row:
    """Convert `conversations` to `messages`, or to `prompt` if there are two completions."""
    others = _without(row, "conversations", "system")
    messages = _with_system(row, _sharegpt_messages(row["conversations"], "conversations"))
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

    The input follows the instruction in a line of its own. Earlier turns are in `history`, a list
    of [instruction, output].
    """
    others = _without(row, "instruction", "input", "output", "system", "history")
    prompt = row["instruction"]
    addition = row.get("input")
    if addition is not None and not isinstance(addition, str):
        raise ConfigError(f"column 'input' is {shown_json(addition)}, not a text")
    if addition and isinstance(prompt, str):
        prompt = f"{prompt}\n{addition}"
    if row.get("output") is not None:
        others["completion"] = row["output"]
    if not row.get("system") and not row.get("history"):
        return {**others, "prompt": prompt}
    messages: list[Message] = []
    for index, turn in enumerate(row.get("history") or []):
        if not isinstance(turn, list) or len(turn) != 2:
            raise ConfigError(
                f"history[{index}] is {shown_json(turn)}, not a list [instruction, output]"
            )
        messages.append({"role": "user", "content": turn[0]})
        messages.append({"role": "assistant", "content": turn[1]})
    messages.append({"role": "user", "content": prompt})
    return {**others, "prompt": _with_system(row, messages)}


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    """Put the text of the column `system` in front, unless it is empty."""
    system = row.get("system")
    if not system:
        return messages
    return [{"role": "system", "content": system}, *messages]


def _without(row: Mapping[str, Any], *columns: str) -> Row:
    """Return a copy without some columns."""
    return {name: value for name, value in row.items() if name not in columns}
