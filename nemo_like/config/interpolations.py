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
    """Raise ConfigError if resolving all interpolations of a nested config could exceed the limit.

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
                # The constant stands for quotes and separators around a value.
                total += len(text) + 20
                if "${" in text:
                    inner = ancestors | {name}
                    # Every word may be a reference: the estimate may be too high, never too low.
                    for found in _NAME.findall(text):
                        if found in texts:
                            total += size_of(found, inner)
                # Stopping early bounds the time of this check itself.
                if total > MAX_EXPANDED_CHARACTERS:
                    break
            sizes[name] = total
        return sizes[name]

    for name in texts:
        if size_of(name, frozenset()) > MAX_EXPANDED_CHARACTERS:
            raise ConfigError(
                f"{name} expands to more than {MAX_EXPANDED_CHARACTERS:,} characters through"
                " ${...} references to values that contain such references themselves"
            )


def _leaves(value: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (names of the keys above it, text) of every text in a nested value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, (*names, str(name)))
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, names)
    elif isinstance(value, str):
        yield names, value
