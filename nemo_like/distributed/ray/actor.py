"""The process side of a `RayWorkerGroup`: the one class that Ray turns into actors, and the worker
inside it.
"""

from __future__ import annotations

import copy
import os
import random
import signal
import socket
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from nemo_like.distributed import activity
from nemo_like.distributed.advice import is_collective_error
from nemo_like.distributed.ray.heartbeat import start_heartbeat
from nemo_like.distributed.worker_group import WorkerContext


@dataclass(frozen=True, slots=True)
class Location:
    """Where a worker's process runs, and what is needed to find out later how it ended."""

    pid: int
    node_id: str
    ip: str
    log_path: str
    """File on its node with the process's standard error."""
    num_oom_kills: int
    """Processes the kernel of its node had killed for memory when the worker started."""
    machine: str
    """`machine_id` of its process: where it is equal, process ids and paths have one meaning."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception on its way from a worker to the driver."""

    cause: Exception
    traceback_text: str
    is_collective: bool
    """It says no more than that a collective broke or timed out: most likely the echo of another
    worker's failure.
    """

    @classmethod
    def of(cls, error: Exception) -> Raised:
        return cls(
            _portable(error), "".join(traceback.format_exception(error)), is_collective_error(error)
        )


class WorkerActor:
    """Holds one worker and calls its methods. Exceptions come back as values, so that none is lost
    on the way.
    """

    def __init__(
        self, label: str, num_threads: int, heartbeat_key: str, progress_timeout_s: float
    ) -> None:
        """`progress_timeout_s` 0 means that nobody watches the progress, and no heartbeat is
        sent.
        """
        # Before anything imports torch, which reads these once. Ray's own choice is the actor's
        # share of the bundle.
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(num_threads)
        # Ctrl-C and the end of a terminal are for the driver, which lets its workers finish the
        # step.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if progress_timeout_s > 0:
            start_heartbeat(heartbeat_key, progress_timeout_s)
        self._label = label
        self._worker: Any = None

    def __repr__(self) -> str:
        return self._label  # Ray puts it before every line the worker prints

    def locate(self) -> Location:
        return Location(
            pid=os.getpid(),
            node_id=ray.get_runtime_context().get_node_id(),
            ip=ray.util.get_node_ip_address(),
            log_path=os.path.realpath("/proc/self/fd/2"),
            num_oom_kills=count_oom_kills(),
            machine=machine_id(),
        )

    def choose_port(self) -> int:
        """A port of this node that is free now.

        Taken below the range the kernel hands out for outgoing connections, so that none of those
        takes it meanwhile.
        """
        candidates = random.SystemRandom().sample(range(20000, 32000), 200)
        return next(port for port in candidates if _is_free(port))

    @ray.method(num_returns=2)
    def build(
        self, worker_class: type, context: WorkerContext, kwargs: Mapping[str, Any]
    ) -> tuple[Raised | None, None]:
        activity.note("__init__")
        try:
            self._worker = worker_class(context, **kwargs)
        except Exception as error:
            return Raised.of(error), None
        return None, None

    @ray.method(num_returns=2)
    def call(self, method: str, /, *args: Any, **kwargs: Any) -> tuple[Raised | None, Any]:
        activity.note(method)
        try:
            return None, getattr(self._worker, method)(*args, **kwargs)
        except Exception as error:
            return Raised.of(error), None


def count_oom_kills() -> int:
    """Processes killed for memory so far in this control group, or else on this machine; 0 if Linux
    does not tell.
    """
    for path in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        if path.exists():
            for name, count in map(str.split, path.read_text().splitlines()):
                if name == "oom_kill":
                    return int(count)
    return 0


def machine_id() -> str:
    """Names the machine and the process and mount namespaces that this process runs in."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return " ".join((boot_id, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/mnt")))


def process_state(pid: int) -> str:
    """The state letter of a process (R, S, D, T, Z ...) as in proc(5); empty if it does not
    exist.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _portable(error: Exception) -> Exception:
    """`error` itself if it survives being taken apart and put together again, else one of the same
    text that does.
    """
    try:
        copy.deepcopy(error)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
