"""Plain values become the config dataclasses and back. Every value is checked against its type;
nothing is guessed.

Accepted besides the type itself: an integer where a float is due, a number in quotes (environment
variables are text), and for a text key whatever was written, as it was spelled.
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
    """A value does not fit; the text says what would."""


def build_config(
    section: type[Config], values: Mapping[str, Any], sources: Sources
) -> tuple[Config | None, list[Problem]]:
    """The dataclass, or None and everything that is wrong with `values`: missing keys, wrong types,
    illegal choices.
    """
    builder = _Builder(sources)
    config = builder.section(section, values, "")
    return (None if builder.problems else config), builder.problems


def to_dict(config: Any) -> dict[str, Any]:
    """A config as the plain nested values a YAML file would hold, which load again to an equal
    config.
    """
    return {
        field.name: _to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)
    }


class _Builder:
    def __init__(self, sources: Sources) -> None:
        self.problems: list[Problem] = []
        self._sources = sources

    def section(self, section: type, values: Any, path: str) -> Any:
        """An instance of the dataclass `section`; None after a problem, which is then in
        `problems`.
        """
        if not isinstance(values, Mapping):
            keys = ", ".join(list(field_types(section))[:4])
            return self._reject(
                path, f"{path} is {_shown(values)}; it is a section with keys ({keys}, ...)"
            )
        before = len(self.problems)
        built = {}
        for field in dataclasses.fields(section):
            key = f"{path}.{field.name}" if path else field.name
            annotation = field_types(section)[field.name]
            if field.name in values and values[field.name] != MISSING:
                built[field.name] = self.value(annotation, values[field.name], key)
            elif is_section(annotation):
                built[field.name] = self.section(annotation, {}, key)
            elif (
                field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING
            ):
                self._reject(
                    key,
                    f"{key} is not set and has no default; set it in the YAML or with {key}=VALUE",
                )
        return section(**built) if len(self.problems) == before else None

    def value(self, annotation: Any, value: Any, path: str) -> Any:
        """`value` as the type `annotation`; None after a problem."""
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
            return _scalar(inner, value, self._sources.spelled(path))
        except _Rejected as rejected:
            expected = f"{rejected}{' or null' if may_be_null else ''}"
            return self._reject(path, f"{path} is {_shown(value)}; it must be {expected}")

    def _open_section(self, annotation: Any, value: Any, path: str) -> dict[str, Any] | None:
        if not isinstance(value, Mapping):
            return self._reject(
                path, f"{path} is {_shown(value)}; it must be a mapping from names to sections"
            )
        for name in value:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                rule = "names start with a letter and go on with letters, digits, '_' and '-'"
                self._reject(path, f"{path} has the name {shown_value(name)}; {rule}")
        return {
            name: self.value(annotation, inner, f"{path}.{name}") for name, inner in value.items()
        }

    def _tuple(self, annotation: Any, value: Any, path: str) -> tuple[Any, ...] | None:
        if not isinstance(value, list | tuple):
            return self._reject(
                path, f"{path} is {_shown(value)}; it must be a list, e.g. [{_shown(value)}]"
            )
        return tuple(
            self.value(annotation, item, f"{path}[{index}]") for index, item in enumerate(value)
        )

    def _reject(self, path: str, text: str) -> None:
        self.problems.append(Problem((path,), text, self._sources.locate(path)))


def _scalar(annotation: Any, value: Any, spelled: str | None) -> Any:
    """`value` as an int, float, bool, str or one of a Literal; raises _Rejected with what is
    expected.
    """
    if get_origin(annotation) is Literal:
        return _choice(get_args(annotation), value)
    if annotation is str:
        return _text(value, spelled)
    if annotation is bool:
        if isinstance(value, bool):
            return value
    elif annotation is int:
        if isinstance(value, int) and not isinstance(value, bool):
            if value.bit_length() > _MAX_INTEGER_BITS:
                raise _Rejected(f"an integer of at most {_MAX_INTEGER_BITS} bits")
            return value
        if isinstance(value, str) and len(value) <= _MAX_INTEGER_DIGITS and _INT.fullmatch(value):
            return int(value)
        if isinstance(value, float) and value.is_integer():
            raise _Rejected(f"an integer: write {_shown(int(value))}")
    elif annotation is float:
        return _number(value)
    raise _Rejected(_TYPE_NAMES[annotation])


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and _FLOAT.fullmatch(value)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        raise _Rejected("a finite number")
    raise _Rejected("a number")


def _text(value: Any, spelled: str | None) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        # YAML takes `007`, `1e-3` and `no` for numbers and booleans; a text key means what stands
        # there.
        return spelled if spelled is not None and "${" not in spelled else str(value)
    raise _Rejected("a text")


def _choice(choices: tuple[Any, ...], value: Any) -> Any:
    if isinstance(value, str) and value in choices:
        return value
    value = shortened(str(value)) if isinstance(value, str | int | float) else ""
    abbreviated = [
        choice
        for choice in choices
        if str(value).lower() == "".join(word[0] for word in choice.split("_"))
    ]
    nearest = abbreviated or difflib.get_close_matches(str(value), choices, n=1, cutoff=0.5)
    raise _Rejected(
        f"one of {', '.join(choices)}" + (f" (did you mean {nearest[0]}?)" if nearest else "")
    )


def _shown(value: Any) -> str:
    """The value as YAML has it: `null`, `true`, 'text', 3."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shown_value(value)


def _to_plain(value: Any) -> Any:
    if child_types(type(value)) is not None:
        return to_dict(value)
    if isinstance(value, Mapping):
        return {name: _to_plain(inner) for name, inner in value.items()}
    if isinstance(value, tuple):
        return [_to_plain(item) for item in value]
    return _escaped(value) if isinstance(value, str) else value


def _escaped(text: str) -> str:
    """`text` so that OmegaConf reads it back as it is: `${` starts an interpolation, backslashes
    before it count.
    """
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
