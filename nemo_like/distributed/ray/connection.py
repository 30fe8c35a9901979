"""Connects this process to a Ray cluster: joins the cluster of `RAY_ADDRESS`, or starts one."""

from __future__ import annotations

import logging
import os
import re
import secrets
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import ray
from ray._private import ray_constants, services
from ray._private import utils as ray_utils

from nemo_like.distributed.errors import ClusterError
from nemo_like.distributed.ray.session_guard import SessionDirectory

_CONNECT_S = 10.0
_MAX_ATTEMPTS = 3
"""Ray gives its processes 30 s to start, which a busy machine may exceed."""


def connect(logs: Path | None) -> SessionDirectory | None:
    """Join the cluster of RAY_ADDRESS, or start one and return its directory.

    If the start fails, the logs of Ray are copied to `logs`. Raises ClusterError.
    """
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        return _start(logs)
    if "://" in address:
        raise ClusterError(
            f"RAY_ADDRESS is {address}, not the address of a cluster's head (host:port, or auto)."
            " To run on the cluster behind that URL use `ray job submit`, as ray_jobs/submit.sh"
            " does; to run on this machine, unset it"
        )
    # With several clusters Ray would choose one of them at random.
    found = services.find_gcs_addresses() if address == "auto" else ()
    if len(found) > 1:
        raise ClusterError(
            f"RAY_ADDRESS is auto, and {len(found)} clusters run on this machine:"
            f" {', '.join(sorted(found))}. Set RAY_ADDRESS to the address of one of them"
        )
    try:
        _join(address)
    except Exception as error:  # Ray raises RuntimeError, ValueError, OSError and types of its own
        disconnect()
        advice = (
            f"The head must run (check with `RAY_AUTH_MODE=token ray status --address {address}`;"
            " after it ended, start it again or unset RAY_ADDRESS), and if it was started with"
            " RAY_AUTH_MODE=token this needs RAY_AUTH_MODE=token and the same token, in"
            " ~/.ray/auth_token or RAY_AUTH_TOKEN"
        )
        if "ersion mismatch" in str(error):
            advice = "Install the same versions of Ray and Python here and on the cluster"
        raise ClusterError(
            f"cannot connect to the Ray cluster of RAY_ADDRESS={address}: {_one_line(error)}."
            f" {advice}"
        ) from error
    return None


def connection_problem() -> str | None:
    """Join the cluster of RAY_ADDRESS and leave it; return the problem, if any."""
    try:
        connect(None)
    except ClusterError as error:
        return str(error)
    disconnect()
    return None


def disconnect() -> None:
    """Disconnect this process from Ray."""
    with _keep_signal_handlers():
        ray.shutdown()


def _join(address: str) -> None:
    if address != "auto":
        _check_listening(address)
    with _keep_signal_handlers():
        ray.init(address=address, logging_level=logging.ERROR)


def _start(logs: Path | None) -> SessionDirectory:
    """Start a Ray cluster on this machine that ends with this process."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    attempt = 1
    while True:
        try:
            _create_token()
            session = SessionDirectory()
        except OSError as error:
            raise ClusterError(
                f"Ray cannot be started on this machine: its files cannot be created ({error})."
                " Free some space there, or set RAY_TMPDIR to a short path that can be written, or"
                " for the token RAY_AUTH_TOKEN"
            ) from error
        try:
            _start_session(session)
        except BaseException as error:
            disconnect()
            session.close(logs)
            if not isinstance(error, Exception):
                raise
            kept = f"; the logs of Ray are in {logs}" if logs is not None and logs.is_dir() else ""
            # Only a slow start is worth another attempt; other errors would repeat.
            if "timed out during startup" in str(error) and attempt < _MAX_ATTEMPTS:
                attempt += 1
                continue
            raise ClusterError(
                f"Ray could not be started on this machine (attempt {attempt}):"
                f" {_one_line(error)}{kept}."
                " All its processes were stopped. Try again when the machine is less busy, or run"
                " without Ray with cluster.backend=local (one worker)"
            ) from error
        return session


def _create_token() -> None:
    """Create the file of Ray's token, without which Ray creates one that all users can read."""
    names = {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
    if names & os.environ.keys() or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = Path.home() / ".ray" / "auth_token"
    if path.exists():
        # A file of Ray, or of a version without this function; a mounted one cannot be changed.
        with suppress(OSError):
            path.chmod(0o600)
        return
    path.parent.mkdir(mode=0o700, exist_ok=True)
    # A link to a complete file: another run that starts now must not read a part of it.
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:
        file.write(secrets.token_hex(32))
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


def _start_session(session: SessionDirectory) -> None:
    with _loopback_only(), _keep_signal_handlers(), _own_process_groups():
        ray.init(
            address="local",
            include_dashboard=False,
            logging_level=logging.ERROR,
            _temp_dir=str(session.temp_dir),
        )


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Start each process of Ray inside the block in a process group of its own.

    Ctrl-C, the end of a terminal, and SIGTERM of `timeout` and of `kill %1` reach every process of
    the driver's group. Those of Ray must survive them, so that the driver can finish the step and
    save.
    """
    replaced = services.ConsolePopen
    services.ConsolePopen = partial(replaced, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = replaced


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Undo the changes that Ray makes to signal handlers and to the alarm inside the block.

    Ray sets a handler of SIGTERM in Python, which ends the driver without a message. Its native
    code sets another one, which calls Python's and has SIGALRM abort the process after 3 s;
    when it ends, the default action is set.
    """
    replaced = ray_utils.set_sigterm_handler
    ray_utils.set_sigterm_handler = lambda sigterm_handler: None
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    alarm = signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        ray_utils.set_sigterm_handler = replaced
        # Only a main thread can set handlers.
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
            # A SIGTERM inside the block has set the alarm.
            signal.setitimer(signal.ITIMER_REAL, *alarm)


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Have a Ray that starts inside the block listen on 127.0.0.1 alone."""
    # Ray replaces a loopback address by the machine's own, except when it is configured not to
    # form clusters, as on a laptop. Its processes read that from the environment; this process
    # has read it already, so the constant is set as well.
    name = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    environment_before = os.environ.get(name)
    constant_before = ray_constants.ENABLE_RAY_CLUSTER
    os.environ[name] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant_before
        os.environ.pop(name)
        if environment_before is not None:
            os.environ[name] = environment_before


def _check_listening(address: str) -> None:
    """Raise OSError or ValueError for an address without a server; Ray would retry for minutes."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError("it is not of the form host:port")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()


def _one_line(error: Exception) -> str:
    """Return the message without terminal colours and line breaks."""
    text = re.sub(r"\x1b\[\d+m", "", str(error)) or type(error).__name__
    return " ".join(text.split()).rstrip(".")
