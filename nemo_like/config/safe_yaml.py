"""YAML text to a graph of nodes, within limits on size, depth and aliases. What a config has no use
for is refused.

The limits bound the time of everything that reads the graph or the file afterwards.
"""

from __future__ import annotations

import re

import yaml
from yaml.constructor import SafeConstructor

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import shortened

MAX_BYTES = 64 * 1024
MAX_DEPTH = 30
MAX_NODES = 4_000
"""Nodes of the file, counting what an alias stands for each time it is used."""
_MAX_NUMBER_CHARACTERS = 400
_MAX_INTEGER_BITS = 128
_PREFIX = "tag:yaml.org,2002:"
_SCALAR_TAGS = frozenset(
    _PREFIX + name
    for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value")
)
_NUMBER_TAGS = frozenset(_PREFIX + name for name in ("int", "float"))
_CONVERTED_TAGS = frozenset(_PREFIX + name for name in ("int", "float", "bool", "timestamp"))
_SURROGATE = re.compile("[\\ud800-\\udfff]")


def compose_yaml(data: bytes, name: str) -> yaml.Node | None:
    """Return the root node of a YAML text, None if it is empty; `name` is the file in messages.

    Raises ConfigError for text that is not UTF-8 or is above the limits, for tags, and for values
    that YAML cannot construct; raises yaml.YAMLError for text that is not YAML.
    """
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name} has more than {MAX_BYTES:,} bytes, the limit for a config")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text at byte {error.start + 1}: {error.reason}"
        ) from error
    _check_events(text, name)
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if root is not None:
        _num_nodes(root, name, {}, set())
    return root


def _check_events(text: str, name: str) -> None:
    """Check depth and number of nodes, before anything recursive is built from the text."""
    depth = 0
    num_nodes = 0
    # Events are parsed one by one, so a hostile file is refused before it is in memory as a graph.
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        num_nodes += isinstance(event, yaml.NodeEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{_place(name, event)} is nested more than {MAX_DEPTH} levels deep")
        if num_nodes > MAX_NODES:
            raise ConfigError(
                f"{_place(name, event)} goes beyond {MAX_NODES:,} keys and values, the limit for a"
                f" config"
            )


def _num_nodes(node: yaml.Node, name: str, counted: dict[int, int], ancestors: set[int]) -> int:
    """Return the number of nodes in `node`, with it and aliases expanded; each is visited once."""
    # An alias to a node that contains it would be expanded forever.
    if id(node) in ancestors:
        raise ConfigError(f"{_place(name, node)} contains itself through an alias")
    if id(node) in counted:
        return counted[id(node)]
    if isinstance(node, yaml.ScalarNode):
        _check_scalar(node, name)
        children = []
    elif isinstance(node, yaml.MappingNode):
        _check_collection(node, "map", name)
        children = [part for pair in node.value for part in pair]
    else:
        _check_collection(node, "seq", name)
        children = node.value
    inner = ancestors | {id(node)}
    count = 1
    for child in children:
        count += _num_nodes(child, name, counted, inner)
    # Aliases of aliases grow exponentially (the "billion laughs" attack).
    if count > MAX_NODES:
        raise ConfigError(
            f"{_place(name, node)} is more than {MAX_NODES:,} keys and values once its aliases are"
            f" expanded"
        )
    counted[id(node)] = count
    return count


def _check_collection(node: yaml.Node, kind: str, name: str) -> None:
    if node.tag != _PREFIX + kind:
        raise ConfigError(f"{_place(name, node)} has the tag {_tag(node)}; a config has no tags")
    if kind != "map":
        return
    for key, value in node.value:
        if key.tag != _PREFIX + "merge":
            continue
        # `<<` takes one mapping or a list of mappings.
        parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if not all(isinstance(part, yaml.MappingNode) for part in parts):
            raise ConfigError(f"{_place(name, key)} merges (<<) something that is not a mapping")


def _check_scalar(node: yaml.ScalarNode, name: str) -> None:
    text = shortened(repr(node.value))
    if node.tag not in _SCALAR_TAGS:
        raise ConfigError(f"{_place(name, node)} has the tag {_tag(node)}; a config has no tags")
    if _SURROGATE.search(node.value):
        raise ConfigError(f"{_place(name, node)} has half of a surrogate pair in {text}; remove it")
    # Converting a text of n digits to an integer takes time proportional to n^2.
    if node.tag in _NUMBER_TAGS and len(node.value) > _MAX_NUMBER_CHARACTERS:
        raise ConfigError(
            f"{_place(name, node)} has the number {text}; numbers have at most"
            f" {_MAX_NUMBER_CHARACTERS} digits"
        )
    if node.tag not in _CONVERTED_TAGS:
        return
    try:
        value = SafeConstructor().construct_object(node)
    # What PyYAML raises for a text that looks like a date or a number and is none.
    except (ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigError(
            f"{_place(name, node)} has {text}, which is no {_tag(node)[2:]}; write a text in quotes"
        ) from error
    if isinstance(value, int) and value.bit_length() > _MAX_INTEGER_BITS:
        raise ConfigError(
            f"{_place(name, node)} has the integer {text}; integers have at most"
            f" {_MAX_INTEGER_BITS} bits"
        )


def _tag(node: yaml.Node) -> str:
    return shortened(str(node.tag).replace(_PREFIX, "!!"))


def _place(name: str, part: yaml.Node | yaml.Event) -> str:
    return f"{name}:{part.start_mark.line + 1}"
