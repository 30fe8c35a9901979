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
from typing import NamedTuple

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_check import REASONING_KEYS
from nemo_like.data.chat_spans import Span, exact_spans
from nemo_like.data.chat_template import PROBE, ChatTemplate, common_prefix
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
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, full: str
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


class Word(NamedTuple):
    """A text of a probe conversation."""

    text: str
    turn: int
    what: str
    """Description for error messages."""


@dataclass(frozen=True)
class Facts:
    """Facts about all conversations of one structure."""

    dropped: str | None
    """Description of the first text that the template does not render; None if it renders all or
    refuses the probe conversation.
    """
    frame: Frame | None
    """None if the exact method is needed to find the spans."""
    misplaced: str | None = None
    """Description of the first text that the template writes in the wrong turn."""
    drops_call_texts: bool = False
    """True if the template drops the text beside a tool call once there is a later answer: it is
    reasoning to the template (gpt-oss).
    """


class Structures:
    """Cache of the facts of every structure seen so far, for one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._facts: dict[tuple[tuple[Kind, ...], bool], Facts] = {}

    def facts(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> Facts:
        """Return the facts of a conversation, which depend on its structure alone."""
        kinds = _compressed(tuple(map(_kind, messages)))
        key = (kinds, bool(tools))
        if key not in self._facts:
            # A data set has few structures; the limit bounds the memory for an unusual one.
            if len(self._facts) >= _MAX_STRUCTURES:
                self._facts.clear()
            self._facts[key] = self._learn(*key)
        return self._facts[key]

    def _learn(self, kinds: tuple[Kind, ...], has_tools: bool) -> Facts:
        """Render the probe conversation of a structure and derive its facts."""
        messages, words = _distinct_words(kinds)
        tools = [_tool()] if has_tools else None
        try:
            full = self._template.render(messages, tools)
        except ConfigError:
            return Facts(None, None)
        # The words are distinct, so each proves that its own message is rendered.
        missing = [word for word in words if word.text not in full]
        reasoning = [word for word in missing if self._is_reasoning(messages, tools, word)]
        dropped = [word.what for word in missing if word not in reasoning]
        if has_tools and _TOOL not in full:
            dropped.append("the row's tools")
        try:
            exact = exact_spans(self._template, messages, tools, full)
        except ConfigError:
            return Facts(dropped[0] if dropped else None, None)
        frame = learn_frame(self._template)
        # The fast method is only used for a structure for which it was verified once.
        if frame is not None and frame.spans(messages, tools, full) != exact:
            frame = None
        return Facts(
            dropped[0] if dropped else None,
            frame,
            misplaced=_misplaced(messages, words, full, exact),
            drops_call_texts=bool(reasoning),
        )

    def _is_reasoning(self, messages: list[Message], tools: list[Tool] | None, word: Word) -> bool:
        """Return True for a text beside a call that the template drops because of later turns."""
        message = messages[word.turn]
        is_text = message.get("content") == word.text and "tool_calls" in message
        if not is_text or word.turn + 1 == len(messages):
            return False
        try:
            return word.text in self._template.render(messages[: word.turn + 1], tools)
        except ConfigError:
            return False


def _misplaced(
    messages: Sequence[Message], words: Sequence[Word], full: str, spans: Sequence[Span]
) -> str | None:
    """Describe the first text that is in the span of another turn, or not in that of its own."""
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    parts = {turn: full[start:end] for turn, (start, end) in zip(turns, spans, strict=True)}
    for word in words:
        is_outside = word.turn in parts and word.text in full and word.text not in parts[word.turn]
        others = [turn for turn in parts if turn != word.turn and word.text in parts[turn]]
        if is_outside or others:
            return word.what
    return None


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
        # A finished turn may lack the end of the generation prompt, such as an open think block.
        size = 0
        if full.startswith(closed):
            size = common_prefix(prompt, full[len(closed) :])
        header = prompt[:size]
    else:
        _, _, header = opened.rpartition(user["content"])
    # A control token is the safest marker: no tokenizer produces it from plain text.
    special = [text for text in template.special_texts if text and text in header]
    marker = min(special, key=header.find) if special else header.strip()
    if not marker:
        return None
    markers = (marker, end)
    for text in markers:
        # `Frame.spans` searches for markers in JSON text, so they must not need escapes.
        if json.dumps(text, ensure_ascii=False) != f'"{text}"':
            return None
    return Frame(header, prompt[len(header) :], end, markers)


def _kind(message: Message) -> Kind:
    """Return the kind of a message."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    is_assistant = message["role"] == "assistant"
    reasoning = [message.get(key) for key in REASONING_KEYS]
    # Templates treat three calls like more of them.
    num_calls = min(len(message.get("tool_calls", ())), 3)
    return (
        message["role"],
        bool(text.strip()),
        is_assistant and "</think>" in text,
        any(isinstance(value, str) and value for value in reasoning),
        num_calls,
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


def _distinct_words(kinds: Sequence[Kind]) -> tuple[list[Message], list[Word]]:
    """Build a conversation of these kinds in which every text is a distinct word."""
    messages: list[Message] = []
    words: list[Word] = []
    open_calls: list[str] = []
    for turn, kind in enumerate(kinds):
        role, has_content, has_thought, has_reasoning, num_calls, names_call = kind
        message: Message = {"role": role}
        if has_content:
            word = f"qz{turn}contentzq"
            message["content"] = word
            if has_thought:
                # Templates may remove thoughts, so only the word after them must be rendered.
                message["content"] = f"<think>\n{_THOUGHT}{turn}\n</think>\n\n{word}"
            words.append(Word(word, turn, f"the content of a message of role {role!r}"))
        elif not num_calls:
            # A message with calls may lack the key, which some templates distinguish.
            message["content"] = ""
        if has_reasoning:
            message["reasoning_content"] = f"{_THOUGHT}{turn}"
        if num_calls:
            calls = [_call(turn, index) for index in range(num_calls)]
            message["tool_calls"] = calls
            open_calls += [call["id"] for call in calls]
            for call in calls:
                function = call["function"]
                ((key, value),) = function["arguments"].items()
                for word in (function["name"], key, value):
                    words.append(Word(word, turn, "a tool call"))
        if names_call:
            # Some templates check that a result refers to a call before it.
            message["name"] = "qznamezq"
            message["tool_call_id"] = open_calls.pop(0) if open_calls else "qzid00000"
        messages.append(message)
    return messages, words


def _call(turn: int, index: int) -> Message:
    """Return a tool call of distinct words."""
    arguments = {f"qz{turn}k{index}zq": f"qz{turn}v{index}zq"}
    function = {"name": f"qz{turn}f{index}zq", "arguments": arguments}
    return {"id": f"qzid{turn % 1000:03d}{index:02d}", "type": "function", "function": function}


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
