"""An agent that lets the model correct its answer once, with the client of OpenAI."""

from __future__ import annotations

from typing import Any

from openai import OpenAI


def solve(task: Any) -> float:
    """Return 1 for the right answer, and half of it for the second one."""
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    with OpenAI() as client:
        for reward in (1.0, 0.5):
            reply = client.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content or ""
            if text.endswith(f"#### {task.row['answer']}"):
                return reward
            messages += [{"role": "assistant", "content": text}, messages[0]]
    return 0.0
