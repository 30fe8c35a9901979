"""An agent of smolagents that writes code."""

from __future__ import annotations

import json
import os
from pathlib import Path

from smolagents import CodeAgent, OpenAIServerModel

question = json.loads(Path(os.environ["NEMO_LIKE_TASK"]).read_text())["prompt"]
model = OpenAIServerModel(
    "m", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
print("RESULT", CodeAgent(tools=[], model=model, max_steps=4).run(question))
