"""A loop of the `openai` client with one tool; `--stream` streams."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from openai import OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
question = json.loads(Path(os.environ["NEMO_LIKE_TASK"]).read_text())["prompt"]
client = OpenAI()
messages: list = [{"role": "user", "content": question}]
for _ in range(4):
    options = {"model": "m", "messages": messages, "tools": [TOOL]}
    if "--stream" in sys.argv:
        with client.chat.completions.stream(**options) as stream:
            reply = stream.get_final_completion().choices[0].message
    else:
        reply = client.chat.completions.create(**options).choices[0].message
    messages.append(reply.model_dump(exclude_none=True, exclude={"parsed"}))
    for call in messages[-1].get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        total = str(sum(json.loads(call.function.arguments).values()))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": total})
print("RESULT", messages[-1]["content"])
