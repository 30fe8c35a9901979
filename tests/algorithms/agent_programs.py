"""Programs of agents for complete runs on the demo model."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI


def converses(task: Any, num_turns: int = 2) -> float:
    """Turns of one conversation; the reward is the share of digits."""
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    text = ""
    with OpenAI() as client:
        for turn in range(num_turns):
            reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
            text = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": f"{turn}+1"})
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def rewards_turns(task: Any) -> float:
    """Two turns, and a call of another conversation between them, each with a reward."""
    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    with OpenAI() as client:

        def call(given: list[Any]) -> str:
            reply = client.chat.completions.create(model="policy", messages=given, max_tokens=8)
            text = reply.choices[0].message.content or ""
            client.post("/reward", body={"reward": len(text) / 10}, cast_to=object)
            return text

        messages.append({"role": "assistant", "content": call(messages)})
        call([{"role": "user", "content": "7+1"}])
        call([*messages, {"role": "user", "content": "1+2"}])
    return 1.0


def stops_the_run(task: Any) -> float:
    """Fails when as many programs have ended as a file allows."""
    folder = Path(os.environ["NEMO_LIKE_TEST_MARKERS"])
    reward = converses(task)
    with (folder / "ends").open("a") as file:
        file.write("x")
    if (folder / "ends").stat().st_size >= int((folder / "limit").read_text()):
        raise ValueError("it stops the run")
    return reward


def fails_sometimes(task: Any) -> float:
    """The first attempts at some rows crash or are killed after a call."""
    kind = sum(map(ord, task.row["prompt"])) % 3
    reward = converses(task, 1 + kind)
    marker = Path(os.environ["NEMO_LIKE_TEST_MARKERS"]) / task.row["prompt"]
    if kind and not marker.exists():
        marker.touch()
        if kind == 1:
            raise ValueError("the first attempt crashes")
        os.kill(os.getpid(), signal.SIGKILL)
    return reward


async def _calls(texts: list[str], **options: Any) -> list[str]:
    """The answers to requests at the same time."""
    async with AsyncOpenAI() as client:
        replies = await asyncio.gather(
            *(
                client.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": text}], **options
                )
                for text in texts
            )
        )
    return [choice.message.content or "" for reply in replies for choice in reply.choices]


def does(task: Any) -> Any:
    """What the row has under `do`."""
    do, prompt = task.row["do"], task.row["prompt"]
    if do == "converse":
        return {"length": converses(task, 3)}
    if do == "branch":
        asyncio.run(_calls([prompt, "1+1"]))
        asyncio.run(_calls([prompt], n=2))
        return 0.5
    if do == "request":
        asyncio.run(_calls([prompt]))
        for value in (0.25, 0.5):
            headers = {"Authorization": f"Bearer {task.api_key}"}
            body = {"reward": value}
            httpx.post(f"{task.base_url}/reward", json=body, headers=headers, trust_env=False)
        return None
    if do == "loop":
        while True:
            converses(task, 1)
    if do == "leave":
        # It ends while a call is answered.
        threading.Thread(target=converses, args=(task, 6), daemon=True).start()
        time.sleep(0.3)
        return 1.0
    if do == "silent":
        return 1.0
    asyncio.run(_calls([prompt]))
    if do == "crash":
        raise ValueError("it crashes")
    return None
