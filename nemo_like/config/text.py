"""Texts of unknown origin made fit to be shown: control characters as escapes, long values cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

# C0 without tab and line feed, DEL and C1, the marks that change the direction of text, line and
# paragraph separators, invisible tags, and surrogates, which no stream can encode.
_UNPRINTABLE = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff"
    "\\ud800-\\udfff\\U000e0000-\\U000e007f]"
)
_MAX_SHOWN = 80


def printable(text: str, encoding: str = "utf-8") -> str:
    r"""Return `text` with control characters, and what `encoding` lacks, as escapes. Example: ESC
    becomes `\x1b`.

    Tabs and line feeds stay. The result cannot move the cursor, change colors or reverse the
    direction of other text.
    """
    visible = _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)
    return visible.encode(encoding, "backslashreplace").decode(encoding)


def shown_value(value: Any, limit: int = _MAX_SHOWN) -> str:
    """Return `repr(value)` for a message, of at most `limit` characters.

    Also for numbers with more digits than Python prints.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        text = f"a value of type {type(value).__name__}"
    return shortened(text, limit)


def error_text(error: BaseException) -> str:
    """Return type and message of an exception, also of a user's own whose `__str__` raises."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 (whatever the code of the user raises)
        text = f"(its text raises {type(failure).__name__})"
    return f"{name}: {text}" if text else name


def shortened(text: str, limit: int = _MAX_SHOWN) -> str:
    """Return `text` if it has at most `limit` characters, else its beginning and its length."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}... ({len(text):,} characters)"


def is_possible_path(text: str) -> bool:
    """Return True if the path is within the length limits of file systems.

    For a longer path the system raises an error instead of reporting a missing file.
    """
    encoded = text.encode("utf-8", "replace")
    return len(encoded) < 4096 and all(len(part) < 256 for part in encoded.split(b"/"))


def either(values: Sequence[object]) -> str:
    """Join alternatives. Example: [4, 8] -> `4 or 8`."""
    return " or ".join(map(str, values))


def quotient(value: float) -> str:
    """Format a quotient. Examples: 1.5, 4, 2.333."""
    return f"{value:.4g}" if value < 1000 or value % 1 else f"{value:.0f}"


def plural(count: int, word: str, plural_word: str | None = None) -> str:
    """Return `word` for one and its plural, by default with an s, for any other count."""
    if count == 1:
        return word
    return plural_word or f"{word}s"


def counted(count: int, word: str, plural_word: str | None = None) -> str:
    """Return a count with its noun. Examples: `1 row`, `2,048 rows`."""
    return f"{count:,} {plural(count, word, plural_word)}"
