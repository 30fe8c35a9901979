"""YAML files read with the place of every key, so that an error can say file and line. It composes
nothing.

Hydra merges the files; this module reads the same files beside it, and what it keeps of each value
is where it was written and how it was spelled.
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
    RUN_CONFIGS,
    Kind,
    child_types,
    is_open_section,
    is_section,
    type_at,
    without_none,
)
from nemo_like.config.safe_yaml import MAX_BYTES, compose_yaml
from nemo_like.config.text import shortened, shown_value

_MAX_HINTS = 50
"""Unknown keys of one file that get a hint."""
_STR_TAG = "tag:yaml.org,2002:str"
_BOOL_TAG = "tag:yaml.org,2002:bool"
_NULL_TAG = "tag:yaml.org,2002:null"
_MERGE_TAG = "tag:yaml.org,2002:merge"


@dataclass(frozen=True, slots=True)
class Written:
    """How a key was last set: where, and its value as it was spelled if it is a plain (unquoted)
    scalar.
    """

    location: Location
    spelled: str | None = None


@dataclass
class Sources:
    """Dotted key -> where it was last written. Later files and the command line replace what
    earlier ones said.
    """

    written: dict[str, Written] = field(default_factory=dict)

    def locate(self, path: str) -> Location | None:
        """The place of `path`, or of the nearest section above it that was written down; None if
        nothing was.
        """
        while path:
            if path in self.written:
                return self.written[path].location
            path = path.rpartition("[" if path.endswith("]") else ".")[0]
        return None

    def spelled(self, path: str) -> str | None:
        """The text of an unquoted scalar, e.g. `007` where YAML made it the number 7; None if it is
        not known.
        """
        written = self.written.get(path)
        return None if written is None else written.spelled

    def forget(self, path: str) -> None:
        """Drop `path` and all below it: a value that is about to be replaced."""
        below = re.compile(re.escape(path) + r"($|[.\[])")
        self.written = {key: value for key, value in self.written.items() if not below.match(key)}


def read_yaml(path: Path) -> yaml.MappingNode | None:
    """The root mapping of a YAML file, None if the file is empty.

    Raises ConfigError, with file and line, if it cannot be read, is not YAML, is not a mapping or
    has a key twice.
    """
    name = shown_path(path)
    try:
        with path.open("rb") as file:
            root = compose_yaml(file.read(MAX_BYTES + 1), name)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(yaml_error_text(error, path)) from error
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _NULL_TAG):
        return None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(
            f"{name} holds {_kind_of(root)}; a config is a mapping of sections, such as `policy:`"
        )
    _refuse_duplicates(root, path, set())
    return root


def yaml_error_text(error: yaml.YAMLError, path: Path) -> str:
    """One line for what the YAML parser found."""
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    if mark is None:
        return f"{shown_path(path)} is not valid YAML: {' '.join(str(error).split())}"
    problem = f"{error.problem}" + (f" ({error.context})" if error.context else "")  # type: ignore[union-attr]
    hint = "; indent with spaces" if "'\\t'" in problem else ""
    return f"{shown_path(path)}:{mark.line + 1} is not valid YAML: {problem} in column {mark.column + 1}{hint}"


def check_keys(kind: Kind, root: yaml.MappingNode, prefix: str, path: Path) -> Iterator[Problem]:
    """Unknown keys and sections that are no mappings in one file, whose content stands under the
    dotted `prefix`.
    """
    yield from _check_section(kind, root, prefix, shown_path(path), itertools.count(), is_root=True)


def plain_tree(root: yaml.MappingNode, prefix: str) -> dict[str, Any]:
    """The content of one file under the dotted `prefix`: null, booleans, lists and mappings, else
    the text as spelled.

    Nothing is interpolated. Keys that are no names, such as `1` or `a.b`, and `defaults` are left
    out.
    """
    tree = _plain(root)
    assert isinstance(tree, dict)
    tree.pop("defaults", None)
    for name in reversed(prefix.split(".") if prefix else []):
        tree = {name: tree}
    return tree


def merged_trees(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`: mappings are merged, everything else is replaced."""
    merged = dict(below)
    for name, value in above.items():
        under = merged.get(name)
        merged[name] = (
            merged_trees(under, value)
            if isinstance(under, dict) and isinstance(value, dict)
            else value
        )
    return merged


