"""Source locations of the keys in YAML files, so that an error names file and line.

Hydra composes the config and does not record locations. This module reads the same files again and
stores, for each key, its location and the raw text of its value. Nothing is composed here.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import SafeConstructor

from nemo_like.config.errors import ConfigError, Location, Problem, shown_path
from nemo_like.config.foreign import unknown_text
from nemo_like.config.keys import (
    JobSchema,
    child_types,
    is_open_section,
    is_section,
    type_at,
    without_none,
)
from nemo_like.config.safe_yaml import MAX_BYTES, compose_yaml
from nemo_like.config.text import shortened, shown_value

_MAX_HINTS = 50
"""Max unknown keys per file for which a similar key is searched."""
_STR_TAG = "tag:yaml.org,2002:str"
_BOOL_TAG = "tag:yaml.org,2002:bool"
_NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class KeySource:
    """The last assignment of a key: its location, and the raw text of a plain (unquoted) scalar."""

    location: Location
    raw_text: str | None = None


@dataclass
class Sources:
    """Dotted key -> its last assignment. Later files and the command line replace earlier ones."""

    by_key: dict[str, KeySource] = field(default_factory=dict)

    def locate(self, path: str) -> Location | None:
        """Return the location of `path`, or of the nearest section above it that was assigned;
        None if there is neither.
        """
        while path:
            if path in self.by_key:
                return self.by_key[path].location
            # A list item such as `a.b[2]` is below the list `a.b`.
            separator = "[" if path.endswith("]") else "."
            path = path.rpartition(separator)[0]
        return None

    def raw_text(self, path: str) -> str | None:
        """Return the text of an unquoted scalar as written in the file; None if it is not known.

        Example: `007`, which YAML parses as the number 7.
        """
        source = self.by_key.get(path)
        return None if source is None else source.raw_text

    def drop(self, path: str) -> None:
        """Remove `path` and every key below it, before its value is replaced."""
        # `a.b` is below `a`, and so is the list item `a[0]`; `ab` is not.
        below = re.compile(re.escape(path) + r"($|[.\[])")
        for key in [key for key in self.by_key if below.match(key)]:
            del self.by_key[key]


def read_yaml(path: Path) -> yaml.MappingNode | None:
    """Read a YAML file and return its root mapping; None if the file is empty.

    Raises ConfigError, with file and line, if the file cannot be read, is not YAML, is not a
    mapping or has a duplicate key.
    """
    name = shown_path(path)
    try:
        with path.open("rb") as file:
            # One byte more than the limit is enough to see that a file exceeds it.
            root = compose_yaml(file.read(MAX_BYTES + 1), name)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(yaml_error_text(error, path)) from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _NULL_TAG):
        return None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name} is {_kind_of(root)}; a config is a mapping of sections, such as `policy:`"
        )
    _refuse_duplicates(root, path, set())
    return root


def yaml_error_text(error: yaml.YAMLError, path: Path) -> str:
    """Return one line for a YAML syntax error, with line and column where the parser knows them."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return f"{shown_path(path)} is not valid YAML: {' '.join(str(error).split())}"
    assert isinstance(error, yaml.MarkedYAMLError)
    problem = str(error.problem)
    if error.context:
        problem += f" ({error.context})"
    # YAML forbids tabs for indentation, and its own message does not mention spaces.
    hint = "; indent with spaces" if "'\\t'" in problem else ""
    location = f"{shown_path(path)}:{mark.line + 1}"
    return f"{location} is not valid YAML: {problem} in column {mark.column + 1}{hint}"


def check_keys(
    job: JobSchema, root: yaml.MappingNode, prefix: str, path: Path
) -> Iterator[Problem]:
    """Yield a problem for each unknown key of one file and for each section that is not a mapping.

    The content of the file is below the dotted `prefix` of the config.
    """
    yield from _check_section(job, root, prefix, shown_path(path), itertools.count(), is_root=True)


def plain_tree(root: yaml.MappingNode, prefix: str) -> dict[str, Any]:
    """Return the content of one file, nested below the dotted `prefix`.

    Scalars other than null and booleans are their raw text; interpolations are not resolved. Keys
    that are not names, such as `1` or `a.b`, and `defaults` are left out.
    """
    tree = _plain(root)
    assert isinstance(tree, dict)
    tree.pop("defaults", None)
    # Nested from the inside: the last name is the nearest to the content.
    names = prefix.split(".") if prefix else []
    for name in reversed(names):
        tree = {name: tree}
    return tree


