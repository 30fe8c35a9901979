"""Check that a rendered conversation contains everything in its messages.

A chat template may silently drop what it does not support.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.data.tools import Message, Tool, tool_name

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_THINK, _END_THINK = "<think>", "</think>"
_WAY_OUT = "give a policy.chat_template that renders it, or remove it from the row"


def check_rendered(
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    text: str,
    *,
    trains: bool,
    drops_call_texts: bool = False,
) -> None:
    """Raise ConfigError if a content, a tool call or a tool does not appear in `text`.

    White space is not compared. Strings may be escaped as in JSON, and a tool's JSON result may be
    written anew. Templates drop the reasoning of earlier turns, of which the text beside a tool
    call is a part with `drops_call_texts`; with `trains` that of the last assistant turn must be
    there, as it is learned.
    """
    # Each part is first searched after the previous one; some templates change the order.
    squeezed = _squeeze(text)
    parts = list(_parts(messages, trains=trains, drops_call_texts=drops_call_texts))
    position = 0
    for index, (message, what, part) in enumerate(parts):
        found = _find(part, squeezed, position)
        if found is not None:
            position = found
            continue
        texts = [text for _, _, text in parts]
        if _appears_often_enough(texts, index, squeezed):
            continue
        if not _is_rewritten(message, part, squeezed):
            raise ConfigError(
                f"the chat template drops the {what} of a message of role {message['role']!r},"
                f" {_shown(part)}: it does not appear in the rendered text; {_WAY_OUT}"
            )
    for message in messages:
        for call in message.get("tool_calls", ()):
            _check_call(call["function"], squeezed)
    for tool in tools or ():
        if not _has(str(tool_name(tool)), squeezed):
            raise ConfigError(
                f"the chat template drops the tool {tool_name(tool)!r} of the row's tools: it does"
                f" not appear in the rendered text; {_WAY_OUT}"
            )


def _parts(
    messages: Sequence[Message], *, trains: bool, drops_call_texts: bool
) -> Iterator[tuple[Message, str, str]]:
    """Yield (message, kind of text, text) of everything that must be rendered, in order."""
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, message in enumerate(messages):
        content = message.get("content")
        content = content if isinstance(content, str) else ""
        # Templates drop the reasoning of earlier turns; only that of the last one is trained.
        is_last = trains and bool(answers) and turn == answers[-1]
        if is_last:
            for key in REASONING_KEYS:
                if isinstance(message.get(key), str):
                    yield message, key, message[key]
        if message["role"] == "assistant" and _END_THINK in content:
            reasoning, _, content = content.rpartition(_END_THINK)
            if is_last:
                yield message, "reasoning", reasoning.strip().removeprefix(_THINK)
        is_reasoning = drops_call_texts and "tool_calls" in message and not is_last
        if not is_reasoning:
            yield message, "content", content


def _check_call(function: dict[str, Any], squeezed: str) -> None:
    """Raise ConfigError if the name or an argument of a tool call is not in the text."""
    arguments = function.get("arguments", {})
    leaves = [arguments] if isinstance(arguments, str) else list(_leaves(arguments))
    for leaf in (function["name"], *leaves):
        if not _has(leaf, squeezed):
            raise ConfigError(
                f"the chat template drops a part of the call of the tool {function['name']!r},"
                f" {_shown(leaf)}: it does not appear in the rendered text; {_WAY_OUT}"
            )


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys and values of a JSON value as text.

    true, false and null are skipped, because templates write them in different ways.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def _is_rewritten(message: Message, part: str, squeezed: str) -> bool:
    """Return True if `part` is JSON whose leaves all appear, in a message of another role.

    Templates reformat the JSON results of tools.
    """
    # An assistant's text is trained, so it must appear unchanged.
    if message["role"] == "assistant":
        return False
    try:
        value = json.loads(part)
    except (ValueError, RecursionError):
        return False
    leaves = list(_leaves(value)) if isinstance(value, dict | list) else []
    return bool(leaves) and all(_has(leaf, squeezed) for leaf in leaves)


def _appears_often_enough(parts: Sequence[str], index: int, squeezed: str) -> bool:
    """Return True if the text has as many copies of a part as all parts together, in any order."""
    own = _squeeze(parts[index])
    needed = sum(_squeeze(part).count(own) for part in parts)
    return any(squeezed.count(form) >= needed for form in _forms(parts[index]))


def _find(part: str, squeezed: str, position: int) -> int | None:
    """Return the end of the first copy of `part` at or after `position`, or None."""
    for form in _forms(part):
        found = squeezed.find(form, position)
        if found >= 0:
            return found + len(form)
    return None


def _has(text: str, squeezed: str) -> bool:
    """Return True if a form of `text` is in the squeezed text."""
    return any(form in squeezed for form in _forms(text))


def _forms(text: str) -> Iterator[str]:
    """Yield `text` unchanged and escaped as in JSON, without white space."""
    yield _squeeze(text)
    # Templates with `tojson` escape quotes and line breaks, and some all other than ASCII.
    for ensure_ascii in (False, True):
        quoted = json.dumps(text, ensure_ascii=ensure_ascii)
        yield _squeeze(quoted[1:-1])


def _squeeze(text: str) -> str:
    """Remove white space, which templates change."""
    return "".join(text.split())


def _shown(text: str) -> str:
    """Format a text for an error message, shortened."""
    text = " ".join(text.split())
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
