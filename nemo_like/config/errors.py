"""Errors about wrong input of the user: one message with key, location, value and fix.

Texts of unknown origin are made fit to be shown: control characters as escapes, long values cut.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_LISTED_CHARACTERS = 1_800
"""Max characters of all problems in one message."""


class ConfigError(ValueError):
    """The user's input is wrong: a key, a file, a row of data. The message is all a user needs; the
    exit code is 2.
    """

    problems: tuple[str, ...] = ()
    """The problems, if the message lists several."""


class UnknownJobError(ConfigError):
    """A config has no key that only one job has."""


@dataclass(frozen=True, slots=True)
class Location:
    """The place where a key is set.

    Examples: `Location("configs/demo_sft.yaml", 7)`, `Location("the command line")`.
    """

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, before its place is known.

    Example: `Problem(("policy.optimizer.lr",), "policy.optimizer.lr is -1.0; it must be above 0")`.
    """

    keys: tuple[str, ...]
    """The dotted keys that take part, the one to look at first in front."""
    text: str
    location: Location | None = None

    def __str__(self) -> str:
        return self.text if self.location is None else f"{self.text} ({self.location})"


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise one ConfigError that lists `problems`, the first ones if they are many; do nothing if
    there are none.
    """
    if len(problems) == 1:
        raise ConfigError(shortened(str(problems[0]), MAX_LISTED_CHARACTERS))
    if not problems:
        return
    shown = []
    num_characters = 0
    for problem in problems:
        # One long problem must not hide all others.
        line = f"  - {shortened(str(problem), MAX_LISTED_CHARACTERS // 2)}"
        num_characters += len(line)
        if num_characters > MAX_LISTED_CHARACTERS:
            shown.append(f"  - and {len(problems) - len(shown)} more")
            break
        shown.append(line)
    error = ConfigError(f"{len(problems)} problems:\n" + "\n".join(shown))
    error.problems = tuple(map(str, problems))
    raise error


def shown_path(path: Path) -> str:
    """Return `path` as a user would type it: relative if it is in the working directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def similar_path_text(path: Path) -> str:
    """Return ` (did you mean 'PATH'?)` with the existing path most like `path`, which is missing.

    Empty if no path is similar.
    """
    try:
        if path.exists():
            return ""
        while not path.exists():
            known = next(parent for parent in path.parents if parent.is_dir())
            name, *rest = path.relative_to(known).parts
            matches = difflib.get_close_matches(name, os.listdir(known), n=1)
            # Equal names: a file has the place of a directory.
            if not matches or matches[0] == name:
                return ""
            path = known.joinpath(matches[0], *rest)
    except OSError:
        # A directory that cannot be read, or a name that is too long.
        return ""
    return f" (did you mean {shown_path(path)!r}?)"


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

    Also for numbers with more digits than Python prints, and for objects of a user.
    """
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 (whatever the code of the user raises)
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