def merged_trees(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Merge `above` over `below`: mappings are merged, every other value is replaced."""
    merged = dict(below)
    for name, value in above.items():
        existing = merged.get(name)
        if isinstance(existing, dict) and isinstance(value, dict):
            merged[name] = merged_trees(existing, value)
        else:
            merged[name] = value
    return merged


def record(sources: Sources, root: yaml.MappingNode, prefix: str, path: Path) -> None:
    """Add the location of every key of one file to `sources`."""
    _record(sources, root, prefix, shown_path(path))


def _check_section(
    job: JobSchema,
    node: yaml.MappingNode,
    prefix: str,
    source: str,
    num_unknown: Iterator[int],
    *,
    is_root: bool = False,
) -> Iterator[Problem]:
    """Yield the problems of the keys below `prefix`; `num_unknown` counts unknown keys."""
    for key_node, value in _items(node):
        location = Location(source, key_node.start_mark.line + 1)
        path = f"{prefix}.{key_node.value}" if prefix else key_node.value
        if is_root and key_node.value == "defaults":
            continue
        annotation = type_at(job.run_config, path) if is_name(key_node) else None
        if annotation is None:
            # The search compares the key with every key of the schema. The error lists only the
            # first problems, so the time is bounded for files with thousands of unknown keys.
            if next(num_unknown) < _MAX_HINTS:
                text = _unknown_text(job, prefix, key_node)
            else:
                text = f"unknown key {shortened(path)}"
            yield Problem((path,), text, location)
            continue
        annotation, _ = without_none(annotation)
        if not (is_section(annotation) or is_open_section(annotation)):
            continue
        if isinstance(value, yaml.MappingNode):
            yield from _check_section(job, value, path, source, num_unknown)
        elif "${" not in str(value.value):
            # A section may be an interpolation of another section; Hydra resolves it later.
            yield Problem((path,), _not_a_section_text(path, annotation, value), location)


def _unknown_text(job: JobSchema, prefix: str, key_node: yaml.ScalarNode) -> str:
    path = f"{prefix}.{key_node.value}" if prefix else key_node.value
    if "." in key_node.value and type_at(job.run_config, path) is not None:
        return (
            f"{key_node.value} is one key with dots in it; in YAML write nested sections, dots are"
            " for overrides"
        )
    return unknown_text(job, path)


def _not_a_section_text(path: str, annotation: Any, value: yaml.Node) -> str:
    keys = child_types(annotation)
    if keys is None:
        examples = "names of your choice"
    else:
        examples = ", ".join(list(keys)[:4])
        if len(keys) > 4:
            examples += ", ..."
    if value.tag == _NULL_TAG:
        return f"{path} is empty; remove the line or give it keys ({examples})"
    return f"{path} is {_kind_of(value)}; it is a section with keys ({examples})"


def _plain(node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {key.value: _plain(value) for key, value in _items(node) if is_name(key)}
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    if node.tag == _NULL_TAG:
        return None
    if node.tag == _BOOL_TAG:
        return SafeConstructor().construct_object(node)
    return node.value


def is_name(key_node: yaml.ScalarNode) -> bool:
    """Return True if a YAML key can be one name of a dotted key."""
    return key_node.tag == _STR_TAG and "." not in key_node.value


def _record(sources: Sources, node: yaml.MappingNode, prefix: str, source: str) -> None:
    for key_node, value in _items(node):
        path = f"{prefix}.{key_node.value}" if prefix else key_node.value
        # Mappings of several files are merged key by key; every other value replaces the old one
        # together with what was below it.
        if not isinstance(value, yaml.MappingNode):
            sources.drop(path)
        sources.by_key[path] = _key_source(value, source, key_node.start_mark.line + 1)
        if isinstance(value, yaml.MappingNode):
            _record(sources, value, path, source)
        elif isinstance(value, yaml.SequenceNode):
            for index, item in enumerate(value.value):
                line = item.start_mark.line + 1
                sources.by_key[f"{path}[{index}]"] = _key_source(item, source, line)


def _key_source(node: yaml.Node, source: str, line: int) -> KeySource:
    # The style of a quoted scalar is its quote; of a block it is `|` or `>`.
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return KeySource(Location(source, line), node.value if is_plain else None)


def _items(node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Yield keys and values of a mapping, those merged in by `<<` first: own keys override them."""
    own = []
    for key, value in node.value:
        if key.tag != _MERGE_TAG:
            own.append((key, value))
            continue
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for part in parts:
            if isinstance(part, yaml.MappingNode):
                yield from _items(part)
    yield from own


def _refuse_duplicates(node: yaml.Node, path: Path, visited: set[int]) -> None:
    """Raise ConfigError for a duplicate key and for a key that is not a scalar.

    `visited` has the ids of nodes that were checked: a node with several aliases is visited once.
    """
    if id(node) in visited:
        return
    visited.add(id(node))
    children = list(node.value) if isinstance(node, yaml.SequenceNode) else []
    if isinstance(node, yaml.MappingNode):
        first_lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise ConfigError(
                    f"{shown_path(path)}:{line} has {_kind_of(key)} as a key; keys are plain words"
                )
            if key.value in first_lines and key.tag != _MERGE_TAG:
                raise ConfigError(
                    f"{shown_path(path)}:{line} has the key {shortened(key.value)} again; it is in"
                    f" line {first_lines[key.value]} already"
                )
            first_lines[key.value] = line
            children.append(value)
    for child in children:
        _refuse_duplicates(child, path, visited)


def _kind_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    if isinstance(node, yaml.SequenceNode):
        return "a list"
    return f"the value {shown_value(node.value)}"