def record(sources: Sources, root: yaml.MappingNode, prefix: str, path: Path) -> None:
    """Remember where every key of one file stands."""
    _record(sources, root, prefix, shown_path(path))


def _check_section(
    kind: Kind,
    node: yaml.MappingNode,
    prefix: str,
    source: str,
    num_unknown: Iterator[int],
    *,
    is_root: bool = False,
) -> Iterator[Problem]:
    """Yield the problems of the keys below `prefix`; `num_unknown` counts the unknown keys of the
    file.
    """
    for key_node, value in _items(node):
        location = Location(source, key_node.start_mark.line + 1)
        path = f"{prefix}.{key_node.value}" if prefix else key_node.value
        if is_root and key_node.value == "defaults":
            continue
        annotation = type_at(RUN_CONFIGS[kind], path) if is_name(key_node) else None
        if annotation is None:
            # A hint compares the key with every key of the schema, and only the first few are
            # shown.
            has_hint = next(num_unknown) < _MAX_HINTS
            text = (
                _unknown_text(kind, prefix, key_node)
                if has_hint
                else f"unknown key {shortened(path)}"
            )
            yield Problem((path,), text, location)
            continue
        annotation, _ = without_none(annotation)
        if not (is_section(annotation) or is_open_section(annotation)):
            continue
        if isinstance(value, yaml.MappingNode):
            yield from _check_section(kind, value, path, source, num_unknown)
        elif "${" not in str(value.value):
            yield Problem((path,), _not_a_section_text(path, annotation, value), location)


def _unknown_text(kind: Kind, prefix: str, key_node: yaml.ScalarNode) -> str:
    path = f"{prefix}.{key_node.value}" if prefix else key_node.value
    if "." in key_node.value and type_at(RUN_CONFIGS[kind], path) is not None:
        return f"{key_node.value} is one key with dots in it; in YAML write nested sections, dots are for overrides"
    return unknown_text(kind, path)


def _not_a_section_text(path: str, annotation: Any, value: yaml.Node) -> str:
    keys = child_types(annotation)
    examples = (
        "names of your choice"
        if keys is None
        else ", ".join(list(keys)[:4]) + (", ..." if len(keys) > 4 else "")
    )
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
    return SafeConstructor().construct_object(node) if node.tag == _BOOL_TAG else node.value


def is_name(key_node: yaml.ScalarNode) -> bool:
    """Whether a YAML key can be part of a dotted key."""
    return key_node.tag == _STR_TAG and "." not in key_node.value


def _record(sources: Sources, node: yaml.MappingNode, prefix: str, source: str) -> None:
    for key_node, value in _items(node):
        path = f"{prefix}.{key_node.value}" if prefix else key_node.value
        if not isinstance(value, yaml.MappingNode):
            sources.forget(path)
        sources.written[path] = _written(value, source, key_node.start_mark.line + 1)
        if isinstance(value, yaml.MappingNode):
            _record(sources, value, path, source)
        elif isinstance(value, yaml.SequenceNode):
            for index, item in enumerate(value.value):
                sources.written[f"{path}[{index}]"] = _written(
                    item, source, item.start_mark.line + 1
                )


def _written(node: yaml.Node, source: str, line: int) -> Written:
    is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return Written(Location(source, line), node.value if is_plain else None)


def _items(node: yaml.MappingNode) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
    """Keys and values of a mapping, with those merged in by `<<` first."""
    own = []
    for key, value in node.value:
        if key.tag != _MERGE_TAG:
            own.append((key, value))
            continue
        for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
            if isinstance(part, yaml.MappingNode):
                yield from _items(part)
    yield from own


def _refuse_duplicates(node: yaml.Node, path: Path, visited: set[int]) -> None:
    """Also refuses keys that are no scalars. A node with several aliases is visited once."""
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
                first, shown = first_lines[key.value], shortened(key.value)
                raise ConfigError(
                    f"{shown_path(path)}:{line} has the key {shown} again; it is in line {first}"
                    f" already"
                )
            first_lines[key.value] = line
            children.append(value)
    for child in children:
        _refuse_duplicates(child, path, visited)


def _kind_of(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return (
        "a list" if isinstance(node, yaml.SequenceNode) else f"the value {shown_value(node.value)}"
    )
