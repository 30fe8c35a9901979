"""Conversion between plain nested values and the config dataclasses, with a check of every type.

Besides the type itself these are accepted: an integer for a float; a number in quotes, because
environment variables are text; and for a text key any scalar, with its raw text.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

from nemo_like.config.compose import MISSING
from nemo_like.config.errors import Problem
from nemo_like.config.keys import (
    child_types,
    field_types,
    is_open_section,
    is_section,
    without_none,
)
from nemo_like.config.text import shortened, shown_value
from nemo_like.config.yaml_locations import Sources

Config = TypeVar("Config")

_INT = re.compile(r"[-+]?\d+")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_MAX_INTEGER_DIGITS = 40
_MAX_INTEGER_BITS = 128
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}


class _Rejected(Exception):
    """A value has the wrong type; the text is the expected type, continuing "it must be"."""


def build_config(
    section: type[Config], values: Mapping[str, Any], sources: Sources
) -> tuple[Config | None, list[Problem]]:
    """Return (config, problems); the config is None if there is a problem."""
    builder = _Builder(sources)
    config = builder.section(section, values, "")
    if builder.problems:
        return None, builder.problems
    return config, []


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as the plain nested values of a YAML file, which loads to an equal config."""
    return {
        field.name: _to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)
    }


class _Builder:
    """Builds nested dataclasses and collects every problem instead of stopping at the first one."""

    def __init__(self, sources: Sources) -> None:
        self.problems: list[Problem] = []
        self._sources = sources

    def section(self, section: type, values: Any, path: str) -> Any:
        """Build an instance of the dataclass `section`; return None after adding a problem."""
        types = field_types(section)
        if not isinstance(values, Mapping):
            keys = ", ".join(list(types)[:4])
            return self._reject(
                path, f"{path} is {_shown(values)}; it is a section with keys ({keys}, ...)"
            )
        num_problems_before = len(self.problems)
        built = {}
        for field in dataclasses.fields(section):
            key = f"{path}.{field.name}" if path else field.name
            annotation = types[field.name]
            value = values.get(field.name, MISSING)
            if value != MISSING:
                built[field.name] = self.value(annotation, value, key)
            elif is_section(annotation):
                # Built from an empty mapping instead of its default factory, so that its required
                # keys are reported by name.
                built[field.name] = self.section(annotation, {}, key)
            elif not _has_default(field):
                self._reject(
                    key,
                    f"{key} is not set and has no default; set it in the YAML or with {key}=VALUE",
                )
        # The constructor would fail for the missing fields.
        if len(self.problems) > num_problems_before:
            return None
        return section(**built)

    def value(self, annotation: Any, value: Any, path: str) -> Any:
        """Convert `value` to the type `annotation`; return None after adding a problem."""
        if annotation is Any:
            return value
        inner, may_be_null = without_none(annotation)
        if value is None and may_be_null:
            return None
        if is_section(inner):
            return self.section(inner, value, path)
        if is_open_section(inner):
            return self._open_section(get_args(inner)[1], value, path)
        if get_origin(inner) is tuple:
            return self._tuple(get_args(inner)[0], value, path)
        try:
            return _scalar(inner, value, self._sources.raw_text(path))
        except _Rejected as rejected:
            or_null = " or null" if may_be_null else ""
            text = f"{path} is {_shown(value)}; it must be {rejected}{or_null}"
            return self._reject(path, text)

    def _open_section(self, annotation: Any, value: Any, path: str) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            entries = "sections" if is_section(annotation) else "values"
            return self._reject(
                path, f"{path} is {_shown(value)}; it must be a mapping from names to {entries}"
            )
        built = {}
        for name, inner in value.items():
            # A dot would make the name two levels of a key; the name is also part of metric names.
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                rule = "names start with a letter and go on with letters, digits, '_' and '-'"
                self._reject(path, f"{path} has the name {shown_value(name)}; {rule}")
            built[name] = self.value(annotation, inner, f"{path}.{name}")
        return built

    def _tuple(self, annotation: Any, value: Any, path: str) -> tuple[Any, ...] | None:
        # A single text is not split into characters, although it is a sequence.
        if not isinstance(value, list | tuple):
            return self._reject(
                path, f"{path} is {_shown(value)}; it must be a list, e.g. [{_shown(value)}]"
            )
        items = []
        for index, item in enumerate(value):
            items.append(self.value(annotation, item, f"{path}[{index}]"))
        return tuple(items)

    def _reject(self, path: str, text: str) -> None:
        location = self._sources.locate(path)
        self.problems.append(Problem((path,), text, location))


