"""Tools and tool calls in rows: their forms in files, and the one form that chat templates are
given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]
"""`{"role": "user", "content": "2+2=?"}`; other keys (`tool_calls`, `name`) go to the chat
template.
"""
Tool = dict[str, Any]
"""JSON schema of a function that the model may call."""


def row_tools(row: Mapping[str, Any]) -> list[Tool] | None:
    """The functions that the model may call in this row, None without any. The column may hold JSON
    text.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = json.loads(tools) if tools.strip() else None
    return list(tools) if tools else None


def tools_problem(value: Any) -> str | None:
    """What is wrong with the value of a `tools` column, or None."""
    wanted = "a list of JSON schemas of functions (or JSON text of one)"
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            return f"column 'tools' is not {wanted}: {error}"
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        return f"column 'tools' is not {wanted} but {type(value).__name__}"
    for index, tool in enumerate(value):
        if not isinstance(tool_name(tool), str):
            return f"tools[{index}] has no function name; give {{'type': 'function', 'function': {{'name': ...}}}}"
    return None


def calls_problem(message: Message) -> str | None:
    """What is wrong with the `tool_calls` of a message, or None."""
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
        return f"tool_calls stand in a message of role {message.get('role')!r}; only an assistant calls tools"
    for index, call in enumerate(calls):
        function = call.get("function") or call if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return f"tool_calls[{index}] has no function name; give {{'function': {{'name': ..., 'arguments': ...}}}}"
        if not isinstance(function.get("arguments", {}), dict | str | None):
            return f"tool_calls[{index}].function.arguments is neither an object nor JSON text"
    return None


def tool_name(tool: Tool) -> Any:
    """The name of a function that may be called."""
    function = tool.get("function")
    return (function if isinstance(function, dict) else tool).get("name")


def clean_message(message: Message) -> Message:
    """A message without keys that have no value, and with its tool calls in the form that chat
    templates expect.

    Columnar files fill every key of every message. Calls are `{"type": "function", "function":
    {"name", "arguments"}}` with the arguments as an object where they are JSON text of one.
    """
    cleaned = {key: value for key, value in message.items() if value is not None}
    calls = cleaned.pop("tool_calls", None)
    if isinstance(calls, str):
        calls = json.loads(calls) if calls.strip() else None
    if calls:
        cleaned["tool_calls"] = [_clean_call(call) for call in calls]
    return cleaned


def without_nulls(value: Any) -> Any:
    """Without the null entries of objects, at any depth: columnar files fill in every key that any
    row has.
    """
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _clean_call(call: dict[str, Any]) -> dict[str, Any]:
    call = {key: value for key, value in call.items() if value is not None}
    if not isinstance(call.get("function"), dict):
        names = ("name", "arguments")
        inner = {key: call.pop(key) for key in names if key in call}
        call = {"type": "function", **call, "function": inner}
    function = {key: value for key, value in call["function"].items() if value is not None}
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _parsed(text: str) -> Any:
    """The object that is written in `text`; the text itself if it is none."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
