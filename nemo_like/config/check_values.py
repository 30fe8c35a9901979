"""Check of single values against the constraints that `config.schema` declares beside each field.

Relations between several keys are checked in `config.check`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any

from nemo_like.config.constraints import joined_text
from nemo_like.config.errors import Problem
from nemo_like.config.keys import field_constraints, is_section, type_at
from nemo_like.config.schema import RunConfig
from nemo_like.config.text import shown_value


def value_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each key whose value violates its constraints, in the schema's order."""
    yield from _section_problems(config, "")


def value_at(config: RunConfig, key: str) -> object:
    """Return the value at a dotted key; None if this kind of config has no such key."""
    if type_at(type(config), key) is None:
        return None
    return reduce(getattr, key.split("."), config)


def _section_problems(section: Any, prefix: str) -> Iterator[Problem]:
    constraints = field_constraints(type(section))
    for field in dataclasses.fields(section):
        key = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        if is_section(type(value)):
            yield from _section_problems(value, f"{key}.")
        elif isinstance(value, Mapping):
            for name, inner in value.items():
                if is_section(type(inner)):
                    yield from _section_problems(inner, f"{key}.{name}.")
        elif value is not None:
            # Null has no bounds: a key that may be null states what that means.
            rules = constraints[field.name]
            if not all(rule.accepts(value) for rule in rules):
                # All rules are named, so that the next value is right at once.
                text = joined_text(rules)
                yield Problem((key,), f"{key} is {shown_value(value)}; it must be {text}")
