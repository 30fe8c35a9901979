"""A limit on what `${key}` expands to: values that each refer twice to the next one grow
exponentially.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from nemo_like.config.errors import ConfigError

MAX_EXPANDED_CHARACTERS = 1_000_000
_NAME = re.compile(r"[A-Za-z_]\w*")


def check_interpolations(plain: Any) -> None:
    """Raises ConfigError if resolving all interpolations of a nested config could take more than
    the limit.

    A reference is known by its last name only, and stands for every value below a key of that name,
    so the estimate is never too low. References in a circle are left to the resolver, which names
    them.
    """
    texts: dict[str, list[str]] = {}
    for names, text in _leaves(plain, ()):
        for name in dict.fromkeys(names):
            texts.setdefault(name, []).append(text)
    sizes: dict[str, int] = {}

    def size_of(name: str, ancestors: frozenset[str]) -> int:
        if name in ancestors:
            return 0
        if name not in sizes:
            total = 0
            for text in texts[name]:
                total += len(text) + 20
                if "${" in text:
                    inner = ancestors | {name}
                    total += sum(
                        size_of(found, inner) for found in _NAME.findall(text) if found in texts
                    )
                if total > MAX_EXPANDED_CHARACTERS:
                    break
            sizes[name] = total
        return sizes[name]

    for name in texts:
        if size_of(name, frozenset()) > MAX_EXPANDED_CHARACTERS:
            raise ConfigError(
                f"{name} expands to more than {MAX_EXPANDED_CHARACTERS:,} characters through"
                f" ${{...}} references to values"
                " that hold such references themselves"
            )


def _leaves(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(names of the keys above it, text) of every text in a nested value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*names, str(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, names)
    elif isinstance(value, str):
        yield names, value