def _has_default(field: dataclasses.Field[Any]) -> bool:
    has_value = field.default is not dataclasses.MISSING
    return has_value or field.default_factory is not dataclasses.MISSING


def _scalar(annotation: Any, value: Any, raw_text: str | None) -> Any:
    """Convert `value` to an int, float, bool, str or a choice of a Literal. Raises _Rejected."""
    if get_origin(annotation) is Literal:
        return _choice(get_args(annotation), value)
    if annotation is str:
        return _text(value, raw_text)
    if annotation is bool:
        if isinstance(value, bool):
            return value
    elif annotation is int:
        return _integer(value)
    elif annotation is float:
        return _number(value)
    raise _Rejected(_TYPE_NAMES[annotation])


def _integer(value: Any) -> int:
    # bool is a subclass of int in Python, and `true` is no number for a user.
    if isinstance(value, int) and not isinstance(value, bool):
        if value.bit_length() > _MAX_INTEGER_BITS:
            raise _Rejected(f"an integer of at most {_MAX_INTEGER_BITS} bits")
        return value
    # Python limits the digits of int(text) and raises another error beyond; the length is checked
    # before.
    if isinstance(value, str) and len(value) <= _MAX_INTEGER_DIGITS and _INT.fullmatch(value):
        return int(value)
    # 4.0 is often the result of a division; the message has the integer to write.
    if isinstance(value, float) and value.is_integer():
        raise _Rejected(f"an integer: write {_shown(int(value))}")
    raise _Rejected(_TYPE_NAMES[int])


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # YAML 1.1 parses `1e-4`, without a dot, as a text.
    is_number_text = isinstance(value, str) and _FLOAT.fullmatch(value) is not None
    if not (is_number or is_number_text):
        raise _Rejected(_TYPE_NAMES[float])
    try:
        number = float(value)
    except OverflowError:  # an integer above the largest float
        number = math.inf
    if not math.isfinite(number):
        raise _Rejected("a finite number")
    return number


def _text(value: Any, raw_text: str | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        # YAML parses `007`, `1e-3` and `no` as numbers and booleans. A text key takes the raw text,
        # unless it is an interpolation whose resolved value is a number.
        if raw_text is not None and "${" not in raw_text:
            return raw_text
        return str(value)
    raise _Rejected("a text")


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, str) and value in choices:
        return value
    text = shortened(str(value)) if isinstance(value, str | int | float) else ""
    # Abbreviations of packing algorithms are common: ffd, mffd, bfd.
    nearest = [choice for choice in choices if text.lower() == _initials(choice)]
    if not nearest:
        # The default cutoff of 0.6 misses abbreviations of one word.
        nearest = difflib.get_close_matches(text, choices, n=1, cutoff=0.5)
    expected = f"one of {', '.join(choices)}"
    if nearest:
        expected += f" (did you mean {nearest[0]}?)"
    raise _Rejected(expected)


def _initials(choice: str) -> str:
    """Return the first letters of the words. Example: `first_fit_decreasing` -> `ffd`."""
    return "".join(word[0] for word in choice.split("_"))


def _shown(value: Any) -> str:
    """Return the value in YAML notation: `null`, `true`, 'text', 3."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return shown_value(value)


def _to_plain(value: Any) -> Any:
    if child_types(type(value)) is not None:
        return to_dict(value)
    if isinstance(value, Mapping):
        return {name: _to_plain(inner) for name, inner in value.items()}
    # YAML has lists, and no tuples.
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return _escaped(value) if isinstance(value, str) else value


def _escaped(text: str) -> str:
    r"""Escape `${`, which starts an interpolation, so that OmegaConf reads the text back unchanged.

    OmegaConf also interprets backslashes in front of `${`, so these are doubled.
    """
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
