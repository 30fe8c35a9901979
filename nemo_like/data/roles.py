"""Roles of messages: a role that no chat template expects would be trained as plain text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import shown_value

ROLES = ("system", "user", "assistant", "tool")
MEANT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "ipython": "tool",
}
"""Roles of other formats -> the role here. ShareGPT's `from` has them."""
_QUOTED = re.compile(r"""(['"])([\w-]+)\1""")


def template_roles(chat_template: object) -> frozenset[str]:
    """Return the roles that messages may have: `ROLES` and the quoted words of the template.

    A template names the roles that it renders in a special way, such as `developer` or `ipython`;
    it writes any other role as it is, which no model has seen.
    """
    source = chat_template if isinstance(chat_template, str) else ""
    return frozenset((*ROLES, *(match.group(2) for match in _QUOTED.finditer(source))))


def check_roles(messages: Sequence[Mapping[str, Any]], known: Collection[str]) -> None:
    """Raise ConfigError for roles not in `known`, with the roles to write instead."""
    unknown = [message["role"] for message in messages if message["role"] not in known]
    if unknown:
        raise ConfigError(
            f"{unknown_roles(unknown)}; the role of a message is {', '.join(ROLES)} or one that the"
            " chat template names"
        )


def unknown_roles(roles: Iterable[str]) -> str:
    """Describe roles outside of `ROLES` with those that are meant; empty if there are none.

    Example: `unknown roles 'human' (write user), 'gpt' (write assistant)`.
    """
    shown = []
    for role in dict.fromkeys(roles):
        if role not in ROLES:
            meant = MEANT.get(role.strip().lower())
            shown.append(f"{shown_value(role)}{f' (write {meant})' if meant else ''}")
    noun = "role" if len(shown) == 1 else "roles"
    return f"unknown {noun} {', '.join(shown[:10])}" if shown else ""
