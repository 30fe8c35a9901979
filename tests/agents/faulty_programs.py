"""Programs that misbehave in the way that their row names; all keep their keys for the test."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FAILURES = ("crash", "killed", "no_number", "flood", "zygote", "supervisor")
"""Faults after which an attempt has failed."""
FAULTS = ("none", *FAILURES, "fork", "port", "late", "wrong_key", "repeat", "leave")
RANDOM_FAULTS = (*FAULTS[1:], "abuse", "hang")
"""The faults of `misbehaves_at_random`."""


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


def _sent(url: str, key: str, body: bytes) -> http.client.HTTPConnection:
    """A connection on which a request was sent."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.netloc, timeout=60)
    connection.request("POST", parts.path, body, {"Authorization": f"Bearer {key}"})
    return connection


def misbehaves(task: Any) -> Any:
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
    if fault in FAILURES and not is_first:
        return 1.0
    _misbehave(fault, task, url, key, body, answer)
    return "no number" if fault == "no_number" else 1.0


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


def drawn_fault(number: float, share: float) -> str:
    """The fault of an attempt whose first random number is `number`; empty for none."""
    return RANDOM_FAULTS[int(number / share * len(RANDOM_FAULTS))] if number < share else ""


def misbehaves_at_random(task: Any, *, folder: str, share: float) -> Any:
    """Calls with pauses, of which a share of the attempts has a fault after one of them.

    The reward is the share of digits.
    """
    number = random.random()
    fault = drawn_fault(number, share)
    num_calls = random.randint(1, 2)
    position = random.randrange(num_calls)
    with Path(folder, "keys").open("a") as file:
        file.write(f"{task.base_url} {task.api_key}\n")
    print(task.base_url, task.api_key, flush=True)
    url, key = f"{task.base_url}/chat/completions", task.api_key
    messages = [{"role": "user", "content": task.row["prompt"]}]
    text = ""
    for turn in range(num_calls):
        body = {"model": "m", "messages": messages}
        status, answer = request(url, key, body)
        assert status == 200, answer
        if fault and turn == position:
            with Path(folder, "faults").open("a") as file:
                file.write(json.dumps([number, time.time()]) + "\n")
            own = SimpleNamespace(row={"folder": folder}, base_url=task.base_url, api_key=key)
            _misbehave(fault, own, url, key, body, answer)
        reply = json.loads(answer)["choices"][0]["message"]["content"]
        messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "1+1"}]
        text += reply
        time.sleep(random.expovariate(4))
    with Path(folder, "ended").open("a") as file:
        file.write(f"{task.base_url} {task.api_key} {time.time()}\n")
    reward = sum(character.isdigit() for character in text) / max(len(text), 1)
    return "no number" if fault == "no_number" else reward


def _misbehave(fault: str, task: Any, url: str, key: str, body: Any, answer: bytes) -> None:
    folder, marker = Path(task.row["folder"]), str(task.row["folder"])
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)", marker]
    if fault == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.run(sleeper, check=False)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
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
        # The keys of episodes that ended some time ago.
        ended = folder / "ended"
        for line in ended.read_text().splitlines()[:2] if ended.exists() else ():
            _, other, *times = line.split()
            if times and time.time() - float(times[0]) < 10:
                continue
            status, _ = request(url.replace(key, other), other, body)
            assert status in (401, 410), status
    elif fault == "wrong_key":
        status, _ = request(url.replace(key, "v" * len(key)), key[::-1], body)
        assert status == 401, status
    elif fault == "repeat":
        headers = {"x-stainless-retry-count": "1"}
        assert request(url, key, body, **headers) == (200, answer)
        (folder / "repeated").touch()
    elif fault == "leave":
        # Nobody waits for the answer.
        _sent(url, key, json.dumps(body).encode()).close()
    elif fault == "abuse":
        for _ in range(1001):
            connection = _sent(url, key, b"{")
            connection.getresponse().read()
            connection.close()
    elif fault == "zygote":
        text = Path(f"/proc/{os.getppid()}/stat").read_text()
        os.kill(int(text.rpartition(")")[2].split()[1]), signal.SIGKILL)
        raise SystemExit(3)
    elif fault == "supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
