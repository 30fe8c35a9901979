"""Converts messages of requests to token ids, and sampled token ids to replies."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.data.chat import ChatEncoder
from nemo_like.data.messages import MEANT, Message, Tool, clean_message
from nemo_like.data.observations import ObservationEncoder

Parser = Callable[[list[int], Sequence[Tool] | None], Message]
"""Takes the token ids of a turn, without the token that ends it, and the tools of the request;
returns a message with `content`, `tool_calls` and `reasoning_content`. It may raise any exception
for calls that it cannot parse."""
_CALL_MARK = re.compile(
    r"<(?P<closing>/?)(?:\w+:)?tool_calls?>|<[^\w<>]tool[^<>]*[_▁](?P<side>begin|end)[^\w<>]>"
)
"""Begin or end of tool calls, e.g. `<tool_call>` and `<|tool_call_end|>`."""
_JSON_CALLS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
    },
}
"""The `response_template` of Hermes, Qwen2.5 and Qwen3, whose tokenizers have none."""


class ChatCodec:
    """Converts with the chat template of one tokenizer.

    The encoder should have no system prompt and no prompt template: programs write complete
    messages. Texts of control tokens are removed from everything that a request contains, so that
    a result of a tool cannot end its own turn or begin one of the model.
    """

    def __init__(
        self,
        encoder: ChatEncoder,
        parser: Parser | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        """`parser` is by default that of transformers.

        It needs a `response_template`, by default the tokenizer's, or for the chat templates of
        Hermes and Qwen a known one; see `parse_response` of a tokenizer. Without one all of a turn
        is content, and requests with tools are refused.
        """
        self.encoder = encoder
        self._observations = ObservationEncoder(encoder)
        template = response_template or getattr(encoder.tokenizer, "response_template", None)
        if template is None and _has_json_calls(str(encoder.tokenizer.chat_template)):
            template = _JSON_CALLS
        if parser is None and template is not None:
            parser = _template_parser(encoder, dict(template))
        self._parser = parser

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[Tool] | None) -> np.ndarray:
        """Encode a complete request and the generation prompt, int32 [L].

        Raises ConfigError if the chat template refuses or drops a part, and for tools if calls in
        a reply cannot be parsed.
        """
        if tools and self._parser is None:
            raise ConfigError(
                "the request has tools, but the tokenizer has no response_template with the format"
                " of their calls; set environment.tool_parser to a value of vLLM's option"
                " --tool-call-parser, e.g. hermes"
            )
        without = self._observations.without_control_texts
        return self.encoder.encode_prompt(without(list(messages)), tools and without(list(tools)))

    def continuation_ids(
        self, messages: Sequence[Message], last_token_id: int, reply: Message, max_tokens: int
    ) -> np.ndarray:
        """Encode the messages after a reply that ended with `last_token_id`, int32 [L].

        See `ObservationEncoder.encode`, also for the errors.
        """
        calls = reply.get("tool_calls") or ()
        return self._observations.encode(messages, last_token_id, max_tokens, calls)

    def reply(
        self, token_ids: np.ndarray, tools: Sequence[Tool] | None, stop: Sequence[str] = ()
    ) -> Message:
        """Return the message of a sampled turn, `token_ids` int32 [L].

        The complete turn is content if one of its tool calls is cut off or has arguments that are
        no JSON object. The content ends before the first of the texts `stop`.
        """
        ids = self._without_end(token_ids)
        message = None
        # Some parsers return a call that is cut off, without the rest of its arguments.
        if self._parser is not None and not _is_cut_off(self.full_text(ids)):
            try:
                message = clean_reply(self._parser(ids, tools))
            except Exception:  # noqa: BLE001 (parsers raise anything for text of a model)
                message = None
        if message is None or not _has_arguments(message):
            message = {"role": "assistant", "content": self.text(ids)}
        for text in stop:
            message["content"] = message["content"].partition(text)[0]
        return message

    def text(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode without special tokens."""
        ids = list(map(int, token_ids))
        return str(self.encoder.tokenizer.decode(ids, skip_special_tokens=True))

    def full_text(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Decode with special tokens."""
        return str(self.encoder.tokenizer.decode(list(map(int, token_ids))))

    def _without_end(self, token_ids: np.ndarray) -> list[int]:
        ids = token_ids.tolist()
        return ids[:-1] if ids and ids[-1] in self.encoder.end_token_ids else ids


def _has_json_calls(chat_template: str) -> bool:
    """Return whether a chat template is ChatML with the tool calls of Hermes."""
    others = ("<function=", "<arg_key>", "<parameter")
    marks = ("<|im_start|>", "<tool_call>", '"name"')
    has_marks = all(mark in chat_template for mark in marks)
    return has_marks and not any(other in chat_template for other in others)


def _is_cut_off(text: str) -> bool:
    """Return whether the last tool call of a turn has a begin but no end."""
    marks = list(_CALL_MARK.finditer(text))
    if not marks or marks[-1]["closing"] or marks[-1]["side"] == "end":
        return False
    try:
        # Granite's calls are a list of JSON without a mark at its end.
        json.loads(text[marks[-1].end() :])
    except ValueError:
        return True
    return False


def _has_arguments(message: Message) -> bool:
    """Return whether the arguments of all tool calls are JSON objects."""
    calls = message.get("tool_calls", ())
    return all(isinstance(call["function"]["arguments"], dict) for call in calls)


def clean_reply(message: Mapping[str, Any]) -> Message:
    """Return a reply as `request_messages` returns its copies."""
    return request_messages([{**message, "role": "assistant"}])[0]


def request_messages(messages: Sequence[Any]) -> list[Message]:
    """Return the messages of a request as chat templates expect them.

    Roles have the names of this package, contents are texts, arguments of tool calls are parsed.
    Raises ConfigError for something that is no message, and for contents other than texts.
    """
    cleaned = []
    for index, message in enumerate(messages):
        renamed = message
        if isinstance(message, dict):
            role = message.get("role")
            role = MEANT.get(role, role) if isinstance(role, str) else role
            renamed = {**message, "role": role, "content": message.get("content") or ""}
        cleaned.append(clean_message(renamed, f"messages[{index}]"))
    if not cleaned:
        raise ConfigError("messages is empty; give at least one message")
    return cleaned


def with_text_arguments(reply: Message) -> Message:
    """Return a reply as the API writes it: the arguments of tool calls are JSON texts."""
    calls = []
    for call in reply.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**reply, "tool_calls": calls} if calls else dict(reply)


def _template_parser(encoder: ChatEncoder, template: dict[str, Any]) -> Parser:
    """Return the parser of transformers for a response template."""
    tokenizer = encoder.tokenizer
    # The parser needs the generation prompt, which may open a thought.
    prefix = encoder.template.opening

    def parse(token_ids: list[int], tools: Sequence[Tool] | None) -> Message:
        # As text: the parser reads an empty list as an empty batch.
        text = str(tokenizer.decode(token_ids))
        parsed: Any = tokenizer.parse_response(
            text, template, prefix=prefix, tools=None if tools is None else list(tools)
        )
        # The other names are those of messages.
        return {"reasoning_content": parsed.pop("thinking", None), **parsed}

    return parse
