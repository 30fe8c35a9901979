"""Rules on a single value beside the bounds of `annotated_types`, declared in the schema.

A field is annotated with its type and any number of bounds and rules:
`batch_size: Annotated[int, Ge(1)] = 64`. `null` always satisfies them: whether a field may be null
is part of its type. Relations between several keys are checked in `config.check`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or find_spec("annotated_types"):
    from annotated_types import Ge, Gt, Le, Lt
else:
    # The measurements of a GPU run from source, without pydantic, which would check the bounds.
    @dataclass(frozen=True)
    class _Bound:
        value: Any

    Ge = Gt = Le = Lt = _Bound

DURATION_FORMS = 'seconds, "H:MM:SS" or "D-HH:MM:SS", for example 14100 or "3:55:00"'

_SECONDS = re.compile(r"\d{1,9}(\.\d{1,3})?")
_CLOCK = re.compile(r"(?:(\d{1,4})-)?(\d{1,4}):([0-5]\d):([0-5]\d)")


def parse_duration(text: str) -> float:
    """Seconds of a duration. Raises ValueError for another form and for 0.

    Example: `parse_duration("3:55:00")` is 14100.0, `parse_duration("1-00:00:00")` is 86400.0.
    """
    clock = _CLOCK.fullmatch(text)
    if clock is not None:
        # Days are optional, so their group may be None.
        days, hours, minutes, seconds = (int(part or 0) for part in clock.groups())
        num_hours = days * 24 + hours
        num_minutes = num_hours * 60 + minutes
        total = float(num_minutes * 60 + seconds)
    elif _SECONDS.fullmatch(text):
        total = float(text)
    else:
        raise ValueError(f"it must be {DURATION_FORMS}")
    if total <= 0:
        raise ValueError("it must be above 0")
    return total


# Not starting with a dot, so that a run is not a hidden directory, nor `..`.
_RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+|(.*/)?[A-Za-z_]\w*\.py:[A-Za-z_]\w*")


@dataclass(frozen=True)
class Rule:
    """A condition on a value that pydantic checks."""

    text: str
    """The condition, in words that continue "it must be"."""
    accepts: Callable[[Any], bool]

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        # Imported here, because `--help` and workers need the schema and no pydantic.
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: Any) -> Any:
        if value is not None and not self.accepts(value):
            raise ValueError(self.text)
        return value


def _is_prompt_template(value: str) -> bool:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(value)]
    except ValueError:
        # A single brace.
        return False
    # The parser yields None as the field of literal text at the end of the string.
    return {field for field in fields if field is not None} == {"prompt"}


def _is_duration(value: str) -> bool:
    try:
        parse_duration(value)
    except ValueError:
        return False
    return True


NOT_EMPTY = Rule("not empty", lambda value: value != "")
NO_EMPTY_TEXTS = Rule("a list of texts that are not empty", lambda value: "" not in value)
DIRECTORY_NAME = Rule(
    "a directory name of letters, digits, '_', '-' and '.'",
    lambda value: _RUN_NAME.fullmatch(value) is not None,
)
IMPORT_PATH = Rule(
    "an import path module.function, e.g. nemo_like.environments.math.answer_reward, or"
    " FILE.py:function",
    lambda value: _IMPORT_PATH.fullmatch(value) is not None,
)
PROMPT_TEMPLATE = Rule(
    "a format string with {prompt} and no other field ({{ and }} stand for literal braces)",
    _is_prompt_template,
)
RANGE_OF_SHARES = Rule(
    "a list of two numbers from 0 to 1, the lower one first",
    lambda value: len(value) == 2 and 0 <= value[0] <= value[1] <= 1,
)
DURATION = Rule(f"{DURATION_FORMS}, above 0", _is_duration)


def subset_of(names: Iterable[str]) -> Rule:
    """Return the rule for a list of texts, each of which is one of `names`."""
    text = f"a list of names among {', '.join(names)}"
    return Rule(text, lambda value: set(value) <= set(names))


def joined_text(constraints: Iterable[Any]) -> str:
    """Return the constraints of a field in words. Example: `at least 0 and below 1`."""
    texts = []
    for constraint in constraints:
        match constraint:
            case Ge(ge):
                texts.append(f"at least {ge:g}")
            case Gt(gt):
                texts.append(f"above {gt:g}")
            case Le(le):
                texts.append(f"at most {le:g}")
            case Lt(lt):
                texts.append(f"below {lt:g}")
            case Rule():
                texts.append(constraint.text)
    return " and ".join(texts)
