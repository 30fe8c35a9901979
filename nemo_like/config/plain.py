"""Conversion of the config dataclasses to plain nested values, the opposite of `config.build`.

It imports neither OmegaConf nor pydantic, so `algorithms.run` works on machines without them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from nemo_like.config.keys import child_types


def to_dict(config: Any) -> dict[str, Any]:
    """Return a config as the plain nested values of a YAML file, which loads to an equal config."""
    return {
        field.name: _to_plain(getattr(config, field.name)) for field in dataclasses.fields(config)
    }


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
