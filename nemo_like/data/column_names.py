"""Names of columns: names with a meaning, `data.columns`, and guesses for the names of a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nemo_like.config.errors import ConfigError, printable, shortened
from nemo_like.data.row_files import Row

KNOWN_COLUMNS = (
    *("messages", "conversations", "prompt", "completion", "answer", "question"),
    *("instruction", "input", "output", "system", "history", "text"),
    *("input_ids", "labels", "token_mask", "tools"),
    *("chosen", "rejected", "margin", "pass_rate"),
)
"""Columns that have a meaning, so the possible keys of `data.columns`."""
_OTHER_NAMES = {
    "messages": ("conversation", "dialog", "dialogue", "chat", "turns"),
    "conversations": ("conversation", "messages", "dialog", "dialogue", "chat", "turns"),
    "prompt": ("question", "instruction", "query", "problem", "input", "request", "user", "source"),
    # `answer` last: beside a solution it is its result.
    "completion": ("reply", "response", "output", "assistant", "target", "solution", "answer"),
    "answer": ("solution", "target", "result", "label", "truth", "reference"),
    "chosen": ("preferred", "accepted", "better", "winner", "positive"),
    "rejected": ("dispreferred", "refused", "worse", "loser", "negative"),
    "text": ("content", "document", "body", "passage"),
}
"""Known column -> names that files have for it, in lower case."""
_SYSTEM = "system"
_CONTEXTS = ("context", "passage")
"""Names of a column to which the prompt refers, in lower case."""
_MISSING = object()
_WORD = re.compile(r"[^\W_]+")


def column_guesses(
    names: Collection[str], formats: Sequence[tuple[str, ...]]
) -> list[dict[str, str]]:
    """Return values of `data.columns` that may give a row with these columns one of `formats`.

    The likeliest comes first: the one with the most equal names, then with the most columns.
    Example: `Question` and `Reply` are `{"prompt": "Question", "completion": "Reply"}`.
    """
    guesses: list[tuple[int, int, dict[str, str]]] = []
    for columns in formats:
        found: dict[str, str] = {}
        for column in columns:
            others = [name for name in names if name not in found.values()]
            if column == "answer" and isinstance(names, Mapping):
                others += _nested_names(names)
            name = _likeliest(column, others)
            if name is not None:
                found[column] = name
        if len(found) == len(columns):
            num_equal = sum(name.lower() == column for column, name in found.items())
            found |= _context(found, names)
            renamed = {column: name for column, name in found.items() if name != column}
            guesses.append((-num_equal, -len(columns), renamed))
    return [renamed for _, _, renamed in sorted(guesses, key=lambda guess: guess[:2]) if renamed]


def _nested_names(row: Mapping[str, Any]) -> list[str]:
    """Return the entries of columns that are objects, each behind the column and a dot."""
    objects = [(name, value) for name, value in row.items() if isinstance(value, dict)]
    return [f"{name}.{entry}" for name, value in objects for entry in value]


def _likeliest(column: str, names: Sequence[str]) -> str | None:
    """Return the name that probably means `column`; None if there is none."""
    meanings = (column, *_OTHER_NAMES.get(column, ()))
    by_size = sorted(names, key=len)
    for meaning in meanings:
        for name in by_size:
            if name.lower() == meaning:
                return name
    for meaning in meanings:
        # `question` before `question_id`
        for name in by_size:
            words = _WORD.findall(name.lower())
            if meaning in words and _SYSTEM not in words:
                return name
    return None


def _context(found: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the columns with the system prompt and the context of a prompt, unless they are named
    as here.
    """
    context: dict[str, str] = {}
    if not {"prompt", "completion", "chosen", "answer", "conversations"}.isdisjoint(found):
        for name in names:
            words = _WORD.findall(name.lower())
            if _SYSTEM in words and _SYSTEM not in names and name not in found.values():
                context.setdefault(_SYSTEM, name)
    if "prompt" in found or "prompt" in names:
        for name in names:
            if name.lower() in _CONTEXTS and "input" not in names and name not in found.values():
                context.setdefault("input", name)
    return context


class MissingColumnError(ConfigError):
    """A row does not have a column that `data.columns` names."""


def check_columns(columns: Mapping[str, str], key: str = "data.columns") -> None:
    """Raise ConfigError that names `key` if a renamed column has no meaning."""
    for column in columns:
        if column not in KNOWN_COLUMNS:
            raise ConfigError(
                f"{key}: {column!r} is not a known meaning; give `meaning: column of the"
                f" file`, where the meaning is one of {', '.join(KNOWN_COLUMNS)}"
            )


def renamed_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the row with renamed columns; a column of the new name is replaced.

    Raises MissingColumnError for a column that the row does not have.
    """
    values = {}
    for column, own_name in columns.items():
        value = _named_value(row, own_name)
        if value is _MISSING:
            raise MissingColumnError(
                f"data.columns gives {own_name!r} as the column of {column!r}, but the row has"
                f" {shown_names(row)}; correct the name"
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


def shown_columns(columns: Mapping[str, str]) -> str:
    """Return a value of `data.columns` as one writes it."""
    return f"{{{', '.join(f'{column}: {name}' for column, name in columns.items())}}}"


def shown_names(row: Row) -> str:
    """Return the columns of a row for an error message."""
    return shortened(printable(str(sorted(map(str, row)))), 300)
