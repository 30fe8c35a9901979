"""Runs programs of agents in the interpreter of the user, forked from a process that imported them.

The zygote imports the program once, because the imports of an agent take seconds. For each episode
it forks a supervisor, which forks the program, watches its time and output, and ends every process
that it started. The module uses the standard library only, in any version of Python from 3.9 on:
the interpreter of the user need not have the packages of this one.

Messages are JSON objects. Stdin of the zygote is a socket: a request comes with the socket of its
episode, on which the supervisor sends the result. The end of that socket cancels the episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import inspect
import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from nemo_like.environments.sandbox import linux

_CHUNK_BYTES = 1 << 16
_MAX_REQUEST_BYTES = 1 << 16


class Task:
    """What a program gets: the row of the data file, and its endpoint.

    Example: `OpenAI(base_url=task.base_url, api_key=task.api_key)`.
    """

    def __init__(self, row: dict[str, Any], base_url: str, api_key: str) -> None:
        self.row = row
        self.base_url = base_url
        self.api_key = api_key

    def __repr__(self) -> str:
        # Programs print their task.
        return f"Task(row={self.row!r})"


def main() -> None:
    """Serve requests until the connection ends."""
    connection = socket.socket(fileno=os.dup(0))
    devnull = os.open(os.devnull, os.O_RDONLY)
    os.dup2(devnull, 0)
    start = json.loads(connection.recv(_MAX_REQUEST_BYTES))
    try:
        program = _imported(start["path"], start["options"]) if start["path"] else None
    except BaseException:  # noqa: BLE001 (an import can fail in any way)
        _send(connection, {"error": traceback.format_exc()})
        return
    gc.collect()
    # Collections would write to every page of what was imported, and so copy it in each program.
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _send(connection, {"error": None})
    while True:
        content, sockets, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 1)
        if not content:
            # The launcher has ended, and with it all programs.
            with contextlib.suppress(ChildProcessError):
                os.wait()
            shutil.rmtree(start["folder"], ignore_errors=True)
            return
        (episode,) = sockets
        if os.fork() == 0:
            connection.close()
            _supervise(json.loads(content), program, socket.socket(fileno=episode))
        os.close(episode)


def _imported(path: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    """Import `module.function`, and set keyword arguments. Raises TypeError if it has not these.

    The function may have an attribute `prepare`, a function of the same keyword arguments that is
    called once: each episode would repeat an import that it makes itself.
    """
    module_name, _, name = path.rpartition(".")
    program = getattr(importlib.import_module(module_name), name)
    if not callable(program):
        raise TypeError(f"{path} is a {type(program).__name__}, not a function")
    inspect.signature(program).bind(None, **options)
    prepare = getattr(program, "prepare", None)
    if prepare is not None:
        prepare(**options)
    return functools.partial(program, **options)


def _supervise(
    request: dict[str, Any], program: Callable[[Any], Any] | None, connection: socket.socket
) -> None:
    """Run one program and report its end. Does not return."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        # A signal to the group of the program must not reach this process.
        os.setsid()
        linux.become_subreaper()
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            connection.close()
            _run(request, program, write)
        os.close(write)
        result = _watch(request, connection, pid, read)
        linux.end_descendants()
        _send(connection, result)
    finally:
        os._exit(0)


def _watch(
    request: dict[str, Any], connection: socket.socket, pid: int, output: int
) -> dict[str, Any]:
    """Return the result when the program has ended, or has reached a limit."""
    poller = select.poll()
    ended = os.pidfd_open(pid)
    for file in (connection.fileno(), output, ended):
        poller.register(file, select.POLLIN)
    deadline = time.monotonic() + request["timeout_s"]
    kept = bytearray()
    num_bytes = 0
    reason = ""
    while not reason:
        left_ms = max(0.0, deadline - time.monotonic()) * 1000
        files = [file for file, _ in poller.poll(left_ms)]
        if output in files:
            chunk = os.read(output, _CHUNK_BYTES)
            num_bytes += len(chunk)
            # The last lines explain an error.
            kept = (kept + chunk)[-request["max_kept_bytes"] :]
            if not chunk:
                poller.unregister(output)
        if connection.fileno() in files:
            reason = "cancelled"
        elif num_bytes > request["max_output_bytes"]:
            reason = "output"
        elif ended in files and output not in files:
            reason = "ended"
        elif time.monotonic() >= deadline:
            reason = "timeout"
    status = None
    if reason == "ended":
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"reason": reason, "status": status, "output": kept.decode("utf-8", "replace")}


def _run(request: dict[str, Any], program: Callable[[Any], Any] | None, output: int) -> None:
    """Run the program in this process. Does not return."""
    status = 1
    try:
        os.setsid()
        linux.die_with_parent()
        linux.restore_signals()
        for file in (1, 2):
            os.dup2(output, file)
        os.close(output)
        os.environ.update(request["environment"])
        if program is None:
            _execute(request["command"])
        # Forked processes would draw equal numbers.
        random.seed(request["seed"])
        _call(request["environment"], program)
        status = 0
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 (whatever the program raises)
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status & 0xFF)


def _execute(command: list[str]) -> NoReturn:
    """Replace this process by a command. Raises SystemExit if it cannot be started."""
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise SystemExit(f"environment.command {command[0]!r} cannot be started: {error}") from None


def _call(environment: dict[str, str], program: Callable[[Any], Any]) -> None:
    """Call the program, and write what it returns to the file of the result."""
    with open(environment["NEMO_LIKE_TASK"], encoding="utf-8") as file:
        row = json.load(file)
    task = Task(row, environment["OPENAI_BASE_URL"], environment["OPENAI_API_KEY"])
    result = program(task)
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    with open(environment["NEMO_LIKE_RESULT"], "w", encoding="utf-8") as file:
        # Scalars of NumPy and torch have the method `item`.
        json.dump(result, file, default=lambda value: value.item())


def _send(connection: socket.socket, message: dict[str, Any]) -> bool:
    """Send a message; return False if its receiver has ended."""
    try:
        connection.sendall(json.dumps(message).encode())
    except OSError:
        return False
    return True
