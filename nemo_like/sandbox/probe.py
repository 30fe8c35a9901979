"""Finds out which mechanisms of isolation this kernel and this container permit."""

from __future__ import annotations

import ctypes
import errno
import os

from nemo_like.sandbox import isolation, linux
from nemo_like.sandbox.seccomp import install_filter

TYPE_CHECKING = False  # The module typing takes long to import.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_INET = 2
_STREAM = 1


def probe(request: dict[str, Any]) -> dict[str, str]:
    """Return why each mechanism is unavailable; an empty text if it is available.

    `namespaces`: user, PID, mount, IPC and UTS namespaces with a root directory of their own.
    `network`: a network namespace. `seccomp`, `landlock`. `user`: without namespaces, another user
    than root can run the interpreter. Each is tried in a process of its own.
    """
    user_id = request["user_id"]
    trials: dict[str, Callable[[], None]] = {
        "namespaces": lambda: _try_namespaces(request),
        "network": lambda: _try_network(user_id),
        "seccomp": _try_seccomp,
        "landlock": _try_landlock,
        "user": lambda: _try_user(user_id, request["argv"][0]),
    }
    return {name: _problem(trial) for name, trial in trials.items()}


def _problem(trial: Callable[[], None]) -> str:
    """Run a trial in a forked process; return its exception as text."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            trial()
        except BaseException as error:  # noqa: BLE001 (the text is the result)
            os.write(write, (str(error) or type(error).__name__).encode()[:500])
            os._exit(1)
        os._exit(0)
    os.close(write)
    _, code = os.waitpid(pid, 0)
    text = os.read(read, 500).decode("utf-8", "replace")
    os.close(read)
    if code != 0 and not text:
        text = f"a process that tried it ended with status {code}"
    return text


def _try_namespaces(request: dict[str, Any]) -> None:
    keeps_root = isolation.enter_pid_namespace(request["user_id"])
    problem = _problem(lambda: _try_root(request, keeps_root=keeps_root))
    if problem:
        raise OSError(problem)


def _try_root(request: dict[str, Any], *, keeps_root: bool) -> None:
    owner = request["user_id"] if keeps_root else None
    scratch = request["scratch"]
    isolation.enter_root(scratch, request["read_only"], 1, owner, has_network_namespace=False)
    if keeps_root:
        linux.change_user(request["user_id"])
    linux.drop_capabilities()
    if os.getpid() != 1:
        raise OSError("the PID namespace has no effect")
    if not os.access(request["argv"][0], os.X_OK):
        raise OSError(f"{request['argv'][0]} is not in the root directory of the program")
    with open(f"{isolation.SCRATCH}/file", "w", encoding="ascii") as file:
        file.write("x")


def _try_network(user_id: int | None) -> None:
    isolation.enter_pid_namespace(user_id)
    linux.unshare(linux.CLONE_NEWNET)


def _try_seccomp() -> None:
    linux.set_no_new_privileges()
    install_filter(has_namespaces=False)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.socket(_INET, _STREAM, 0) != -1 or ctypes.get_errno() != errno.EPERM:
        raise OSError("the filter has no effect")


def _try_landlock() -> None:
    linux.set_no_new_privileges()
    linux.landlock_restrict([], [])
    try:
        os.listdir("/")
    except PermissionError:
        return
    raise OSError("the rules have no effect")


def _try_user(user_id: int | None, python: str) -> None:
    if user_id is None:
        return
    linux.change_user(user_id)
    if not os.access(python, os.X_OK):
        raise OSError(f"only root can execute {python}")
