"""Conversations with the tools of MCP servers, by the package `mcp` (2.x).

    environment:
      kind: program
      path: nemo_like.agents.runners.mcp.solve
      python: <interpreter with mcp and openai>
      options:
        servers: {calculator: [python, calculator.py], search: "http://127.0.0.1:8000/mcp"}

A command is started for each episode and talks over stdio; a URL is that of a running server with
streamable HTTP. Reward functions score the last reply.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from mcp import StdioServerParameters
from mcp.client.client import Client
from mcp.client.stdio import stdio_client
from openai import AsyncOpenAI


async def solve(
    task: Any,
    *,
    servers: dict[str, str | Sequence[str]],
    system_prompt: str | None = None,
    max_turns: int = 8,
    tool_timeout_s: float = 60.0,
) -> None:
    """Let the model call tools until a reply has no call, or there were `max_turns` replies.

    The conversation begins with the row's `prompt`, or its `messages`. An error of a tool, and one
    of a call of the model, is the result that the model gets. Raises ValueError for two tools of
    one name, and the exceptions of servers that do not answer.
    """
    messages: list[Any] = list(
        task.row.get("messages") or [{"role": "user", "content": task.row["prompt"]}]
    )
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    async with AsyncExitStack() as stack:
        clients, tools = await _connected(stack, servers)
        model = await stack.enter_async_context(AsyncOpenAI())
        for _ in range(max_turns):
            request: dict[str, Any] = {"model": "policy", "messages": messages, "tools": tools}
            completion = await model.chat.completions.create(**request)
            reply: Any = completion.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                return
            calls = [(call.function.name, call.function.arguments) for call in reply.tool_calls]
            results = await asyncio.gather(
                *(_result(clients, name, text, tool_timeout_s) for name, text in calls)
            )
            for call, result in zip(reply.tool_calls, results):  # noqa: B905 (Python 3.9)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def _connected(
    stack: AsyncExitStack, servers: dict[str, str | Sequence[str]]
) -> tuple[dict[str, Client], list[dict[str, Any]]]:
    """Connect to servers; return the client of each tool by its name, and tools for requests."""
    clients: dict[str, Client] = {}
    tools: list[dict[str, Any]] = []
    for name, server in servers.items():
        transport: Any = server
        if not isinstance(server, str):
            command, *arguments = server
            transport = stdio_client(
                StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            )
        client = await stack.enter_async_context(Client(transport))
        page = await client.list_tools()
        found = list(page.tools)
        while page.next_cursor:
            page = await client.list_tools(cursor=page.next_cursor)
            found += page.tools
        for tool in found:
            if tool.name in clients:
                raise ValueError(f"servers.{name} has the tool {tool.name!r}, as another has")
            clients[tool.name] = client
            function: dict[str, Any] = {"name": tool.name, "description": tool.description or ""}
            function["parameters"] = tool.input_schema
            tools.append({"type": "function", "function": function})
    return clients, tools


async def _result(clients: dict[str, Client], name: str, text: str, timeout_s: float) -> str:
    """Return the text of the result of a call, or its error."""
    if name not in clients:
        return f"error: there is no tool {name!r}"
    try:
        arguments = json.loads(text or "{}")
    except ValueError as error:
        return f"error: the arguments are not JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are not a JSON object"
    try:
        called = clients[name].call_tool(name, arguments)
        result = await asyncio.wait_for(called, timeout_s)
    except TimeoutError:
        return f"error: no result in {timeout_s} s"
    texts = [getattr(part, "text", f"[{part.type}]") for part in result.content]
    return "\n".join(texts)
