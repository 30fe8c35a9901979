"""The tables of other tools' keys, `config/foreign/*.yaml`.

A table has three parts. `renamed` maps a dotted key to its key here, or to a mapping with the
fields of `Entry`. `unsupported` lists groups of keys that share a `reason`; with a value of
`no_effect` (by default false) such a key can be deleted. `obsolete` lists keys without a meaning
here. A section in `unsupported` or `obsolete` stands for all keys below it that are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

_GENERAL = "general.yaml"


@dataclass(frozen=True, slots=True)
class Entry:
    """What becomes of one key of another tool.

    Example: `Entry("renamed", ("grpo.advantage.normalize",), values={"true": "group_std"})`.
    """

    kind: Literal["renamed", "unsupported", "obsolete"]
    targets: tuple[str, ...] = ()
    """Keys of the schema; those that the job does not have are ignored. Several targets take the
    items of a list."""
    values: Mapping[str, str | None] | None = None
    """Canonical old value -> new value, None where the default has the same effect, `*` for every
    other value; None if values stay as they are."""
    note: str = ""
    """A further change of the value, or the reason why other values have no counterpart; for
    `unsupported` the reason."""
    switch: str | None = None
    """A foreign key that must be on, or this one has no effect."""
    unless: str | None = None
    """A foreign key that must be off, or this one has no effect."""
    when_null: str = ""
    """Why null is not the same as leaving the key out; empty if it is."""
    sft: str | None = None
    """The key for SFT configs where it differs."""
    no_effect: tuple[str, ...] = ("false",)
    """Canonical values with which an unsupported key can be deleted."""
    form: str = ""
    """Type of the values to which an entry of `same_keys` applies: `scalar`, `list` or `dict`."""


@cache
def tool_tables() -> dict[str, dict[str, Entry]]:
    """Return tool -> dotted key or section -> entry."""
    tables = {}
    for content in _tool_files():
        table = {path: _renamed(value) for path, value in content["renamed"].items()}
        for group in content["unsupported"]:
            no_effect = tuple(group.get("no_effect", ["false"]))
            entry = Entry("unsupported", note=group["reason"], no_effect=no_effect)
            table.update(dict.fromkeys(group["keys"], entry))
        table.update(dict.fromkeys(content["obsolete"], Entry("obsolete")))
        tables[content["tool"]] = table
    return tables


@cache
def all_entries() -> dict[str, Entry]:
    """Return the entries of all tools; a key of several tools has the same meaning in each."""
    return {path: entry for table in tool_tables().values() for path, entry in table.items()}


@cache
def same_keys() -> dict[str, Entry]:
    """Return the keys of the schema that a tool has too, with values of another form."""
    entries = {}
    for content in _tool_files():
        for path, value in content.get("same_keys", {}).items():
            if "to" in value:
                entries[path] = _renamed(value)
            else:
                kind = "unsupported" if "reason" in value else "obsolete"
                entries[path] = Entry(kind, note=value.get("reason", ""), form=value["form"])
    return entries


@cache
def on_when_disabled() -> frozenset[str]:
    """Return the sections whose `enabled: false` has a meaning of its own."""
    return frozenset(path for file in _tool_files() for path in file.get("on_when_disabled", ()))


@cache
def general() -> dict[str, Any]:
    """Return what is known beside the tables: `tools`, `jobs` and `names`."""
    return _read(_GENERAL)


def _renamed(value: str | Mapping[str, Any]) -> Entry:
    fields: dict[str, Any] = {"to": value} if isinstance(value, str) else dict(value)
    to = fields.pop("to")
    return Entry("renamed", (to,) if isinstance(to, str) else tuple(to), **fields)


@cache
def _tool_files() -> tuple[dict[str, Any], ...]:
    """Return the tables as they are in the files. The nearest tool of a key is the first one."""
    # NeMo RL first: most of its sections have the same names here.
    stems = ("nemo_rl", "verl", "trl", "cosmos_rl", "earlier")
    return tuple(_read(f"{stem}.yaml") for stem in stems)


def _read(name: str) -> dict[str, Any]:
    # Imported here, because `--help` needs the schema and no YAML.
    import yaml

    text = resources.files("nemo_like.config").joinpath("foreign", name).read_text("utf-8")
    return yaml.safe_load(text)
