"""Messages of a conversation: their roles, tools and tool calls, and flags of the loss.

A message may have `train` (true or false) or `weight` (1 or 0, as in OpenAI's format), which
select the assistant turns with loss. A role that no chat template expects would be trained as
plain text, so it is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from nemo_like.config.errors import ConfigError
from nemo_like.config.text import shown_value
from nemo_like.data.jagged import EncodedRow

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


def row_tools(row: Mapping[str, Any]) -> list[Tool] | None:
    """Return the functions that the model may call in this row, or None.

    The column may be JSON text.
    """
    tools = row.get("tools")
    # Columnar files cannot have schemas of different structure, so they contain JSON text.
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    return list(tools) if tools else None


def tools_problem(value: Any) -> str | None:
    """Describe the problem of a `tools` column, or return None."""
    wanted = "a list of JSON schemas of functions (or JSON text of one)"
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        # Deeply nested brackets exceed Python's recursion limit.
        except (ValueError, RecursionError) as error:
            return f"column 'tools' is not {wanted}: {error}"
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return f"column 'tools' is not {wanted} but {type(value).__name__}"
    for index, tool in enumerate(value):
        if not isinstance(tool_name(tool), str):
            return (
                f"tools[{index}] has no function name; give {{'type': 'function', 'function':"
                f" {{'name': ...}}}}"
            )
    return None


def calls_problem(message: Message) -> str | None:
    """Describe the problem of the `tool_calls` of a message, or return None."""
    calls = message.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        try:
            calls = json.loads(calls)
        except (ValueError, RecursionError) as error:
            return f"tool_calls is text that is not JSON: {error}"
    if not calls:
        return None
    if not isinstance(calls, list):
        return f"tool_calls is of type {type(calls).__name__}, not a list of calls"
    if message.get("role") != "assistant":
        return (
            f"tool_calls stand in a message of role {message.get('role')!r}; only an assistant"
            f" calls tools"
        )
    for index, call in enumerate(calls):
        function = None
        if isinstance(call, dict):
            # Some data sets write name and arguments directly into the call.
            function = call.get("function") or call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return (
                f"tool_calls[{index}] has no function name; give {{'function': {{'name': ...,"
                f" 'arguments': ...}}}}"
            )
        if not isinstance(function.get("arguments", {}), dict | str | None):
            return f"tool_calls[{index}].function.arguments is neither an object nor JSON text"
    return None


def tool_name(tool: Tool) -> Any:
    """Return the name of a tool, nested under `function` or at the top level."""
    function = tool.get("function")
    if isinstance(function, dict):
        return function.get("name")
    return tool.get("name")


def clean_message(message: Message) -> Message:
    """Remove keys without a value and loss flags, and convert tool calls to the form that chat
    templates expect.

    Columnar files fill every key of every message. Calls become `{"type": "function", "function":
    {"name", "arguments"}}`, with the arguments parsed if they are JSON text of an object.
    """
    cleaned = {
        key: value for key, value in message.items() if value is not None and key not in FLAGS
    }
    calls = cleaned.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = json.loads(calls) if calls.strip() else None
    if calls:
        cleaned["tool_calls"] = [_clean_call(call) for call in calls]
    return cleaned


def without_nulls(value: Any) -> Any:
    """Remove null entries of objects at any depth.

    Columnar files fill every key that any row has.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    # An item of a list is kept even if it is null: its position may matter.
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    return value


def _clean_call(call: dict[str, Any]) -> dict[str, Any]:
    """Convert one tool call; its name and arguments may be at the top level."""
    call = {key: value for key, value in call.items() if value is not None}
    # Some data sets write the name and arguments directly into the call.
    if not isinstance(call.get("function"), dict):
        inner = {}
        for key in ("name", "arguments"):
            if key in call:
                inner[key] = call.pop(key)
        call = {"type": "function", **call, "function": inner}
    function = {key: value for key, value in call["function"].items() if value is not None}
    arguments = function.get("arguments", {})
    # OpenAI's format has JSON text; templates iterate over the arguments.
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    function["arguments"] = arguments
    return {**call, "function": function}


def _parsed(text: str) -> Any:
    """Parse JSON text of an object; returns the text itself if it is not one."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def flags_problem(message: Mapping[str, Any]) -> str | None:
    """Describe the problem of the loss flag of a message, or return None."""
    train = message.get("train")
    weight = message.get("weight")
    if train is not None and not isinstance(train, bool):
        return f"train is {train!r}; give true or false"
    # A bool is an int, but OpenAI's format has numbers.
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        return f"weight is {weight!r}; give 1 (loss on this turn) or 0 (no loss)"
    if train is not None and weight is not None and train != bool(weight):
        return f"train is {train} and weight is {weight}; give one of them"
    if message.get("role") != "assistant" and (train or weight):
        return "the loss is on the assistant's turns only; remove the flag"
    return None


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
    return EncodedRow(encoded.input_ids[:end], mask[:end])
