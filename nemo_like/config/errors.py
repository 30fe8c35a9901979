"""Errors about wrong input of the user: one message with key, location, value and fix."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.config.text import shortened

MAX_LISTED_CHARACTERS = 1_800
"""Max characters of all problems in one message."""


class ConfigError(ValueError):
    """The user's input is wrong: a key, a file, a row of data. The message is all a user needs; the
    exit code is 2.
    """

    problems: tuple[str, ...] = ()
    """The problems, if the message lists several."""


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
