"""Programs of the tests: functions that the launcher runs in processes of their own."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def _post(task: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    import json

    return json.loads(_post_raw(task, path, body))


def _post_raw(task: Any, path: str, body: dict[str, Any]) -> bytes:
    import json
    import urllib.request

    request = urllib.request.Request(
        f"{task.base_url}/{path}",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {task.api_key}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request) as response:
        return response.read()


def answers(task: Any) -> dict[str, float]:
    body = {"model": "m", "messages": [{"role": "user", "content": task.row["question"]}]}
    reply = _post(task, "chat/completions", body)["choices"][0]["message"]["content"]
    return {"right": float(reply == task.row["answer"])}


def uses_client(task: Any) -> int:
    """As programs of users do."""
    from openai import OpenAI

    messages: Any = [{"role": "user", "content": task.row["question"]}]
    reply = OpenAI().chat.completions.create(model="m", messages=messages)
    return int(reply.choices[0].message.content == task.row["answer"])


def converses(task: Any) -> float:
    """Three turns with the client, streamed if the row has it."""
    from openai import OpenAI

    messages: list[Any] = [{"role": "user", "content": task.row["prompt"]}]
    text = ""
    with OpenAI() as client:
        for _ in range(3):
            reply: Any = client.chat.completions.create(
                model="m", messages=messages, stream=task.row["stream"]
            )
            if task.row["stream"]:
                text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
            else:
                text = reply.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": text}, messages[0]]
    return float(len(text) % 7)


async def is_async(task: Any) -> Any:
    await asyncio.sleep(0)
    return np.float32(len(task.row))


_PREPARED: list[tuple[str, int]] = []


def is_prepared(task: Any, *, name: str) -> dict[str, float]:
    ((prepared, process),) = _PREPARED
    assert prepared == name and process != os.getpid()
    return {"process": float(process)}


is_prepared.prepare = lambda name: _PREPARED.append((name, os.getpid()))  # pyright: ignore[reportFunctionMemberAccess]


def gives_nothing(task: Any) -> None:
    del task


def gives_text(task: Any) -> str:
    return f"a result with {task.api_key}"


def draws(task: Any) -> float:
    del task
    return random.random()


def never_ends(task: Any) -> None:
    """A tree of processes that ignore signals and leave their session."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            break
    marker = f"{task.row['marker']}"
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", marker], check=False)


def leaves_process(task: Any) -> float:
    command = [sys.executable, "-c", "import time; time.sleep(600)", task.row["marker"]]
    subprocess.Popen(command, start_new_session=True)
    return 1.0


def prints_key(task: Any) -> None:
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("program").info("POST %s", task.base_url)
    print(task, task.api_key, "x" * 100_000, task.api_key)
    raise ValueError(f"{task.base_url} does not answer")


def floods(task: Any) -> None:
    del task
    while True:
        os.write(1, b"x" * (1 << 16))


def exits(task: Any) -> None:
    sys.exit(task.row["status"])


def kills_itself(task: Any) -> None:
    del task
    os.kill(os.getpid(), signal.SIGSEGV)


def calls_until_refused(task: Any) -> None:
    while True:
        answers(task)
        time.sleep(0.01)


def kills_supervisor(task: Any) -> None:
    del task
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def hangs(task: Any) -> None:
    del task
    time.sleep(600)


def answers_anything(task: Any) -> float:
    body = {"model": "m", "messages": [{"role": "user", "content": task.row["prompt"]}]}
    _post(task, "chat/completions", body)
    return 1.0


def has_options(task: Any, *, scale: float, names: list[str]) -> dict[str, float]:
    value = float(task.row["value"])
    return dict.fromkeys(names, scale * value)


def fails_after_answer(task: Any) -> None:
    answers(task)
    raise ValueError("the answer is not complete")


def fails_after_stream(task: Any) -> None:
    _post_raw(task, "responses", {"model": "m", "input": task.row["question"], "stream": True})
    raise ValueError("the stream is not complete")


def uses_tools(task: Any, *, num_turns: int, mean_s: float) -> float:
    """Calls of one conversation, with the time of a tool after each, drawn for row and turn."""
    messages = [{"role": "user", "content": task.row["prompt"]}]
    for turn in range(num_turns):
        reply = _post(task, "chat/completions", {"model": "m", "messages": messages})
        text = reply["choices"][0]["message"]["content"]
        delay_s = random.Random(f"{task.row['prompt']} {turn}").expovariate(1 / mean_s)
        time.sleep(delay_s)
        result = {"role": "user", "content": str(turn) * 32}
        messages += [{"role": "assistant", "content": text}, result]
    return 1.0


def waits_for_a_file(task: Any) -> float:
    """Ends when another file exists."""
    Path(task.row["started"]).touch()
    while not Path(task.row["go_on"]).exists():
        time.sleep(0.01)
    return 0.5
