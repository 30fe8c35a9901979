"""Conversion of plain nested values to the config dataclasses; pydantic checks every value.

Besides the type itself these are accepted: an integer for a float; a number in quotes, because
environment variables are text; and a number for a text. Interpolations are resolved before:
`${other.key}`, `${oc.env:NAME,default}`, and `${add:a,b}`, `${mul:a,b}` and `${div:a,b}`, which
NeMo RL uses; arguments may be nested.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from nemo_like.config.constraints import joined_text
from nemo_like.config.errors import ConfigError, Location, Problem, shortened, shown_value
from nemo_like.config.keys import child_types, constraints_at, is_section, type_at, without_none

Config = TypeVar("Config")

_EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "finite": "a finite number",
}
"""First word of pydantic's type of an error -> what continues "it must be"."""


def build_config(
    section: type[Config],
    values: Mapping[str, Any],
    locate: Callable[[str], Location | None] = lambda path: None,
) -> tuple[Config | None, list[Problem]]:
    """Return (config, problems); the config is None if there is a problem."""
    try:
        return _adapter(section).validate_python(values), []
    except ValidationError as error:
        problems = []
        for details in error.errors(include_url=False):
            path = _path(details["loc"])
            problems.append(Problem((path,), _text(section, path, details), locate(path)))
        return None, problems


@cache
def _adapter(section: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(section)


def _path(location: tuple[int | str, ...]) -> str:
    """Return a dotted key. Example: `("a", "b", 2)` -> `a.b[2]`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.lstrip(".")


def _text(section: type, path: str, details: ErrorDetails) -> str:
    """Return the message for one error of pydantic: key, value and what to write."""
    kind = details["type"]
    if kind in ("missing", "missing_argument"):
        return f"{path} is not set and has no default; set it in the YAML or with {path}=VALUE"
    value = shown_yaml(details["input"])
    annotation, may_be_null = without_none(type_at(section, path))
    if kind == "dataclass_type":
        names = list(child_types(annotation) or ())
        keys = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        return f"{path} is {value}; it is a section with keys ({keys})"
    if kind == "dict_type":
        entries = "sections" if is_section(get_args(annotation)[1]) else "values"
        expected = f"a mapping from names to {entries}"
    elif kind == "tuple_type":
        expected = f"a list, e.g. [{value}]"
    elif kind == "literal_error":
        expected = _choices(get_args(annotation), details["input"])
    else:
        # All bounds are named, so that the next value is right at once.
        words = _EXPECTED.get(kind.partition("_")[0], "")
        expected = words
        if not words or (words.endswith(("integer", "number")) and not path.endswith("]")):
            bounds = joined_text(constraints_at(section, path))
            link = " of " if words and bounds.startswith("at ") else " "
            expected = f"{words}{link}{bounds}".strip()
    or_null = " or null" if may_be_null else ""
    return f"{path} is {value}; it must be {expected}{or_null}"


def _choices(choices: tuple[str | bool, ...], value: Any) -> str:
    names = [str(choice).lower() if isinstance(choice, bool) else choice for choice in choices]
    text = shortened(str(value)) if isinstance(value, str | int | float) else ""
    # Abbreviations of packing algorithms are common: ffd, mffd, bfd.
    nearest = [name for name in names if text.lower() == _initials(name)]
    if not nearest:
        # The default cutoff of 0.6 misses abbreviations of one word.
        nearest = difflib.get_close_matches(text, names, n=1, cutoff=0.5)
    hint = f" (did you mean {nearest[0]}?)" if nearest else ""
    return f"one of {', '.join(names)}{hint}"


def _initials(choice: str) -> str:
    """Return the first letters of the words. Example: `first_fit_decreasing` -> `ffd`."""
    return "".join(word[0] for word in choice.split("_"))


def shown_yaml(value: Any) -> str:
    """Return the value in YAML notation: `null`, `true`, 'text', 3."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else shown_value(value)


Number = int | float
_ARITHMETIC = re.compile(r"\$\{(add|mul|div):")
_PREFIX = re.compile(r"^(Key|Value)Error raised while resolving interpolation: ")


def resolve_interpolations(
    tree: Mapping[str, Any], locate: Callable[[str], Location | None]
) -> dict[str, Any]:
    """Return the nested values without interpolations. Raises ConfigError for one that fails."""
    register_arithmetic()
    try:
        plain = OmegaConf.to_container(OmegaConf.create(dict(tree)), resolve=True)
    except OmegaConfBaseException as error:
        key = str(error.full_key or "the config")
        problem = _PREFIX.sub("", str(error).strip().partition("\n")[0]).strip('"')
        hint = ""
        if problem.startswith("Environment variable"):
            name = problem.split("'")[1]
            hint = f"; `export {name}=...` sets it, or write ${{oc.env:{name},DEFAULT}}"
        elif not _ARITHMETIC.match(problem):
            hint = "; for a literal ${ write \\${"
        place = locate(key)
        location = f" ({place})" if place else ""
        text = f"{key} cannot be resolved: {shortened(problem, 400)}{hint}{location}"
        raise ConfigError(text) from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def register_arithmetic() -> None:
    """Make `add`, `mul` and `div` known to OmegaConf; calling it again changes nothing."""
    for name, operation in (("add", operator.add), ("mul", operator.mul), ("div", _quotient)):
        OmegaConf.register_new_resolver(name, _resolver(name, operation), replace=True)


def _resolver(name: str, operation: Callable[[Any, Any], Number]) -> Callable[..., Number]:
    def resolve(*arguments: Any) -> Number:
        shown = f"${{{name}:{','.join(map(str, arguments))}}}"
        if len(arguments) != 2:
            raise ValueError(f"{shown} has {len(arguments)} arguments, and takes two numbers")
        for argument in arguments:
            # bool is a subclass of int, and `true` is not a number for a user.
            if type(argument) not in (int, float) or not math.isfinite(argument):
                raise ValueError(f"{shown} takes two finite numbers, and not '{argument}'")
        if name == "div" and arguments[1] == 0:
            raise ValueError(f"{shown} divides by zero")
        return operation(*arguments)

    return resolve


def _quotient(left: Number, right: Number) -> Number:
    # An integer key such as a batch size would refuse the float 4.0.
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right
