"""A tokenizer's chat template: rendering, and its generation prompt and end of turn.

Probe conversations are rendered to find out the properties of a template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nemo_like.config.errors import ConfigError
from nemo_like.data.template_limits import rendering_limit
from nemo_like.data.tools import Message, Tool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Texts that no template contains, so that they can be found in a rendering.
_USER = {"role": "user", "content": "qzuserzq"}
_ANSWER = "qzanswerzq"
_NAME, _KEY, _VALUE = "qznamezq", "qzkeyzq", "qzvaluezq"
PROBE: tuple[Message, ...] = (_USER, {"role": "assistant", "content": _ANSWER})
"""The shortest conversation that every chat template renders."""


class ChatTemplate:
    """Chat template of a tokenizer.

    Properties from probe conversations are computed on first use and depend on the tokenizer alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def exists(self) -> bool:
        """True if the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

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
        except (TemplateError, TypeError) as error:
            raise self._refusal(messages, error) from error

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render: (text, character spans [start, end) of the `{% generation %}` blocks).

        Raises ConfigError if the template refuses the messages.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        adapted = self._adapt(messages)
        tool_list: Any = None if tools is None else list(tools)
        try:
            special_tokens: dict[str, Any] = dict(self.tokenizer.special_tokens_map)
            with rendering_limit(repr(self.tokenizer.name_or_path)):
                rendered: Any = render_jinja_template(
                    conversations=[adapted],
                    tools=tool_list,
                    chat_template=self.tokenizer.get_chat_template(None, tool_list),
                    return_assistant_tokens_mask=True,
                    **special_tokens,
                )
        except (TemplateError, TypeError) as error:
            raise self._refusal(messages, error) from error
        texts, spans = rendered
        return texts[0], spans[0]

    def _refusal(self, messages: Sequence[Message], error: Exception) -> ConfigError:
        """Return the error for a conversation that the template refuses."""
        roles = [message["role"] for message in messages]
        return ConfigError(
            f"the chat template of {self.tokenizer.name_or_path!r} refuses turns of {roles}:"
            f" {error}"
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
        added = [
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        ]
        return tuple(sorted({*self.tokenizer.all_special_tokens, *added, *self.end_texts}))

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
        """Special token after an assistant's text, for example `<|im_end|>`; None without one."""
        if not self.exists:
            return None
        try:
            _, found, behind = self.render(PROBE).rpartition(_ANSWER)
        except ConfigError:
            return None
        return self._first_special(behind) if found else None

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """Tokens that end an assistant turn: after a text, and after tool calls if different."""
        ends = [] if self.end_of_turn is None else [self.end_of_turn]
        try:
            text = self.render([_USER, _probe_call("dict")]) if self.exists else ""
        except ConfigError:
            text = ""
        _, found, behind = text.rpartition(_VALUE)
        # Some templates end tool calls with another token than texts.
        if found and not any(end in behind for end in ends):
            last = [special for special in self.special_texts if behind.rstrip().endswith(special)]
            ends += sorted(last, key=len)[-1:]
        return tuple(ends)

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
        message = _probe_call(form)
        try:
            self._render([_USER, message], None, False)
        except (TemplateError, TypeError):
            return True
        return False

    def _adapt(self, messages: Sequence[Message]) -> list[Message]:
        """Convert tool calls to the form that the template expects."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
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
        return {
            **message,
            **content,
            "tool_calls": calls,
        }

    def _probe_text(self, form: str) -> str:
        """Render a probe with a tool call; an empty text if the template refuses it."""
        # Some templates require a content beside tool calls, others do not.
        for content in ({}, {"content": ""}):
            try:
                return self._render([_USER, {**_probe_call(form), **content}], None, False)
            except (TemplateError, TypeError):
                continue
        return ""

    def _first_special(self, text: str) -> str | None:
        """Return the first special token in `text`, else the first added token, else None."""
        special = [
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        ]
        for texts in ({*self.tokenizer.all_special_tokens, *special}, self.special_texts):
            found = [(text.find(each), -len(each), each) for each in texts if each and each in text]
            if found:
                return min(found)[2]
        return None

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        opening: bool,
    ) -> str:
        with rendering_limit(repr(self.tokenizer.name_or_path)):
            return str(
                self.tokenizer.apply_chat_template(
                    list(messages),
                    tools=None if tools is None else list(tools),  # type: ignore[arg-type]
                    tokenize=False,
                    add_generation_prompt=opening,
                )
            )


def _probe_call(form: str) -> Message:
    """Return a message with a tool call whose arguments are JSON text ("text") or an object."""
    arguments: Any = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if form == "text" else arguments}
    call = {
        "id": "qzidzqabc",
        "type": "function",
        "function": function,
    }
    return {"role": "assistant", "tool_calls": [call]}


def _shows_json(text: str) -> bool:
    """Return True if `text` has the probe's arguments as a JSON object, not quoted again."""
    return f'"{_KEY}":"{_VALUE}"' in "".join(text.split())


def _with_text_arguments(call: Any) -> Any:
    """Convert the arguments of a tool call to JSON text."""
    function = call["function"]
    if isinstance(function["arguments"], str):
        return call
    return {
        **call,
        "function": {
            **function,
            "arguments": json.dumps(function["arguments"], ensure_ascii=False),
        },
    }
