"""Messages of a conversation: their roles, tools and tool calls, and flags of the loss.

A message may have `train` (true or false) or `weight` (1 or 0, as in OpenAI's format), which
select the assistant turns with loss. A role that no chat template expects would be trained as
plain text, so it is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np

from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.data.jagged import EncodedRow
from nemo_like.data.row_files import shown_json

Message = dict[str, Any]
"""Example: `{"role": "user", "content": "2+2=?"}`. Other keys (`tool_calls`, `name`) are passed to
the chat template.
"""
Tool = dict[str, Any]
"""JSON schema of a function that the model may call."""
FLAGS = ("train", "weight")
TrainOn = Literal["assistant", "all", "last"]
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
SPEAKERS = ("human", "gpt", "chatgpt", "bot", "chatbot", "ai", "model")
"""Roles of ShareGPT that stand for user and assistant and that few chat templates know."""
ROLES_FIX = (
    "rename them in the file, or set data.columns={conversations: messages}, which reads `messages`"
    " with the roles of ShareGPT"
)
_QUOTED = re.compile(r"""(['"])([\w-]+)\1""")


def template_roles(chat_template: object) -> frozenset[str]:
    """Return the roles that messages may have: `ROLES` and the quoted words of the template.

    `chat_template` may be several templates by name. A template names the roles that it renders in
    a special way, such as `developer` or `ipython`; it writes any other role as it is, which no
    model has seen.
    """
    named = chat_template.values() if isinstance(chat_template, dict) else [chat_template]
    source = "\n".join(each for each in named if isinstance(each, str))
    return frozenset((*ROLES, *(match.group(2) for match in _QUOTED.finditer(source))))


def check_roles(messages: Sequence[Mapping[str, Any]], known: Collection[str]) -> None:
    """Raise ConfigError for roles not in `known`, with the roles to write instead."""
    unknown = [message["role"] for message in messages if message["role"] not in known]
    if unknown:
        fix = f"; {ROLES_FIX}" if any(role in SPEAKERS for role in unknown) else ""
        raise ConfigError(
            f"{unknown_roles(unknown)}; the role of a message is {', '.join(ROLES)} or one that the"
            f" chat template names{fix}"
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


def row_tools(row: Mapping[str, Any]) -> list[Tool] | None:
    """Return the functions that the model may call in this row, or None.

    The column may be JSON text. Raises ConfigError for another value.
    """
    tools = row.get("tools")
    wanted = "a list of JSON schemas of functions (or JSON text of one)"
    # Columnar files cannot have schemas of different structure, so they contain JSON text.
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"column 'tools' is not {wanted}: {error}") from error
    if not tools:
        return None
    tools = parsed_items(tools) if isinstance(tools, list) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigError(f"column 'tools' is not {wanted} but {type(tools).__name__}")
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance((function if isinstance(function, dict) else tool).get("name"), str):
            raise ConfigError(
                f"tools[{index}] has no function name; give {{'type': 'function', 'function':"
                f" {{'name': ...}}}}"
            )
    return list(tools)


def parsed_items(items: list[Any]) -> list[Any]:
    """Return a list whose items that are JSON texts of objects are parsed.

    The type `List(Json())` of `datasets` writes the items as texts.
    """
    parsed = []
    for item in items:
        value = item
        if isinstance(item, str) and item.lstrip().startswith("{"):
            with suppress(ValueError, RecursionError):
                value = json.loads(item)
        parsed.append(value)
    return parsed


def clean_message(message: Any, place: str) -> Message:
    """Return a message without loss flags and keys without a value, which columnar files fill in.

    Tool calls get the form that chat templates expect. Raises ConfigError that begins with `place`
    for a value that is not a message.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ConfigError(f"{place} is {shown_json(message)}, not an object with role and content")
    cleaned = {key: value for key, value in _without_none(message).items() if key not in FLAGS}
    try:
        calls = _clean_calls(cleaned.pop("tool_calls", None), message["role"])
        _check_flags(message)
    except ConfigError as error:
        raise ConfigError(f"{place}.{error}") from error
    # A message with tool calls may have no content.
    if "content" in cleaned or not calls:
        cleaned["content"] = content_text(cleaned.get("content"), f"{place}.content")
    if calls:
        cleaned["tool_calls"] = calls
    return cleaned


def content_text(content: Any, place: str) -> str:
    """Return a content as one text, also if it is a list of text parts in OpenAI's format.

    Raises ConfigError that begins with `place` for another value.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ConfigError(f"{place} is {shown_json(content)}, not a text")
    texts = []
    for index, part in enumerate(parsed_items(content)):
        text = part.get("text") if isinstance(part, dict) else None
        if not isinstance(text, str) or part.get("type", "text") != "text":
            raise ConfigError(
                f"{place}[{index}] is {shown_json(part)}, not a part with a text:"
                ' {"type": "text", "text": ...}; remove the row or the part'
            )
        texts.append(text)
    return "".join(texts)


def _clean_calls(calls: Any, role: str) -> list[dict[str, Any]]:
    """Convert tool calls to `{"type": "function", "function": {"name", "arguments"}}`, with the
    arguments parsed if they are JSON text of an object. Raises ConfigError for other values.
    """
    if isinstance(calls, str):
        try:
            calls = json.loads(calls) if calls.strip() else None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"tool_calls is text that is not JSON: {error}") from error
    if not calls:
        return []
    if not isinstance(calls, list):
        raise ConfigError(f"tool_calls is of type {type(calls).__name__}, not a list of calls")
    if role != "assistant":
        raise ConfigError(
            f"tool_calls stand in a message of role {role!r}; only an assistant calls tools"
        )
    calls = parsed_items(calls)
    return [_clean_call(call, f"tool_calls[{index}]") for index, call in enumerate(calls)]


def _clean_call(call: Any, place: str) -> dict[str, Any]:
    """Convert one tool call. Raises ConfigError that begins with `place`."""
    call = _without_none(call) if isinstance(call, dict) else {}
    # Some data sets write the name and arguments directly into the call.
    if not isinstance(call.get("function"), dict):
        inner = {key: call.pop(key) for key in ("name", "arguments") if key in call}
        call = {"type": "function", **call, "function": inner}
    function = _without_none(call["function"])
    if not isinstance(function.get("name"), str):
        raise ConfigError(
            f"{place} has no function name; give {{'function': {{'name': ..., 'arguments': ...}}}}"
        )
    arguments = function.get("arguments", {})
    if not isinstance(arguments, dict | str):
        raise ConfigError(f"{place}.function.arguments is neither an object nor JSON text")
    # OpenAI's format has JSON text; templates iterate over the arguments.
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments) if arguments.strip() else {}
            arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _without_none(value: Mapping[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in value.items() if each is not None}


def _check_flags(message: Mapping[str, Any]) -> None:
    """Raise ConfigError for a loss flag that has no meaning."""
    train = message.get("train")
    weight = message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise ConfigError(f"train is {train!r}; give true or false")
    # A bool is an int, but OpenAI's format has numbers.
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise ConfigError(f"weight is {weight!r}; give 1 (loss on this turn) or 0 (no loss)")
    if train is not None and weight is not None and train != bool(weight):
        raise ConfigError(f"train is {train} and weight is {weight}; give one of them")
    if message["role"] != "assistant" and (train or weight):
        raise ConfigError("the loss is on the assistant's turns only; remove the flag")


def is_trained(message: Mapping[str, Any]) -> bool:
    """Return False for an assistant turn whose flag removes its loss."""
    flags = [message.get(name) for name in FLAGS]
    return not any(flag is not None and not flag for flag in flags)


def trained_turns(messages: Sequence[Mapping[str, Any]], train_on: TrainOn) -> list[bool] | None:
    """Return for each assistant turn whether it carries the loss; None if all do.

    Raises ConfigError if a flag contradicts `train_on`, or no turn is left.
    """
    turns = [is_trained(message) for message in messages if message["role"] == "assistant"]
    if train_on == "all" and not all(turns):
        raise ConfigError(
            "a message has a flag that removes its loss, but data.train_on is all; set it to"
            " assistant or last, or remove the flag"
        )
    if train_on == "last":
        turns[:-1] = [False] * len(turns[:-1])
    if turns and not any(turns):
        raise ConfigError(
            f"no assistant turn is left to learn from: the flags of the messages remove all, with"
            f" data.train_on={train_on}"
        )
    return None if all(turns) else turns


def mask_turns(encoded: EncodedRow, turns: Sequence[bool]) -> EncodedRow:
    """Return the row with loss on some of its assistant turns, up to the end of the last of them.

    `turns` has one entry per assistant turn. Raises ConfigError if the turns cannot be told apart.
    """
    # Runs of trained tokens: the edges are where the mask changes, both ends included.
    padded = np.concatenate([[0], encoded.token_mask, [0]]).astype(np.int8)
    edges = np.flatnonzero(np.diff(padded)).reshape(-1, 2)
    if len(edges) != len(turns):
        raise ConfigError(
            f"the chat template renders {len(turns)} assistant turns as {len(edges)} separate parts"
            " with loss, so single turns cannot be selected; set data.train_on=assistant and remove"
            " the flags of the messages, or merge consecutive assistant turns"
        )
    mask = np.zeros_like(encoded.token_mask)
    for (start, end), has_loss in zip(edges.tolist(), turns, strict=True):
        if has_loss:
            mask[start:end] = 1
    end = int(np.flatnonzero(mask)[-1]) + 1
    return encoded._replace(token_mask=mask).beginning(end)
