"""A tokenizer's chat template: rendering, and its generation prompt and end of turn.

Probe conversations are rendered to find out the properties of a template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.data.messages import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that no template contains, so that they can be found in a rendering.
_USER = {"role": "user", "content": "qzuserzq"}
_ANSWER = "qzanswerzq"
_NAME, _KEY, _VALUE = "qznamezq", "qzkeyzq", "qzvaluezq"
_RESULT = {"role": "tool", "name": _NAME, "tool_call_id": "qzidzqabc", "content": "qzresultzq"}
PROBE: tuple[Message, ...] = (_USER, {"role": "assistant", "content": _ANSWER})
"""The shortest conversation that every chat template renders."""


class ChatTemplate:
    """Chat template of a tokenizer.

    Properties from probe conversations are computed on first use and depend on the tokenizer and
    the arguments alone.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Initialize with the values of further variables of the template.

        Raises ConfigError for a variable that the template does not use, or that is not free.
        """
        self.tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        reserved = {*signature(tokenizer.apply_chat_template).parameters, "messages"}
        sources = json.dumps(tokenizer.chat_template or "")
        for name in self._arguments:
            problem = "" if re.search(rf"\b{re.escape(name)}\b", sources) else "does not use"
            if name in {*reserved, *tokenizer.special_tokens_map}:
                problem = "gets from nemo_like"
            if problem:
                raise ConfigError(
                    f"data.chat_template_kwargs has {name!r}, which the chat template of"
                    f" {tokenizer.name_or_path!r} {problem}; remove it, or correct its name"
                )

    @property
    def exists(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def source(self, tools: Sequence[Tool] | None = None) -> str:
        """Return the template of rows with or without tools; empty if there is none.

        A tokenizer may have several templates by name, one of them for tools.
        """
        tool_list: Any = None if tools is None else list(tools)
        try:
            return self.tokenizer.get_chat_template(None, tool_list)
        except ValueError:
            return ""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        opening: bool = False,
    ) -> str:
        """Render the conversation; with `opening` the generation prompt is added.

        Raises ConfigError if the template refuses the messages.
        """
        try:
            return self._render(self._adapt(messages), tools, opening)
        except TemplateError as error:
            raise self._refusal(messages, error) from error

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render: (text, character spans [start, end) of the `{% generation %}` blocks).

        Raises ConfigError if the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tool_list: Any = None if tools is None else list(tools)
        special_tokens: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
        try:
            rendered: Any = render_jinja_template(
                conversations=[self._adapt(messages)],
                tools=tool_list,
                chat_template=self.tokenizer.get_chat_template(None, tool_list),
                return_assistant_tokens_mask=True,
                **special_tokens,
                **self._arguments,
            )
        except Exception as error:
            raise self._refusal(messages, error) from error
        texts, spans = rendered
        return texts[0], spans[0]

    def _refusal(self, messages: Sequence[Message], error: Exception) -> ConfigError:
        """Return the error for a conversation that the template refuses."""
        roles = [message["role"] for message in messages]
        return ConfigError(
            f"the chat template of {self.tokenizer.name_or_path!r} refuses turns of {roles}:"
            f" {error if isinstance(error, TemplateError) else error_text(error)}"
        )

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts that are always tokenized as one token: special tokens and added tokens."""
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        return tuple({*self.tokenizer.all_special_tokens, *added})

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Texts that structure a conversation: special tokens and end-of-turn tokens.

        Added tokens without the special flag, such as `<think>`, may occur in the text of a model
        or a user.
        """
        return tuple(sorted({*self._special, *self.end_texts}))

    @cached_property
    def generation_prompt(self) -> str:
        """Text that the template adds for the model to continue; may be empty."""
        if not self.exists:
            return ""
        try:
            closed = self.render([_USER])
            opened = self.render([_USER], opening=True)
        except ConfigError:
            return ""
        # Without a common prefix the addition cannot be separated from the conversation.
        return opened[len(closed) :] if opened.startswith(closed) else ""

    @cached_property
    def end_of_turn(self) -> str | None:
        """Special tokens that end an assistant's text, for example `<|im_end|>`; None without one.

        They are several where the eos token directly follows others, as in Command R:
        `<|END_RESPONSE|><|END_OF_TURN_TOKEN|>`.
        """
        behind = self._behind(PROBE, _ANSWER)
        first = self._first_special(behind)
        if first is None:
            return None
        tokens = self._token_run(behind[behind.find(first) :])
        if self._eos_text in tokens:
            tokens = tokens[: tokens.index(self._eos_text) + 1]
        else:
            # The tokens before a question begin a turn.
            header = self.opening.partition(str(_USER["content"]))[0]
            others = takewhile(lambda token: token not in header, tokens[1:])
            tokens = [first, *others]
        # What the template writes in every position. Some end only the last turn with a token.
        followed = self._behind((*PROBE, _USER), _ANSWER)
        pairs = zip(tokens, self._token_run(followed.lstrip()), strict=False)
        common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
        return "".join(common or tokens)

    @cached_property
    def end_of_call(self) -> str | None:
        """Special tokens that end a turn with tool calls; None without one."""
        if not self.exists:
            return None
        call = _probe_call("text" if self._wants_text_arguments else "dict")
        behind = self._behind((_USER, call), _VALUE)
        followed = self._behind((_USER, call, _RESULT), _VALUE)
        if followed:
            behind = behind[: self.common_prefix(behind, followed)]
        tokens = [match for match in self.special_pattern.finditer(behind) if match.group()]
        ends = {self._eos_text}
        if self.end_of_turn is not None:
            ends.add(self._token_run(self.end_of_turn)[-1])
        for index, token in enumerate(tokens):
            if token.group() in ends:
                start = index
                while start and tokens[start - 1].end() == tokens[start].start():
                    start -= 1
                return behind[tokens[start].start() : token.end()]
        # Another end than the end of a text; tokens of a prompt begin the next turn.
        last = tokens[-1].group() if tokens else ""
        if last in self._special and behind.rstrip().endswith(last) and last not in self.opening:
            return last
        return None

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """Texts that end an assistant turn: after a text, and after tool calls if different.

        Without a template it is the end-of-sequence token.
        """
        if not self.exists:
            return (self._eos_text,)
        ends = (self.end_of_turn, self.end_of_call)
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The last token of each of `ends`."""
        return tuple(dict.fromkeys(self._token_run(end)[-1] for end in self.ends))

    @cached_property
    def opening(self) -> str:
        """The shortest prompt: a question and the generation prompt."""
        try:
            return self.render([_USER], opening=True) if self.exists else ""
        except ConfigError:
            return ""

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Pattern of `special_texts`; longer texts come first, as one may begin another."""
        texts = sorted(filter(None, self.special_texts), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)))

    def common_prefix(self, left: str, right: str) -> int:
        """Length of the common prefix, which does not end within a special token."""
        size = common_prefix(left, right)
        for text in (left, right):
            for match in self.special_pattern.finditer(text):
                if match.start() < size < match.end():
                    size = match.start()
        return size

    def end_of_tail(self, tail: str, message: Message) -> int:
        """Return the length of the part of `tail` that belongs to the turn of `message`.

        The tail is what the template writes after the texts and calls of the turn.
        """
        ended = {token for end in self.ends for token in self._token_run(end)}
        for match in self.special_pattern.finditer(tail):
            if match.group() in self.opening and match.group() not in ended:
                tail = tail[: match.start()]
                break
        end = self.end_of_turn
        if message.get("tool_calls") and self.end_of_call is not None:
            end = self.end_of_call
        if end is None or end not in tail:
            return len(tail)
        return tail.index(end) + len(end)

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids of `end_texts`."""
        ids = [self.tokenizer.convert_tokens_to_ids(text) for text in self.end_texts]
        return tuple(token_id for token_id in ids if isinstance(token_id, int))

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """True if the template needs the arguments of a tool call as JSON text.

        Most templates convert an object to JSON themselves, and would quote a text again.
        """
        as_object = self._probe_text("dict")
        as_text = self._probe_text("text")
        only_text_is_json = not _shows_json(as_object) and _shows_json(as_text)
        only_text_is_shown = _VALUE not in as_object and _VALUE in as_text
        return only_text_is_json or only_text_is_shown

    @cached_property
    def _needs_content(self) -> bool:
        """True if the template refuses a message with tool calls that has no content."""
        form = "text" if self._wants_text_arguments else "dict"
        try:
            self._render([_USER, _probe_call(form)], None, False)
        except TemplateError:
            return True
        return False

    def _adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Convert tool calls to the form that the template expects."""
        return [
            self._adapt_calls(message) if message.get("tool_calls") else message
            for message in messages
        ]

    def _adapt_calls(self, message: Message) -> Message:
        """Convert the tool calls of one message."""
        calls = message["tool_calls"]
        if self._wants_text_arguments:
            calls = [_with_text_arguments(call) for call in calls]
        content = {"content": ""} if "content" not in message and self._needs_content else {}
        return {**message, **content, "tool_calls": calls}

    def _probe_text(self, form: str) -> str:
        """Render a probe with a tool call; an empty text if the template refuses it."""
        # Some templates require a content beside tool calls, others do not.
        for content in ({}, {"content": ""}):
            try:
                return self._render([_USER, {**_probe_call(form), **content}], None, False)
            except TemplateError:
                continue
        return ""

    @property
    def _eos_text(self) -> str:
        return str(self.tokenizer.eos_token)

    @cached_property
    def _special(self) -> frozenset[str]:
        """Texts of special tokens, without other added tokens."""
        added = self.tokenizer.added_tokens_decoder.values()
        marked = (str(token) for token in added if token.special)
        return frozenset(filter(None, (*self.tokenizer.all_special_tokens, *marked)))

    def _first_special(self, text: str) -> str | None:
        """Return the first special token in `text`, else the first added token, else None."""
        for texts in (self._special, filter(None, self.special_texts)):
            found = [(text.find(each), -len(each), each) for each in texts if each in text]
            if found:
                return min(found)[2]
        return None

    def _token_run(self, text: str) -> list[str]:
        """Return the special and added tokens at the start of `text` that directly follow each
        other.
        """
        tokens = []
        position = 0
        while (match := self.special_pattern.match(text, position)) and match.group():
            tokens.append(match.group())
            position = match.end()
        return tokens

    def _behind(self, messages: Sequence[Message], word: str) -> str:
        """Render and return the text after the last copy of `word`; empty if there is none."""
        try:
            text = self.render(messages) if self.exists else ""
        except ConfigError:
            return ""
        _, found, behind = text.rpartition(word)
        return behind if found else ""

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, opening: bool
    ) -> str:
        """Render messages in the form that the template expects. Raises TemplateError."""
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),  # type: ignore[arg-type]
                tokenize=False,
                add_generation_prompt=opening,
                **self._arguments,
            )
        except TemplateError:
            raise
        except Exception as error:
            # A template is a program: its filters and operators raise exceptions of any type.
            raise TemplateError(error_text(error)) from error
        return str(text)


def _probe_call(form: str) -> Message:
    """Return a message with a tool call whose arguments are JSON text ("text") or an object."""
    arguments: Any = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if form == "text" else arguments}
    call = {"id": "qzidzqabc", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _shows_json(text: str) -> bool:
    """Return True if `text` has the probe's arguments as a JSON object, not quoted again."""
    return f'"{_KEY}":"{_VALUE}"' in "".join(text.split())


def _with_text_arguments(call: Any) -> Any:
    """Convert the arguments of a tool call to JSON text."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def common_prefix(left: str, right: str) -> int:
    """Length of the common prefix."""
    # Bisection over slices: comparing slices is much faster than a loop over characters.
    low = 0
    high = min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
