"""A tokenizer's chat template: rendering, and what probe conversations tell about it (generation
prompt, end of turn).
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

_USER = {"role": "user", "content": "qzuserzq"}
_ANSWER = "qzanswerzq"
_NAME, _KEY, _VALUE = "qznamezq", "qzkeyzq", "qzvaluezq"
PROBE: tuple[Message, ...] = (_USER, {"role": "assistant", "content": _ANSWER})
"""The shortest conversation that every chat template renders."""


class ChatTemplate:
    """Renders conversations with the chat template of a tokenizer.

    Everything learned from probe conversations is computed on first use and depends on the
    tokenizer alone.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @property
    def exists(self) -> bool:
        return bool(self.tokenizer.chat_template)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        *,
        opening: bool = False,
    ) -> str:
        """The text of the conversation; with `opening`, the generation prompt of the next assistant
        turn follows it.

        Raises ConfigError if the template refuses the messages.
        """
        try:
            return self._render(self._adapt(messages), tools, opening)
        except (TemplateError, TypeError) as error:
            raise self._refusal(messages, error) from error

    def render_marked(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of the conversation, and the characters [start, end) that `{% generation %}`
        blocks render.

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
        roles = [message["role"] for message in messages]
        return ConfigError(
            f"the chat template of {self.tokenizer.name_or_path!r} refuses turns of {roles}:"
            f" {error}"
        )

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts that the tokenizer turns into one token wherever they appear: special tokens and
        added tokens.
        """
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        return tuple({*self.tokenizer.all_special_tokens, *added})

    @cached_property
    def control_texts(self) -> tuple[str, ...]:
        """Of `special_texts`, those that structure a conversation: special tokens and what ends a
        turn.

        Added tokens without the special flag, such as `<think>`, may be part of what a model or a
        user writes.
        """
        added = [
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        ]
        return tuple(sorted({*self.tokenizer.all_special_tokens, *added, *self.end_texts}))

    @cached_property
    def generation_prompt(self) -> str:
        """What the template puts behind a conversation for the model to continue. Empty if that is
        nothing.
        """
        if not self.exists:
            return ""
        try:
            closed, opened = self.render([_USER]), self.render([_USER], opening=True)
        except ConfigError:
            return ""
        return opened[len(closed) :] if opened.startswith(closed) else ""

    @cached_property
    def end_of_turn(self) -> str | None:
        """The special token behind an assistant's text, for example `<|im_end|>`; None if the
        template writes none.
        """
        if not self.exists:
            return None
        try:
            _, found, behind = self.render(PROBE).rpartition(_ANSWER)
        except ConfigError:
            return None
        return self._first_special(behind) if found else None

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """The tokens that end an assistant turn: of a text, and of tool calls where that is another
        one.
        """
        ends = [] if self.end_of_turn is None else [self.end_of_turn]
        try:
            text = self.render([_USER, _probe_call("dict")]) if self.exists else ""
        except ConfigError:
            text = ""
        _, found, behind = text.rpartition(_VALUE)
        if found and not any(end in behind for end in ends):
            last = [special for special in self.special_texts if behind.rstrip().endswith(special)]
            ends += sorted(last, key=len)[-1:]
        return tuple(ends)

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """The ids of `end_texts`."""
        ids = [self.tokenizer.convert_tokens_to_ids(text) for text in self.end_texts]
        return tuple(token_id for token_id in ids if isinstance(token_id, int))

    @cached_property
    def _wants_text_arguments(self) -> bool:
        """Whether the template writes the arguments of a tool call as they are, and so needs them
        as JSON text.

        Most templates turn an object into JSON themselves, and would quote a text once more.
        """
        as_object, as_text = (self._probe_text(form) for form in ("dict", "text"))
        return (not _shows_json(as_object) and _shows_json(as_text)) or (
            _VALUE not in as_object and _VALUE in as_text
        )

    @cached_property
    def _needs_content(self) -> bool:
        """Whether a message with tool calls and without a text must have an empty one for the
        template to render it.
        """
        form = "text" if self._wants_text_arguments else "dict"
        message = _probe_call(form)
        try:
            self._render([_USER, message], None, False)
        except (TemplateError, TypeError):
            return True
        return False

    def _adapt(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with tool calls in the form that the template expects."""
        if not any(message.get("tool_calls") for message in messages):
            return list(messages)
        return [
            self._adapt_calls(message) if message.get("tool_calls") else message
            for message in messages
        ]

    def _adapt_calls(self, message: Message) -> Message:
        calls = message["tool_calls"]
        if self._wants_text_arguments:
            calls = [_with_text_arguments(call) for call in calls]
        content = {"content": ""} if "content" not in message and self._needs_content else {}
        return {**message, **content, "tool_calls": calls}

    def _probe_text(self, form: str) -> str:
        for content in ({}, {"content": ""}):
            try:
                return self._render([_USER, {**_probe_call(form), **content}], None, False)
            except (TemplateError, TypeError):
                continue
        return ""

    def _first_special(self, text: str) -> str | None:
        """The special token that comes first in `text`; of tokens that are only added, if there is
        no special one.
        """
        special = [
            str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special
        ]
        for texts in ({*self.tokenizer.all_special_tokens, *special}, self.special_texts):
            found = [(text.find(each), -len(each), each) for each in texts if each and each in text]
            if found:
                return min(found)[2]
        return None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, opening: bool
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
    arguments: Any = {_KEY: _VALUE}
    function = {"name": _NAME, "arguments": json.dumps(arguments) if form == "text" else arguments}
    call = {"id": "qzidzqabc", "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _shows_json(text: str) -> bool:
    """Whether the probe's arguments are in `text` as a JSON object, not quoted once more."""
    return f'"{_KEY}":"{_VALUE}"' in "".join(text.split())


def _with_text_arguments(call: Any) -> Any:
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
