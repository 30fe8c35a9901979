"""Episodes of environments of OpenEnv, by the client of the package `openenv` (0.10).

    environment:
      kind: program
      path: nemo_like.agents.runners.openenv.solve
      python: <interpreter with openenv and openai>
      options: {url: "http://127.0.0.1:8000", action: number, observation: text}

The server runs already, with room for as many sessions as there are episodes at a time.
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI
from openenv import GenericEnvClient


async def solve(
    task: Any,
    *,
    url: str,
    action: str | None = None,
    observation: str | None = None,
    reset: dict[str, str] | None = None,
    system_prompt: str | None = None,
    max_turns: int = 8,
    invalid_text: str = "The reply is not a valid action.",
) -> dict[str, float]:
    """Let the model act until the environment is done; return the sum of its rewards.

    Each reply is an action: a JSON object, or with `action` the value of its field of that name.
    The observation, or its field `observation`, is the next message. The first message is the row's
    `prompt`, or the observation after reset without one. `reset` has the columns of the row that
    are arguments of the reset, by the names of the arguments. A reply that the environment refuses
    is answered with `invalid_text`. `max_turns` limits the replies.
    """
    messages: list[Any] = []
    if system_prompt is not None:
        messages.append({"role": "system", "content": system_prompt})
    total = 0.0
    async with AsyncOpenAI() as model, GenericEnvClient(base_url=url) as environment:
        columns = (reset or {}).items()
        result = await environment.reset(**{name: task.row[key] for name, key in columns})
        text = task.row.get("prompt") or _text(result.observation, observation)
        for _ in range(max_turns):
            messages.append({"role": "user", "content": text})
            completion = await model.chat.completions.create(model="policy", messages=messages)
            reply = completion.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": reply})
            try:
                result = await environment.step(_action(reply, action))
            except (ValueError, RuntimeError) as error:
                # The client has no own exception for an action that the server cannot parse.
                if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                    raise
                text = invalid_text
                continue
            total += float(result.reward or 0.0)
            if result.done:
                break
            text = _text(result.observation, observation)
    return {"reward": total}


def _action(reply: str, field: str | None) -> dict[str, Any]:
    """Return the action of a reply. Raises ValueError if it is no JSON object."""
    if field is not None:
        return {field: reply.strip()}
    action = json.loads(reply)
    if not isinstance(action, dict):
        raise ValueError("the reply is not a JSON object")
    return action


def _text(observation: Any, field: str | None) -> str:
    """Return an observation as a message. Raises KeyError without the field."""
    value = observation if field is None else observation[field]
    return value if isinstance(value, str) else json.dumps(value)
