"""Diagnosis of failed calls: a worker's exception, or the end of its process.

The end of a process is explained by Ray's report, the last lines of the process's log and the
kernel's counters.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import ObjectRef
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_like.distributed.errors import (
    SAVE_MEMORY,
    WorkerDied,
    WorkerError,
    WorkerFailure,
    WorkerHung,
    advise,
    advise_on_memory,
    progress_setting,
)
from nemo_like.distributed.processes import (
    count_oom_kills,
    machine_id,
    process_state,
    reason_of_end,
)
from nemo_like.distributed.ray.actor import Location, Raised
from nemo_like.distributed.ray.heartbeat import Silence

_LOG_LINES = 50
"""The name of the signal of a crash is above the stack, which is often deeper than 20 calls."""
_LOG_CHARACTERS = 300
ANSWER_TIMEOUT_S = 60.0
"""Time for a node to start a process that reads the evidence; half a minute on a busy node."""
_NODES_TIMEOUT_S = 10.0
_EXIT_S = 2.0
_FULL_BYTES = 2**20
_COLOUR = re.compile(r"\x1b\[\d+m")
_CRASH = re.compile(r"Fatal Python error: ([^\n]+)|(terminate called[^\n]*)|\*\*\* (SIG[A-Z]+)")

_CRASH_ADVICE = (
    "A native library failed in it; with cluster.backend=local the same happens in one process, to"
    " which a debugger can be attached."
)
_KILLED_CAUSE = (
    "its process ended without a message, as after SIGKILL (kill -9, or the memory limit of a"
    " container or scheduler); the kernel of its node counted no kill for memory"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """State of a worker's process and of its node, for a diagnosis."""

    log_tail: str = ""
    """The last lines of its standard error."""
    num_oom_kills: int = 0
    """`count_oom_kills` of the node."""
    full_directory: str = ""
    """A directory on a full disk that the process writes to; empty if there is none."""
    process_state: str = ""
    """The kernel's state letter of the process (R, S, D, T, Z); empty if it is gone."""

    @property
    def is_running(self) -> bool:
        return self.process_state not in ("", "Z", "X")


@dataclass(frozen=True, slots=True)
class Failure:
    """One call that failed on one worker."""

    rank: int
    method: str
    error: Raised | RayError
    """The exception of the worker, or Ray's report on its process."""

    @property
    def is_secondary(self) -> bool:
        """True for an aborted collective: most likely a consequence of another worker's failure."""
        return isinstance(self.error, Raised) and self.error.is_collective


def failure_of(ended: ObjectRef, rank: int, method: str) -> Failure | None:
    """Return the failure of a call, or None; `ended` refers to its outcome or to its result."""
    try:
        value = ray.get(ended)
    except RayTaskError as error:
        # Outside the worker's method: an argument or a result that cannot be (un)pickled.
        cause = error.cause if isinstance(error.cause, Exception) else error
        text = _COLOUR.sub("", str(error))
        return Failure(rank, method, Raised(cause, text, is_collective=False))
    except (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError) as error:
        return Failure(rank, method, error)
    except RayError as error:
        return Failure(rank, method, Raised(error, str(error), is_collective=False))
    return Failure(rank, method, value) if isinstance(value, Raised) else None


def explain(failure: Failure, group: str, location: Location) -> WorkerFailure:
    """Return the exception to show to the user."""
    if isinstance(failure.error, RayError):
        return _explain_death(failure, group, location, str(failure.error))
    return WorkerError(
        group=group,
        rank=failure.rank,
        method=failure.method,
        cause=failure.error.cause,
        traceback_text=failure.error.traceback_text,
        advice=advise(failure.error.cause, group),
    )


def explain_hung(silence: Silence, group: str, method: str, location: Location) -> WorkerHung:
    """Return the exception for a worker that reported no progress for too long."""
    evidence = None if silence.responds else collect_evidence(location)
    if silence.responds:
        state = "Its process still answers, so its main thread waits or loops."
    elif evidence is None:
        state = "Neither its process nor its node answers."
    elif evidence.process_state in ("T", "t"):
        state = "Its process does not respond: it is stopped (SIGSTOP or a debugger)."
    else:
        state = (
            f"Its process does not respond (state {evidence.process_state or 'gone'}): native code"
            " holds the interpreter, or the machine is overloaded."
        )
    return WorkerHung(
        group=group,
        rank=silence.rank,
        method=method,
        pid=location.pid,
        node=location.ip,
        silent_s=silence.silent_s,
        activity=silence.text,
        state=state,
        stack=silence.stack,
        setting=progress_setting(group, method),
    )


def kill_process(location: Location) -> None:
    """Kill a worker's process, also one that is stopped (SIGSTOP).

    Does nothing if its node does not answer.
    """
    # Without a Ray task where possible: a busy node may be too slow to start one.
    if location.machine == machine_id():
        _kill(location.pid)
        return
    task = ray.remote(_kill).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(location.node_id, soft=False),
    )
    with suppress(RayError):
        ray.get(task.remote(location.pid), timeout=ANSWER_TIMEOUT_S)


