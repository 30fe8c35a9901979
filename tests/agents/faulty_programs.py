"""Programs that misbehave in the way that their row names; all keep their keys for the test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FAULTS = (
    *("none", "crash", "flood", "fork", "port", "late", "wrong_key", "repeat", "zygote"),
    "supervisor",
)


def request(url: str, key: str, body: Any, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer, without a proxy."""
    sent = urllib.request.Request(
        url, json.dumps(body).encode(), {"Authorization": f"Bearer {key}", **headers}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(sent, timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def misbehaves(task: Any) -> float:
    """The reward is 1 for every program that returns."""
    folder, fault = Path(task.row["folder"]), task.row["do"]
    with (folder / "keys").open("a") as file:
        file.write(f"{task.base_url} {task.api_key}\n")
    # A printed key is in the output of a program that fails.
    print(task.base_url, task.api_key, flush=True)
    url, key = f"{task.base_url}/chat/completions", task.api_key
    body = {"model": "m", "messages": [{"role": "user", "content": task.row["prompt"]}]}
    status, answer = request(url, key, body)
    assert status == 200, answer
    is_first = not (folder / f"tried_{fault}").exists()
    (folder / f"tried_{fault}").touch()
    # A second attempt at a program of the first group behaves.
    if fault in ("crash", "flood", "zygote", "supervisor") and not is_first:
        return 1.0
    _misbehave(fault, task, url, key, body, answer)
    return 1.0


def counts_digits(task: Any) -> float:
    """The number of digits of a turn; the first attempt at some rows crashes after their calls."""
    body = {"model": "m", "messages": [{"role": "user", "content": task.row["prompt"]}]}
    text = ""
    for _ in range(task.row["num_calls"]):
        status, answer = request(f"{task.base_url}/chat/completions", task.api_key, body)
        assert status == 200, answer
        text = json.loads(answer)["choices"][0]["message"]["content"]
    marker = Path(task.row["folder"]) / str(task.row["number"])
    if task.row["crashes"] and not marker.exists():
        marker.touch()
        raise ValueError
    return float(sum(character.isdigit() for character in text))


def _misbehave(fault: str, task: Any, url: str, key: str, body: Any, answer: bytes) -> None:
    folder, marker = Path(task.row["folder"]), str(task.row["folder"])
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", marker]
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.run(sleeper, check=False)
    elif fault == "crash":
        raise ValueError(f"{url} {key}")
    elif fault == "flood":
        while True:
            os.write(1, f"{key}\n".encode() * 1000)
    elif fault == "fork":
        for _ in range(8):
            subprocess.Popen(sleeper, start_new_session=True)
    elif fault == "port":
        listener = socket.create_server(("127.0.0.1", 0))
        (folder / "port").write_text(str(listener.getsockname()[1]))
        if os.fork() == 0:
            os.setsid()
            time.sleep(600)
    elif fault == "late":
        # The calls of ended episodes, and of none.
        for line in (folder / "ended").read_text().splitlines():
            base, ended = line.split()
            status, _ = request(f"{base}/chat/completions", ended, body)
            assert status in (401, 410), status
    elif fault == "wrong_key":
        status, _ = request(url.replace(key, "v" * len(key)), key[::-1], body)
        assert status == 401, status
    elif fault == "repeat":
        headers = {"x-stainless-retry-count": "1"}
        assert request(url, key, body, **headers) == (200, answer)
        (folder / "repeated").touch()
    elif fault == "zygote":
        text = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(text.rpartition(")")[2].split()[1]), signal.SIGKILL)
        raise SystemExit(3)
    elif fault == "supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
