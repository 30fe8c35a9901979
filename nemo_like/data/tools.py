"""Tools and tool calls in rows: validation and conversion to the form that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from nemo_like.data.loss_flags import FLAGS

Message = dict[str, Any]
"""Example: `{"role": "user", "content": "2+2=?"}`. Other keys (`tool_calls`, `name`) are passed to
the chat template.
"""
Tool = dict[str, Any]
"""JSON schema of a function that the model may call."""


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
