"""Constraints on a single value, declared beside the field in `config.schema`.

A field is annotated with its type and any number of constraints:
`batch_size: Annotated[int, AtLeast(1)] = 64`. `null` always satisfies them: whether a field may be
null is part of its type. Relations between several keys are checked in `config.check`.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_like.config.durations import DURATION_FORMS, parse_duration

# Not starting with a dot, so that a run is no hidden directory, nor `..`.
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")


class Constraint(Protocol):
    """A condition on one value."""

    @property
    def text(self) -> str:
        """The condition, in words that continue "it must be"."""
        ...

    def accepts(self, value: Any) -> bool:
        """Return True if `value`, which has the type of the field, satisfies the condition."""
        ...


@dataclass(frozen=True, slots=True)
class AtLeast:
    """An inclusive lower bound; `reason` is appended to the text in parentheses."""

    minimum: float
    reason: str = ""

    @property
    def text(self) -> str:
        return _with_reason(f"at least {self.minimum:g}", self.reason)

    def accepts(self, value: float) -> bool:
        return value >= self.minimum


@dataclass(frozen=True, slots=True)
class AtMost:
    """An inclusive upper bound."""

    maximum: float

    @property
    def text(self) -> str:
        return f"at most {self.maximum:g}"

    def accepts(self, value: float) -> bool:
        return value <= self.maximum


@dataclass(frozen=True, slots=True)
class Above:
    """An exclusive lower bound; `reason` is appended to the text in parentheses."""

    bound: float
    reason: str = ""

    @property
    def text(self) -> str:
        return _with_reason(f"above {self.bound:g}", self.reason)

    def accepts(self, value: float) -> bool:
        return value > self.bound


@dataclass(frozen=True, slots=True)
class Below:
    """An exclusive upper bound."""

    bound: float

    @property
    def text(self) -> str:
        return f"below {self.bound:g}"

    def accepts(self, value: float) -> bool:
        return value < self.bound


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """A text of at least one character."""

    text: str = "not empty"

    def accepts(self, value: str) -> bool:
        return value != ""


@dataclass(frozen=True, slots=True)
class NoEmptyTexts:
    """A list in which every text has at least one character."""

    text: str = "a list of texts that are not empty"

    def accepts(self, value: tuple[str, ...]) -> bool:
        return "" not in value


@dataclass(frozen=True, slots=True)
class SubsetOf:
    """A list of texts, each of which is one of `names`."""

    names: tuple[str, ...]

    @property
    def text(self) -> str:
        return f"a list of names among {', '.join(self.names)}"

    def accepts(self, value: tuple[str, ...]) -> bool:
        return set(value) <= set(self.names)


@dataclass(frozen=True, slots=True)
class DirectoryName:
    """The name of one directory, portable between file systems."""

    text: str = "a directory name of letters, digits, '_', '-' and '.'"

    def accepts(self, value: str) -> bool:
        return _RUN_NAME.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class ImportPath:
    """A dotted path of a module and a name in it."""

    text: str = "an import path module.function, e.g. nemo_like.environments.math.answer_reward"

    def accepts(self, value: str) -> bool:
        return _IMPORT_PATH.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A format string for `str.format` with the only field `{prompt}`."""

    text: str = (
        "a format string with {prompt} and no other field ({{ and }} stand for literal braces)"
    )

    def accepts(self, value: str) -> bool:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(value)]
        except ValueError:
            # A single brace.
            return False
        # The parser yields None as the field of literal text at the end of the string.
        return {field for field in fields if field is not None} == {"prompt"}


@dataclass(frozen=True, slots=True)
class Duration:
    """A length of time as text."""

    text: str = f"{DURATION_FORMS}, above 0"

    def accepts(self, value: str) -> bool:
        try:
            parse_duration(value)
        except ValueError:
            return False
        return True


def joined_text(constraints: tuple[Constraint, ...]) -> str:
    """Join the texts of all constraints of a field. Example: `at least 0 and below 1`."""
    return " and ".join(constraint.text for constraint in constraints)


def _with_reason(text: str, reason: str) -> str:
    return f"{text} ({reason})" if reason else text
