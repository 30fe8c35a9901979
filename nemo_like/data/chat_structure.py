"""Assistant turns in a rendered conversation, and what a chat template leaves out.

A span begins after the generation prompt and ends after the token that ends the turn. The exact
method renders a conversation several times per turn and compares the texts. Its result for a probe
conversation, in which every text is a distinct word, gives the facts about all conversations of one
structure, the sequence of roles and kinds of messages: which texts the template does not render,
and which texts surround the assistant turns. With them one rendering is enough.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat_template import PROBE, ChatTemplate, common_prefix
from nemo_like.data.messages import Message, Tool

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MAX_STRUCTURES = 4096
"""Number of structures at which the cache is cleared."""
_REPEATED = re.compile(r"(.{1,4}?)\1{2,}", re.DOTALL)
_TOOL = "qztoolzq"
_THOUGHT = "qzthoughtzq"


class Kind(NamedTuple):
    """What the rendering of a message depends on, apart from its texts."""

    role: str
    has_content: bool
    thought: Literal["none", "empty", "text"]
    """What is before `</think>` in the content of an assistant turn."""
    reasoning_key: str | None
    """The key of `REASONING_KEYS` that it has."""
    num_calls: int
    """Number of tool calls; templates treat three like more of them."""
    names_call: bool


def exact_spans(
    template: ChatTemplate, messages: Sequence[Message], tools: Sequence[Tool] | None, full: str
) -> list[Span]:
    """Find the span of each assistant turn in `full`, the rendered conversation, in order.

    Raises ConfigError for a turn that cannot be found.
    """
    spans: list[Span] = []
    for turn, message in enumerate(messages):
        if message["role"] == "assistant":
            # A turn is searched after the previous one: equal texts may occur several times.
            _, behind = spans[-1] if spans else (0, 0)
            spans.append(_Turn(template, messages, tools, full, turn, behind).span())
    return spans


class _Turn:
    """One assistant turn of a rendered conversation."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        full: str,
        turn: int,
        behind: int,
    ) -> None:
        self._template = template
        self._messages = list(messages)
        self._tools = tools
        self._full = full
        self._turn = turn
        self._behind = behind
        """End of the previous assistant turn in `full`."""

    def span(self) -> Span:
        """Return the span of the turn. Raises ConfigError if it cannot be found."""
        start = self._start()
        end = self._end()
        if not self._behind <= start < end:
            raise ConfigError(
                f"turn {self._turn} of the conversation cannot be found in what the chat template"
                f" renders; mark it in the "
                "template with {% generation %}, or set data.train_on=all"
            )
        return start, end

    def _start(self) -> int:
        """Find the end of the generation prompt before the turn, else the start of the turn's text.

        Some templates end the generation prompt with text that a finished turn does not have
        (`<think>` in DeepSeek-R1), or render earlier turns differently once there are later ones.
        Then the header is the common prefix with conversations that have another message here.
        """
        full = self._full
        turn = self._turn
        prompt = self._template.generation_prompt
        # Many templates cannot render an empty conversation.
        if turn:
            opening = self._template.render(self._messages[:turn], self._tools, opening=True)
            if full.startswith(opening):
                # Some templates write the header of a turn, but no prompt, after a tool's result.
                size = self._template.common_prefix(full[len(opening) :], prompt)
                is_header = not opening.endswith(prompt) and size > 0
                return len(opening) + (size if is_header else 0)
        start = min(self._template.common_prefix(full, other) for other in self._with_others())
        if not prompt:
            # A space that the prompt does not have is generated (Mistral).
            has_space = self._template.opening[-1:].isspace()
            return start if has_space else len(full[:start].rstrip())
        # The text of the turn may begin like the prompt, so the last copy is taken.
        found = full.rfind(prompt, self._behind, start + len(prompt))
        return start if found < 0 else found + len(prompt)

    def _end(self) -> int:
        """Find the end of the turn after its text, including the tokens that end it."""
        num_messages = self._turn + 1
        last = self._template.render(self._messages[:num_messages], self._tools)
        end = self._text_end(last, num_messages)
        tail = last[end:]
        if not self._full.startswith(last):
            # Some templates render a turn differently once it is not the last: they drop its
            # reasoning, or end it with another token.
            end = self._text_end(self._full, None)
            tail = tail[: self._template.common_prefix(tail, self._full[end:])]
        return end + self._template.end_of_tail(tail, self._messages[self._turn])

    def _text_end(self, rendered: str, num_messages: int | None) -> int:
        """Find the end of the turn's own text and calls in the rendering of the first messages."""
        return max(
            len(rendered) - common_suffix(rendered, self._with_text(letter, num_messages))
            for letter in ("0", "1")
        )

    def _with_others(self) -> list[str]:
        """Render the conversation with two other texts in place of this turn.

        The texts begin differently, so at least one differs from this turn at its first character.
        """
        texts = []
        before = self._messages[: self._turn]
        after = self._messages[self._turn + 1 :]
        # A result needs the call before it, so the messages up to the next question go as well.
        users = [index for index, message in enumerate(after) if message["role"] == "user"]
        for letter in ("0", "1"):
            other = {"role": "assistant", "content": letter * 2}
            try:
                texts.append(self._template.render([*before, other, *after], self._tools))
            except ConfigError:
                following = after[users[0] :] if users else []
                texts.append(self._template.render([*before, other, *following], self._tools))
        return texts

    def _with_text(self, letter: str, num_messages: int | None) -> str:
        """Render the first messages with another content and other arguments in this turn."""
        message = dict(self._messages[self._turn])
        calls = message.get("tool_calls")
        if message.get("content") or not calls:
            message["content"] = letter * 2
        if calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": {letter: letter}}}
                for call in calls
            ]
        messages = [*self._messages[: self._turn], message, *self._messages[self._turn + 1 :]]
        return self._template.render(messages[:num_messages], self._tools)


