"""The actor class of a `RayWorkerGroup`: one process with one worker."""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from nemo_like.config.text import error_text
from nemo_like.distributed import activity
from nemo_like.distributed.errors import is_collective_error
from nemo_like.distributed.processes import count_oom_kills, machine_id, set_variables
from nemo_like.distributed.ray.heartbeat import start_heartbeat
from nemo_like.distributed.worker_group import WorkerContext


@dataclass(frozen=True, slots=True)
class Location:
    """Node and process of a worker, with the values that a later diagnosis of its end needs."""

    pid: int
    node_id: str
    ip: str
    log_path: str
    """File on its node with the process's standard error."""
    num_oom_kills: int
    """`count_oom_kills` of its node at the start of the worker."""
    machine: str
    """`machine_id` of its process."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a worker raised, in a form that can be sent to the driver."""

    cause: Exception
    traceback_text: str
    is_collective: bool
    """True if a collective was aborted or timed out: most likely a secondary failure, caused by
    the failure of another worker.
    """

    @classmethod
    def from_exception(cls, error: Exception) -> Raised:
        """Convert an exception with its traceback."""
        text = "".join(traceback.format_exception(error))
        return cls(_picklable(error), text, is_collective_error(error))


class WorkerActor:
    """Constructs one worker and calls its methods.

    Exceptions are returned as values: Ray would wrap them, and fail for those it cannot pickle.
    """

    def __init__(
        self,
        label: str,
        num_threads: int,
        heartbeat_key: str,
        progress_timeout_s: float,
        environment: Mapping[str, str | None],
    ) -> None:
        """Prepare the process. With `progress_timeout_s` 0 no heartbeat is sent."""
        # Before the worker's class is imported, and with it the libraries that read them. Not as a
        # runtime environment of Ray, which its logs and its dashboard show: values may be secrets.
        set_variables(environment)
        # Before the first import of torch, which reads these once. Ray would set them to the
        # actor's share of the bundle.
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ["MKL_NUM_THREADS"] = str(num_threads)
        # Only the driver handles Ctrl-C and the end of a terminal: it finishes the step with its
        # workers.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if progress_timeout_s > 0:
            start_heartbeat(heartbeat_key, progress_timeout_s)
        self._label = label
        self._worker: Any = None

    def __repr__(self) -> str:
        # Ray prints it in front of every line of the worker's output.
        return self._label

    def locate(self) -> Location:
        """Return the location of this process."""
        return Location(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            ip=ray.util.get_node_ip_address(),
            log_path=os.path.realpath("/proc/self/fd/2"),
            num_oom_kills=count_oom_kills(),
            machine=machine_id(),
        )

    def choose_port(self) -> int:
        """Return a port of this node that is free now."""
        # Below the kernel's range for outgoing connections (ip_local_port_range), so that none of
        # those takes the port before the rendezvous listens on it.
        candidates = random.SystemRandom().sample(range(20000, 32000), 200)
        return next(port for port in candidates if _is_free(port))

    @ray.method(num_returns=2)
    def build(
        self, worker_class: type, context: WorkerContext, kwargs: Mapping[str, Any]
    ) -> tuple[Raised | None, None]:
        """Construct the worker; return its exception, if any."""
        activity.note("__init__")
        try:
            self._worker = worker_class(context, **kwargs)
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            return Raised.from_exception(error), None
        return None, None

    @ray.method(num_returns=2)
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Raised | None, Any]:
        """Call a method of the worker; return (exception or None, result)."""
        activity.note(method)
        try:
            return None, getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 (the driver raises it)
            return Raised.from_exception(error), None


def _is_free(port: int) -> bool:
    """Return True if a TCP server can listen on the port."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _picklable(error: Exception) -> Exception:
    """Return `error` if it can be pickled and unpickled, else a RuntimeError with its text."""
    try:
        # deepcopy uses the pickle protocol. Unpickling fails for exceptions whose constructor
        # takes other arguments than it passes to Exception.
        copy.deepcopy(error)
    except Exception:  # noqa: BLE001 (whatever its constructor raises)
        return RuntimeError(error_text(error))
    return error
