"""The Responses API of OpenAI as messages of the chat API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from nemo_like.agents.calls import Call
from nemo_like.agents.codec import request_messages, with_text_arguments
from nemo_like.config.errors import ConfigError, shown_value
from nemo_like.data.messages import Message, Tool, row_tools


def messages_and_tools(values: Mapping[str, Any]) -> tuple[list[Message], list[Tool] | None]:
    """Convert instructions, items and tools. Raises ConfigError for what has no counterpart."""
    items = values.get("input", [])
    messages: list[Message] = []
    if "instructions" in values:
        messages.append({"role": "system", "content": values["instructions"]})
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        kind = item.get("type", "message") if isinstance(item, dict) else item
        if kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            result = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**result, "content": _texts(item.get("output"))})
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _texts(item.get("content"))})
        elif kind != "reasoning":
            raise ConfigError(f"input has an item of type {shown_value(kind)}")
    tools: list[Tool] = []
    for tool in values.get("tools", ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ConfigError(f"tools has {shown_value(tool)}, which is not a function")
        kept = ("name", "description", "parameters")
        function = {name: tool[name] for name in kept if tool.get(name) is not None}
        tools.append({"type": "function", "function": function})
    return request_messages(messages), row_tools({"tools": tools})


def _texts(content: Any) -> Any:
    """Give text parts the type that they have in the chat API."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        is_text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text")
        parts.append({"type": "text", "text": part.get("text")} if is_text else part)
    return parts


def answer_body(
    call: Call, head: Mapping[str, Any], num_prompt: int, num_sampled: int
) -> dict[str, Any]:
    """Return the answer to a request; `head` has its id, time and model."""
    reply = with_text_arguments(call.reply)
    output: list[dict[str, Any]] = []
    if reply["content"] or "tool_calls" not in reply:
        part = {"type": "output_text", "text": reply["content"], "annotations": []}
        message = {"type": "message", "id": f"msg_{head['id']}", "role": "assistant"}
        output.append({**message, "status": "completed", "content": [part]})
    for each in reply.get("tool_calls", ()):
        item = {"type": "function_call", "id": f"fc_{each['id']}", "call_id": each["id"]}
        output.append({**item, **each["function"], "status": "completed"})
    is_cut = call.sampled is not None and call.sampled.finish_reason == "length"
    body = {
        "id": head["id"],
        "created_at": head["created"],
        "model": head["model"],
        "object": "response",
        "output": output,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": num_prompt,
            "output_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }
    return Response.model_validate(body).model_dump(mode="json", exclude_unset=True)


def stream_events(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, which together are the answer `body`."""
    started = {**body, "output": [], "status": "in_progress", "incomplete_details": None}
    del started["usage"]
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": started},
        {"type": "response.in_progress", "response": started},
    ]
    for index, item in enumerate(body["output"]):
        events += _item_events(item, {"output_index": index, "item_id": item["id"]})
    events.append({"type": f"response.{body['status']}", "response": body})
    numbered = [{**event, "sequence_number": number} for number, event in enumerate(events)]
    checked = TypeAdapter(list[ResponseStreamEvent]).validate_python(numbered)
    return [event.model_dump(mode="json", exclude_unset=True) for event in checked]


def _item_events(item: Mapping[str, Any], place: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the events of one item of the output; `place` has its index and id."""
    name = "arguments" if item["type"] == "function_call" else "content"
    empty = {**item, "status": "in_progress", name: "" if name == "arguments" else []}
    index = {"output_index": place["output_index"]}
    events = [{"type": "response.output_item.added", "item": empty, **index}]
    if name == "arguments":
        kind = "response.function_call_arguments"
        text = item["arguments"]
        events.append({"type": f"{kind}.delta", "delta": text, **place})
        events.append({"type": f"{kind}.done", "arguments": text, "name": item["name"], **place})
    for number, part in enumerate(item[name] if name == "content" else ()):
        where = {**place, "content_index": number}
        text = part["text"]
        added = {"part": {**part, "text": ""}, **where}
        events.append({"type": "response.content_part.added", **added})
        kind = "response.output_text"
        events.append({"type": f"{kind}.delta", "delta": text, "logprobs": [], **where})
        events.append({"type": f"{kind}.done", "text": text, "logprobs": [], **where})
        events.append({"type": "response.content_part.done", "part": part, **where})
    return [*events, {"type": "response.output_item.done", "item": item, **index}]
