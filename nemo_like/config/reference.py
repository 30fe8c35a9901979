"""The configuration reference: type, default, constraints and description of every key.

Everything is derived from `config.schema`: types, defaults and constraints from the fields,
descriptions from the strings below the fields in the source.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from nemo_like.config.constraints import joined_text
from nemo_like.config.keys import (
    field_constraints,
    field_types,
    is_open_section,
    is_section,
    without_none,
)
from nemo_like.config.schema import RunConfig

USER_NAME = "NAME"
"""Placeholder for a name that the user chooses, as in `reward.functions.NAME.path`."""
_TYPE_NAMES = {
    int: "integer",
    float: "number",
    bool: "true or false",
    str: "text",
    Any: "any value",
}
_REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class KeyReference:
    """One key that takes a value.

    Example: `KeyReference("policy.optimizer.lr", "number", "1e-05", "above 0", "Peak learning
    rate; ...")`.
    """

    key: str
    type: str
    default: str
    """The default as YAML, or `required`."""
    constraints: str
    """In words, e.g. `at least 0 and below 1`; empty if every value of the type is legal."""
    description: str


@dataclass(frozen=True, slots=True)
class SectionReference:
    """One section with the keys directly in it; subsections are sections of their own."""

    path: str
    """The dotted path; empty for the top level."""
    description: str
    keys: tuple[KeyReference, ...]


def section_references(run_config: type[RunConfig]) -> list[SectionReference]:
    """Return every section of a job's config in the schema's order, the top level first.

    A section without keys of its own is left out.
    """
    return [section for section in _sections(run_config, "") if section.keys]


def _sections(section: type, path: str) -> Iterator[SectionReference]:
    prefix = f"{path}." if path else ""
    keys: list[KeyReference] = []
    subsections: list[tuple[type, str]] = []
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        annotation, _ = without_none(field_types(section)[field.name])
        if is_section(annotation):
            subsections.append((annotation, key))
        elif is_open_section(annotation) and is_section(get_args(annotation)[1]):
            subsections.append((get_args(annotation)[1], f"{key}.{USER_NAME}"))
        else:
            keys.append(_key_reference(section, field, key))
    # The top level of every job has the description of the base class.
    documented = RunConfig if issubclass(section, RunConfig) else section
    yield SectionReference(path, _one_line(documented.__doc__ or ""), tuple(keys))
    # After the section's own keys, so that a page has them together.
    for subsection, key in subsections:
        yield from _sections(subsection, key)


def _key_reference(section: type, field: dataclasses.Field[Any], key: str) -> KeyReference:
    return KeyReference(
        key=key,
        type=_type_name(field_types(section)[field.name]),
        default=_default_text(field),
        constraints=joined_text(field_constraints(section)[field.name]),
        description=_field_descriptions(section).get(field.name, ""),
    )


def _type_name(annotation: Any) -> str:
    """Return the type in the words of a user. Examples: `integer or null`, `keep | drop`."""
    inner, may_be_null = without_none(annotation)
    if get_origin(inner) is Literal:
        name = " | ".join(get_args(inner))
    elif get_origin(inner) is tuple:
        name = f"list of {_TYPE_NAMES[get_args(inner)[0]]}s"
    elif is_open_section(inner):
        name = f"mapping of names to {_type_name(get_args(inner)[1])}"
    else:
        name = _TYPE_NAMES[inner]
    return f"{name} or null" if may_be_null else name


def _default_text(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if field.default_factory is dict:
        return "{}"
    if default is dataclasses.MISSING:
        return _REQUIRED
    if default is None:
        return "null"
    if isinstance(default, bool):
        return "true" if default else "false"
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    return str(default)


@cache
def _field_descriptions(section: type) -> dict[str, str]:
    """Return field -> description of a config dataclass and its base classes.

    Python keeps no strings of fields at run time, so they are read from the source: a description
    is the string expression that follows an annotated assignment.
    """
    descriptions: dict[str, str] = {}
    # Base classes first, so that a field that is declared again has its own description; the last
    # class is `object`.
    for base in reversed(section.__mro__[:-1]):
        (class_node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(class_node, ast.ClassDef)
        for node, following in pairwise(class_node.body):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
                continue
            if not isinstance(following, ast.Expr):
                continue
            constant = following.value
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                descriptions[node.target.id] = _one_line(constant.value)
    return descriptions


def _one_line(text: str) -> str:
    return " ".join(text.split())
