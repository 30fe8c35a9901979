"""An agent of the OpenAI Agents SDK, over the Responses API; `--stream` streams."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main() -> None:
    question = json.loads(Path(os.environ["NEMO_LIKE_TASK"]).read_text())["prompt"]
    agent = Agent(name="A", instructions="be short", tools=[add], model="m")
    if "--stream" in sys.argv:
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, question)
    print("RESULT", result.final_output)


set_tracing_disabled(True)
asyncio.run(main())
