"""An agent of smolagents that calls tools."""

from __future__ import annotations

import json
import os
from pathlib import Path

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


question = json.loads(Path(os.environ["NEMO_LIKE_TASK"]).read_text())["prompt"]
model = OpenAIServerModel(
    "m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print("RESULT", ToolCallingAgent(tools=[add], model=model, max_steps=4).run(question))
