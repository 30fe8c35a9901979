"""Facts about a chat template per conversation structure, learned from a probe conversation.

The structure is the sequence of roles and kinds of messages. Two facts need more than one
rendering: whether the template renders every message, and which texts surround the assistant turns.
Every text of the probe conversation is a distinct word, so that it can be found in the rendering.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_check import REASONING_KEYS
from nemo_like.data.chat_spans import Span, common_prefix, exact_spans
from nemo_like.data.chat_template import PROBE, ChatTemplate
from nemo_like.data.tools import Message, Tool

_MAX_STRUCTURES = 4096
"""Number of structures at which the cache is cleared."""
_REPEATED = re.compile(r"(.{1,4}?)\1{2,}", re.DOTALL)
_TOOL = "qztoolzq"
_THOUGHT = "qzthoughtzq"

Kind = tuple[str, bool, bool, bool, int, bool]
"""(role, has content, has `</think>` in it, has a reasoning key, number of tool calls, names a
call)"""


@dataclass(frozen=True)
class Frame:
    r"""Texts that surround an assistant turn.

    Example: `<|im_start|>assistant\n` and `<|im_end|>`.
    """

    header: str
    rest: str
    """Text of the generation prompt after the header that not every finished turn has
    (`<think>\\n`).
    """
    end: str
    markers: tuple[str, ...]
    """Texts that make the frame ambiguous if a message contains one of them."""

    def spans(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        full: str,
    ) -> list[Span] | None:
        """Return the spans of `exact_spans` from the text alone, or None if they are ambiguous."""
        written = json.dumps([messages, tools], ensure_ascii=False, default=str)
        if any(marker in written for marker in self.markers):
            return None
        headers = [match.end() for match in re.finditer(re.escape(self.header), full)]
        # Another number of headers means that a message or the template repeats the header.
        if len(headers) != sum(message["role"] == "assistant" for message in messages):
            return None
        spans: list[Span] = []
        limits = [*(start - len(self.header) for start in headers[1:]), len(full)]
        for header_end, limit in zip(headers, limits[: len(headers)], strict=True):
            start = header_end
            # The generation prompt has this text already, so it is no part of the answer.
            if self.rest and full.startswith(self.rest, start):
                start += len(self.rest)
            end = full.find(self.end, start)
            if end < 0 or end + len(self.end) > limit:
                return None
            spans.append((start, end + len(self.end)))
        return spans


@dataclass(frozen=True)
class Facts:
    """Facts about all conversations of one structure."""

    dropped: str | None
    """Description of the first text that the template does not render; None if it renders all or
    refuses the probe conversation.
    """
    frame: Frame | None
    """None if the exact method is needed to find the spans."""


class Structures:
    """Cache of the facts of every structure seen so far, for one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._facts: dict[tuple[tuple[Kind, ...], bool], Facts] = {}

    def facts(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Facts:
        """Return the facts of a conversation, which depend on its structure alone."""
        key = _compressed(tuple(map(_kind, messages))), bool(tools)
        found = self._facts.get(key)
        if found is None:
            if len(self._facts) >= _MAX_STRUCTURES:
                self._facts.clear()
            found = self._facts[key] = self._learn(*key)
        return found

    def _learn(self, kinds: tuple[Kind, ...], has_tools: bool) -> Facts:
        """Render the probe conversation of a structure and derive its facts."""
        messages, words = _distinct_words(kinds)
        tools = [_tool()] if has_tools else None
        try:
            full = self._template.render(messages, tools)
        except ConfigError:
            return Facts(None, None)
        # The words are distinct, so each proves that its own message is rendered.
        missing = [what for word, what in words if word not in full]
        if has_tools and _TOOL not in full:
            missing.append("the row's tools")
        return Facts(missing[0] if missing else None, self._verified_frame(messages, tools, full))

    def _verified_frame(
        self,
        messages: list[Message],
        tools: list[Tool] | None,
        full: str,
    ) -> Frame | None:
        """Return the frame if it gives the exact spans of the probe conversation, else None."""
        frame = learn_frame(self._template)
        if frame is None:
            return None
        try:
            is_exact = frame.spans(messages, tools, full) == exact_spans(
                self._template, messages, tools, full
            )
        except ConfigError:
            return None
        return frame if is_exact else None


def learn_frame(template: ChatTemplate) -> Frame | None:
    """Learn the texts around an answer from the shortest conversation; None if ambiguous."""
    end = template.end_of_turn
    user = PROBE[0]
    if end is None:
        return None
    try:
        full = template.render(PROBE)
        closed = template.render([user])
        opened = template.render([user], opening=True)
    except ConfigError:
        return None
    prompt = template.generation_prompt
    if prompt:
        size = common_prefix(prompt, full[len(closed) :]) if full.startswith(closed) else 0
        header = prompt[:size]
    else:
        header = opened.rpartition(user["content"])[2]
    special = [text for text in template.special_texts if text and text in header]
    marker = min(special, key=header.find) if special else header.strip()
    markers = (marker, end)
    # `Frame.spans` searches for markers in JSON text, so they must not need escapes.
    if not marker or any(json.dumps(each, ensure_ascii=False)[1:-1] != each for each in markers):
        return None
    return Frame(header, prompt[len(header) :], end, markers)


def _kind(message: Message) -> Kind:
    """Return the kind of a message."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    return (
        message["role"],
        bool(text.strip()),
        message["role"] == "assistant" and "</think>" in text,
        any(isinstance(message.get(key), str) and message[key] for key in REASONING_KEYS),
        min(len(message.get("tool_calls", ())), 3),
        "tool_call_id" in message or "name" in message,
    )


def _compressed(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Shorten runs of a repeated sequence of up to 4 kinds to two repetitions.

    Templates treat long dialogues like short ones, and the cache has fewer entries.
    """
    # One character per kind, so that a regular expression finds repetitions.
    distinct = list(dict.fromkeys(kinds))
    text = "".join(chr(0x100 + distinct.index(kind)) for kind in kinds)
    text = _REPEATED.sub(r"\1\1", text)
    return tuple(distinct[ord(letter) - 0x100] for letter in text)


def _distinct_words(kinds: Sequence[Kind]) -> tuple[list[Message], list[tuple[str, str]]]:
    """Build a conversation of these kinds in which every text is a distinct word.

    Returns (messages, (word, description) of each text).
    """
    messages: list[Message] = []
    words: list[tuple[str, str]] = []
    open_calls: list[str] = []
    for turn, (role, has_content, has_thought, has_reasoning, num_calls, names_call) in enumerate(
        kinds
    ):
        message: Message = {"role": role}
        if has_content:
            word = f"qz{turn}contentzq"
            message["content"] = (
                f"<think>\n{_THOUGHT}{turn}\n</think>\n\n{word}" if has_thought else word
            )
            words.append((word, f"the content of a message of role {role!r}"))
        elif not num_calls:
            message["content"] = ""
        if has_reasoning:
            message["reasoning_content"] = f"{_THOUGHT}{turn}"
        if num_calls:
            calls = [_call(turn, index) for index in range(num_calls)]
            message["tool_calls"] = calls
            open_calls += [call["id"] for call in calls]
            for call in calls:
                ((key, value),) = call["function"]["arguments"].items()
                words += [(word, "a tool call") for word in (call["function"]["name"], key, value)]
        if names_call:
            message |= {
                "name": "qznamezq",
                "tool_call_id": open_calls.pop(0) if open_calls else "qzid00000",
            }
        messages.append(message)
    return messages, words


def _call(turn: int, index: int) -> Message:
    """Return a tool call of distinct words."""
    arguments = {f"qz{turn}k{index}zq": f"qz{turn}v{index}zq"}
    function = {"name": f"qz{turn}f{index}zq", "arguments": arguments}
    return {
        "id": f"qzid{turn % 1000:03d}{index:02d}",
        "type": "function",
        "function": function,
    }


def _tool() -> Tool:
    """Return a tool schema of distinct words."""
    parameters = {
        "type": "object",
        "properties": {"qzparameterzq": {"type": "string", "description": "qzwhatzq"}},
    }
    function = {
        "name": _TOOL,
        "description": "qzdescriptionzq",
        "parameters": {**parameters, "required": []},
    }
    return {"type": "function", "function": function}