def _kill(pid: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def diagnose(report: str, evidence: Evidence | None, num_oom_kills: int) -> tuple[str, str] | None:
    """Return (cause, advice) for a process that ended, or None if the cause is unknown.

    `report` is Ray's text. `num_oom_kills` counts the kernel's kills for memory on the worker's
    node since the worker started. The most specific evidence is tested first.
    """
    crash = _CRASH.search(evidence.log_tail) if evidence is not None else None
    exit_code = re.search(r"exit code (\d+)", report)
    if re.search(r"low on memory|memory pressure", report):
        return "Ray killed it because its node was running out of memory", SAVE_MEMORY
    if num_oom_kills > 0:
        return "the kernel killed it because memory ran out", SAVE_MEMORY
    if crash is not None:
        reason = next(text for text in crash.groups() if text)
        if reason in ("Bus error", "SIGBUS"):
            cause = f"it crashed ({reason}), as happens when /dev/shm is full"
            return cause, "Give the container a larger /dev/shm."
        return f"it crashed ({reason})", _CRASH_ADVICE
    reason = reason_of_end(evidence.log_tail) if evidence is not None else ""
    if reason:
        return f"it ended itself because {reason}", "Its log may have more."
    if "SIGTERM" in report:
        return (
            "it received SIGTERM",
            "Something outside the run stops processes on its node, for example a job scheduler.",
        )
    if exit_code is not None:
        code = exit_code.group(1)
        return f"it ended itself with exit code {code}", "Something it imports calls sys.exit."
    if "ray.kill" in report:
        advice = "Nothing in this run does that to a worker in use."
        return "it was stopped through Ray (ray.kill)", advice
    if evidence is None:
        return None
    if evidence.full_directory:
        return f"it ended while the disk of {evidence.full_directory} was full", "Free some space."
    # Ray reports a lost connection and a dead process in the same words.
    if evidence.is_running:
        return (
            "Ray lost the connection to its process, which still ran",
            "Check the network between the nodes.",
        )
    return _KILLED_CAUSE, SAVE_MEMORY


def _explain_death(failure: Failure, group: str, location: Location, report: str) -> WorkerDied:
    evidence = None
    if _is_node_alive(location.node_id) is False:
        cause = "its node left the cluster"
        advice = "Check that machine, or remove it from the cluster."
    else:
        evidence = collect_evidence(location)
        num_oom_kills = 0
        if evidence is not None:
            num_oom_kills = evidence.num_oom_kills - location.num_oom_kills
        diagnosis = diagnose(report, evidence, num_oom_kills)
        cause, advice = diagnosis or _unknown_cause(location, report)
        if advice == SAVE_MEMORY:
            # The settings that save memory are others in a generation worker.
            advice = advise_on_memory(group)
    return WorkerDied(
        group=group,
        rank=failure.rank,
        method=failure.method,
        pid=location.pid,
        node=location.ip,
        cause=cause,
        advice=advice,
        log_tail="" if evidence is None else evidence.log_tail,
    )


def _unknown_cause(location: Location, report: str) -> tuple[str, str]:
    """Return (cause, advice) if neither Ray nor the node reported the cause."""
    cause = f"cause unknown, its node did not answer within {ANSWER_TIMEOUT_S:g} s"
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    if lines:
        cause += f"; Ray reports: {lines[-1][:_LOG_CHARACTERS]}"
    return cause, f"The log of the process is {location.log_path} on {location.ip}."


def _is_node_alive(node_id: str) -> bool | None:
    """Return the node's state in the cluster; None if the cluster's head does not answer."""
    answers: list[bool] = []

    def query() -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        answers.append(node_id in alive)

    # In a thread, because the call blocks for a minute when the head is gone.
    thread = threading.Thread(target=query, daemon=True, name="node-state")
    thread.start()
    thread.join(_NODES_TIMEOUT_S)
    return answers[0] if answers else None


def collect_evidence(location: Location) -> Evidence | None:
    """Read the evidence on the worker's node; None if the node does not answer in time."""
    # On this machine without a Ray task: a busy node may need longer than the time limit to start
    # a process for it.
    if location.machine == machine_id():
        return read_evidence(location.log_path, location.pid)
    task = ray.remote(read_evidence).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(location.node_id, soft=False),
    )
    try:
        return ray.get(task.remote(location.log_path, location.pid), timeout=ANSWER_TIMEOUT_S)
    except RayError:
        return None


def read_evidence(log_path: str, pid: int) -> Evidence:
    """Return the evidence for process `pid` of this machine."""
    path = Path(log_path)
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    if path.is_file():
        with path.open(errors="replace") as file:
            # Ray writes these lines for its own log files.
            markers = (":job_id:", ":actor_name:")
            # A deque: only the last lines of a log of any size stay in memory.
            lines.extend(line[:_LOG_CHARACTERS] for line in file if not line.startswith(markers))
    full_directory = ""
    # A full disk ends processes that write files; a full /dev/shm those that use shared memory.
    for directory in (path.parent, Path("/dev/shm")):
        if directory.is_dir() and shutil.disk_usage(directory).free < _FULL_BYTES:
            full_directory = str(directory)
            break
    return Evidence(
        log_tail="\n".join(line.rstrip("\n") for line in lines).strip(),
        num_oom_kills=count_oom_kills(),
        full_directory=full_directory,
        process_state=_settled_state(pid),
    )


def _settled_state(pid: int) -> str:
    """Return the state letter of a process, after waiting up to 2 s for its end."""
    # The connections of a process close before it is gone, and Ray reports the closed connection.
    deadline = time.monotonic() + _EXIT_S
    while process_state(pid) not in ("", "Z", "X", "T") and time.monotonic() < deadline:
        time.sleep(0.05)
    return process_state(pid)
