"""The prebuilt agent of LangGraph."""

from __future__ import annotations

import json
import os
from pathlib import Path

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


question = json.loads(Path(os.environ["NEMO_LIKE_TASK"]).read_text())["prompt"]
agent = create_react_agent(ChatOpenAI(model="m"), [add])
state = agent.invoke({"messages": [("user", question)]})
print("RESULT", state["messages"][-1].content)
