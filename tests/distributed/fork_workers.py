"""Forks Ray workers from a process that has imported torch, transformers and Megatron-Core.

This module and those that it imports do not import Ray, which reads its environment once.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from tests.distributed.send_worker import NUM_FILES

_CLONE_NEWNS = 0x20000
"""Of linux/sched.h: a mount namespace of its own."""
_MAX_BYTES = 2**20
_SETUP_ARGUMENTS = ("--serialized-runtime-env-context", "--language")
"""Arguments of Ray's own setup program, which its worker program does not know."""


def serve(listener: socket.socket, modules: Sequence[str], separate: str | None) -> None:
    """Fork a worker for each message of `send_worker.py`, until this process is ended.

    Each worker has imported `modules`. In the folder `separate` the workers have an empty file
    system of their own.
    """
    if separate is not None:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", separate], check=True)
    for name in modules:
        importlib.import_module(name)
    # The kernel removes children that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        message, files, _, _ = socket.recv_fds(connection, _MAX_BYTES, NUM_FILES)
        if os.fork() == 0:
            listener.close()
            connection.close()
            _run_worker(json.loads(message), files)
        for file in files:
            os.close(file)
        connection.close()


def _run_worker(command: dict[str, Any], files: list[int]) -> NoReturn:
    """Run Ray's program for workers as a process that the raylet has started does."""
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(command["environment"])
        os.chdir(command["folder"])
        sys.argv = []
        for argument in command["arguments"]:
            if not argument.startswith(_SETUP_ARGUMENTS):
                sys.argv.append(argument)
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001 (a fork must not run the code of its parent)
        traceback.print_exc()
    os._exit(1)