def common_suffix(left: str, right: str) -> int:
    """Length of the common suffix."""
    return common_prefix(left[::-1], right[::-1])


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
            # The generation prompt has this text already, so it is not part of the answer.
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
    dropped_reasoning: str | None
    """The same for the reasoning of the last assistant turn, which is trained. Templates drop the
    reasoning of earlier turns.
    """
    frame: Frame | None
    """None if the exact method is needed to find the spans."""
    misplaced: str | None = None
    """Description of the first text that the template writes in the wrong turn."""


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
            return Facts(None, None, None)
        # The words are distinct, so each proves that its own message is rendered.
        missing = [word for word in words if word.text not in full]
        dropped = [
            word.what for word in missing if not self._is_earlier_reasoning(messages, tools, word)
        ]
        if has_tools and _TOOL not in full:
            dropped.append("the row's tools")
        answers = [turn for turn, kind in enumerate(kinds) if kind.role == "assistant"]
        dropped_reasoning = None
        if answers:
            thought = f"{_THOUGHT}{answers[-1]}"
            if thought in str(messages[answers[-1]]) and thought not in full:
                dropped_reasoning = "the reasoning of the last assistant turn"
        first_dropped = dropped[0] if dropped else None
        try:
            exact = exact_spans(self._template, messages, tools, full)
        except ConfigError:
            return Facts(first_dropped, dropped_reasoning, None)
        frame = learn_frame(self._template)
        # The fast method is only used for a structure for which it was verified once.
        if frame is not None and frame.spans(messages, tools, full) != exact:
            frame = None
        misplaced = _misplaced(messages, words, full, exact)
        return Facts(first_dropped, dropped_reasoning, frame, misplaced)

    def _is_earlier_reasoning(
        self, messages: list[Message], tools: list[Tool] | None, word: Word
    ) -> bool:
        """Return True for a text beside a call that the template drops because of later turns.

        It is reasoning to the template (gpt-oss).
        """
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
    """Describe the first text that is in the span of another turn, or outside its own span."""
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
    thought: Literal["none", "empty", "text"] = "none"
    if message["role"] == "assistant" and "</think>" in text:
        before = text.rpartition("</think>")[0].replace("<think>", "")
        thought = "text" if before.strip() else "empty"
    keys = [key for key in REASONING_KEYS if isinstance(message.get(key), str) and message[key]]
    return Kind(
        role=message["role"],
        has_content=bool(text.strip()),
        thought=thought,
        reasoning_key=keys[0] if keys else None,
        num_calls=min(len(message.get("tool_calls", ())), 3),
        names_call="tool_call_id" in message or "name" in message,
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
        message: Message = {"role": kind.role}
        thought = f"{_THOUGHT}{turn}"
        if kind.has_content:
            word = f"qz{turn}contentzq"
            message["content"] = word
            if kind.thought != "none":
                # Templates may remove thoughts, so only the word after them must be rendered.
                inner = thought if kind.thought == "text" else ""
                message["content"] = f"<think>\n{inner}\n</think>\n\n{word}"
            words.append(Word(word, turn, f"the content of a message of role {kind.role!r}"))
        elif not kind.num_calls:
            # A message with calls may lack the key, which some templates distinguish.
            message["content"] = ""
        if kind.reasoning_key is not None:
            message[kind.reasoning_key] = thought
        if kind.num_calls:
            calls = [_call(turn, index) for index in range(kind.num_calls)]
            message["tool_calls"] = calls
            open_calls += [call["id"] for call in calls]
            for call in calls:
                function = call["function"]
                ((key, value),) = function["arguments"].items()
                for word in (function["name"], key, value):
                    words.append(Word(word, turn, "a tool call"))
        if kind.names_call:
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
