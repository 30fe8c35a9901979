"""Failed and hung workers: detection of a hung one, and diagnosis of a failed call.

Every worker process has a thread that writes its last activity to the key-value store of the Ray
cluster. The driver reads it while it waits for calls. If the activity advances the worker is slow;
if only the thread's own counter advances the worker hangs; if neither does, its process is stopped,
or native code holds the interpreter.

The end of a process is explained by Ray's report, the last lines of the process's log and the
kernel's counters.
"""

from __future__ import annotations

import copy
import json
import os
import re
import secrets
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from ray.experimental import internal_kv
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_like.config.errors import error_text
from nemo_like.distributed import activity, stacks
from nemo_like.distributed.activity import count_oom_kills, machine_id, process_state, reason_of_end
from nemo_like.distributed.errors import (
    SAVE_MEMORY,
    WorkerDied,
    WorkerError,
    WorkerFailure,
    WorkerHung,
    advise,
    advise_on_memory,
    is_collective_error,
    progress_setting,
)

_PREFIX = "nemo_like/heartbeat/"
_MAX_PERIOD_S = 30.0
_MIN_PERIOD_S = 0.5
_MAX_MISSED = 3
"""Number of missing heartbeats after which a process counts as not responding."""
_CHECK_S = 0.01
"""Seconds between two checks of a group for each of its workers, whose reading takes about 0.2 ms.
"""
_MAX_POLL_S = 5.0
"""Maximum delay between the loss of the head, or a missed deadline, and its detection."""
_LOG_LINES = 50
"""The name of the signal of a crash is above the stack, which is often deeper than 20 calls."""
_LOG_CHARACTERS = 300
ANSWER_TIMEOUT_S = 60.0
"""Time for a node to start a process that reads the evidence; half a minute on a busy node."""
_EXIT_S = 2.0
_COLOUR = re.compile(r"\x1b\[\d+m")
_CRASH = re.compile(r"Fatal Python error: ([^\n]+)|(terminate called[^\n]*)|\*\*\* (SIG[A-Z]+)")

_CRASH_ADVICE = (
    "A native library failed in it; with cluster.backend=local the same happens in one process, to"
    " which a debugger can be attached."
)
_LOST_NODE = ("its node left the cluster", "Check that machine, or remove it from the cluster.")
_KILLED_CAUSE = (
    "its process ended without a message, as after SIGKILL (kill -9, or the memory limit of a"
    " container or scheduler); the kernel of its node counted no kill for memory"
)


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
    raylet_pid: int = 0
    """The process of Ray that manages its node; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception that a worker raised, in a form that can be sent to the driver."""

    cause: Exception
    traceback_text: str
    is_collective: bool
    """True if a collective was aborted or timed out: most likely a secondary failure, caused by
    the failure of another worker.
    """
    collective: str = ""
    """That collective."""

    @classmethod
    def from_exception(cls, error: Exception) -> Raised:
        """Convert an exception with its traceback."""
        text = "".join(traceback.format_exception(error))
        is_collective = is_collective_error(error)
        collective = stacks.last_collective() if is_collective else ""
        return cls(_picklable(error), text, is_collective, collective)


def _picklable(error: Exception) -> Exception:
    """Return `error` if it can be pickled and unpickled, else a RuntimeError with its text."""
    try:
        # deepcopy uses the pickle protocol. Unpickling fails for exceptions whose constructor
        # takes other arguments than it passes to Exception.
        copy.deepcopy(error)
    except Exception:  # noqa: BLE001 (whatever its constructor raises)
        return RuntimeError(error_text(error))
    return error


def period_s(timeout_s: float) -> float:
    """Return the seconds between heartbeats for a progress deadline of `timeout_s`."""
    return min(_MAX_PERIOD_S, max(_MIN_PERIOD_S, timeout_s / 10))


def start_heartbeat(key: str, timeout_s: float) -> None:
    """Report this process's activity under `key` from a thread, until the process ends."""

    def report() -> None:
        beat = 0
        while True:
            beat += 1
            last = activity.last()
            idle_s = time.monotonic() - last.time_s
            # Only when it may be needed: the stack of a busy process is of no use and costs time.
            stack = activity.active_stack() if idle_s > timeout_s / 2 else ""
            record = {"beat": beat, "count": last.num_notes, "text": last.text, "stack": stack}
            if stacks.is_in_collective(stack):
                record["collective"] = stacks.last_collective()
            with suppress(Exception):  # the head is unreachable; the driver detects that itself
                internal_kv._internal_kv_put(
                    key.encode(), json.dumps(record).encode(), overwrite=True
                )
            time.sleep(period_s(timeout_s))

    # A thread of Python: it stops with the process, and while native code has the GIL.
    threading.Thread(target=report, daemon=True, name="heartbeat").start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """A worker that reported no progress.

    Example: `Silence(rank=1, silent_s=1800.2, responds=True, text="train, microbatch 3 of 8")`.
    """

    rank: int
    silent_s: float
    responds: bool
    """True if its process still sends heartbeats."""
    text: str
    """Its last activity."""
    stack: str = ""
    collective: str = ""
    """The collective in which it waits for others."""


@dataclass(slots=True)
class _LastReport:
    """The last known progress of one worker; times are of the driver's monotonic clock.

    The clocks of the nodes are not compared.
    """

    count: int = -1
    progressed_s: float = 0.0
    beat: int = -1
    beat_s: float = 0.0
    text: str = "none reported"
    stack: str = ""
    collective: str = ""


@dataclass
class ProgressMonitor:
    """The driver's side: checks the progress of the workers whose calls it waits for."""

    group: str
    timeout_s: float
    """The progress deadline; 0 means none."""
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    _reports: dict[int, _LastReport] = field(default_factory=dict)
    _next_check_s: float = 0.0

    @property
    def poll_s(self) -> float:
        """Seconds that the driver may wait between two checks."""
        if self.timeout_s <= 0:
            return _MAX_POLL_S
        return min(_MAX_POLL_S, period_s(self.timeout_s))

    @property
    def _check_interval_s(self) -> float:
        # A check reads one record per rank from the head, so it is not made at every poll.
        return max(self.poll_s, _CHECK_S * len(self._reports))

    def key(self, rank: int) -> str:
        """Return the key under which the worker of `rank` reports."""
        return f"{_PREFIX}{self.group}-{self.token}/{rank}"

    def start_waiting(self, ranks: Iterable[int]) -> None:
        """Restart the deadline of these workers."""
        now = time.monotonic()
        for rank in ranks:
            # A worker that was idle since the last call has not been silent.
            report = self._reports.setdefault(rank, _LastReport())
            report.progressed_s = now
            report.beat_s = now
        # Never later: calls of some workers, or of none, must not delay the check of the others.
        self._next_check_s = min(self._next_check_s, now + self._check_interval_s)

    def check(self, ranks: Iterable[int]) -> Silence | None:
        """Return the worker that most likely hangs, if one of `ranks` is past the deadline."""
        if self.timeout_s <= 0 or time.monotonic() < self._next_check_s:
            return None
        self._next_check_s = time.monotonic() + self._check_interval_s
        return self.longest_silence(ranks, min_silent_s=self.timeout_s)

    def longest_silence(self, ranks: Iterable[int], *, min_silent_s: float) -> Silence | None:
        """Return the worker with the longest silence of at least `min_silent_s`, if any.

        A worker that does not respond comes first, and one that waits in a collective last: others
        wait for a worker that is not there.
        """
        if self.timeout_s <= 0:
            return None
        silences = [self._update(rank) for rank in ranks]
        too_long = [silence for silence in silences if silence.silent_s >= min_silent_s]
        return max(
            too_long,
            key=lambda each: (not each.responds, not each.collective, each.silent_s),
            default=None,
        )

    def waiting_text(self, missing: int) -> str:
        """Return which other worker waits in which collective; empty if none is known to."""
        for rank, report in self._reports.items():
            if rank != missing and report.collective:
                return waiting_text(rank, report.collective)
        return ""

    def close(self, num_ranks: int) -> None:
        """Remove the records of the group."""
        if self.timeout_s > 0:
            for rank in range(num_ranks):
                with suppress(Exception):  # the cluster is gone, and the records with it
                    internal_kv._internal_kv_del(self.key(rank).encode())

    def _update(self, rank: int) -> Silence:
        """Read the worker's record and return how long it has reported no progress."""
        report = self._reports.setdefault(rank, _LastReport())
        now = time.monotonic()
        value = internal_kv._internal_kv_get(self.key(rank).encode())
        # Without a record yet the clock runs from `start_waiting`.
        if value is not None:
            record = json.loads(value)
            # Only changes count: times of the worker's own clock are not compared with this one.
            if record["count"] != report.count:
                report.count = record["count"]
                report.progressed_s = now
            if record["beat"] != report.beat:
                report.beat = record["beat"]
                report.beat_s = now
            report.text = record["text"]
            report.stack = record["stack"]
            report.collective = record.get("collective", "")
        return Silence(
            rank=rank,
            silent_s=now - report.progressed_s,
            responds=now - report.beat_s <= _MAX_MISSED * period_s(self.timeout_s),
            text=report.text,
            stack=report.stack,
            collective=report.collective,
        )


def waiting_text(rank: int, collective: str) -> str:
    """Return the sentence about a worker that waits in a collective."""
    return f"Worker {rank} waited for it in {collective}." if collective else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """State of a worker's process and of its node, for a diagnosis."""

    log_tail: str = ""
    """The last lines of its standard error."""
    num_oom_kills: int = 0
    """`count_oom_kills` of the node."""
    process_state: str = ""
    """The kernel's state letter of the process (R, S, D, T, Z); empty if it is gone."""
    has_raylet: bool = True
    """The process of Ray that manages the node is alive."""

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


def explain_hung(
    silence: Silence, group: str, method: str, location: Location, waiting: str = ""
) -> WorkerHung:
    """Return the exception for a worker that reported no progress for too long.

    `waiting` is the sentence about another worker that waits for it.
    """
    evidence = None if silence.responds else collect_evidence(location)
    # The last stack of a process that does not respond is from before.
    stack = silence.stack
    if evidence is not None and evidence.is_running:
        stack = _on_node(location, stacks.stack_of, location.pid, location.log_path) or stack
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
    if call := stacks.innermost(stack):
        state += f" Its innermost call is {call}."
    if waiting:
        state += f" {waiting}"
    return WorkerHung(
        group=group,
        rank=silence.rank,
        method=method,
        pid=location.pid,
        node=location.ip,
        silent_s=silence.silent_s,
        activity=silence.text,
        state=state,
        stack=stack,
        setting=progress_setting(group, method),
    )


def kill_process(location: Location) -> None:
    """Kill a worker's process, also one that is stopped (SIGSTOP).

    Does nothing if its node does not answer.
    """
    _on_node(location, _kill, location.pid)


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
    if evidence is not None and not evidence.has_raylet:
        # Its processes end with it, in several ways.
        return _LOST_NODE
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
    if evidence is None:
        return None
    # Ray reports a lost connection and a dead process in the same words.
    if evidence.is_running:
        return (
            "Ray lost the connection to its process, which still ran",
            "Check the network between the nodes.",
        )
    return _KILLED_CAUSE, SAVE_MEMORY


def _explain_death(failure: Failure, group: str, location: Location, report: str) -> WorkerDied:
    evidence = None
    # Ray may notice the loss of the node while the evidence is collected.
    if not _is_alive(location) or (
        (evidence := collect_evidence(location)) is None and not _is_alive(location)
    ):
        cause, advice = _LOST_NODE
    else:
        num_oom_kills = 0
        if evidence is not None:
            num_oom_kills = evidence.num_oom_kills - location.num_oom_kills
        diagnosis = diagnose(report, evidence, num_oom_kills)
        cause, advice = diagnosis or _unknown_cause(location, report)
        if advice == SAVE_MEMORY:
            # The settings that save memory are others in a generation worker.
            advice = advise_on_memory(group)
    message = (
        f"worker {failure.rank} of the {group} group (pid {location.pid} on node {location.ip})"
        f" died in `{failure.method}`: {cause}. {advice} The other workers of the group were"
        " stopped."
    )
    log = "" if evidence is None else evidence.log_tail
    return WorkerDied(
        message,
        group=group,
        rank=failure.rank,
        method=failure.method,
        note=f"The last lines of its log:\n{log}" if log else "",
    )


def _is_alive(location: Location) -> bool:
    """Return True if the node is in the cluster."""
    return location.node_id in {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _unknown_cause(location: Location, report: str) -> tuple[str, str]:
    """Return (cause, advice) if neither Ray nor the node reported the cause."""
    cause = f"cause unknown, its node did not answer within {ANSWER_TIMEOUT_S:g} s"
    lines = [line.strip() for line in report.splitlines() if line.strip()]
    if lines:
        cause += f"; Ray reports: {lines[-1][:_LOG_CHARACTERS]}"
    return cause, f"The log of the process is {location.log_path} on {location.ip}."


def collect_evidence(location: Location) -> Evidence | None:
    """Read the evidence on the worker's node; None if the node does not answer in time."""
    return _on_node(location, read_evidence, location.log_path, location.pid, location.raylet_pid)


def _on_node(location: Location, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on a worker's node; return None if the node does not answer in time."""
    # Without a Ray task where possible: a busy node may be too slow to start one.
    if location.machine == machine_id():
        return function(*args)
    task = ray.remote(function).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(location.node_id, soft=False),
    )
    try:
        return ray.get(task.remote(*args), timeout=ANSWER_TIMEOUT_S)
    except RayError:
        return None


def read_evidence(log_path: str, pid: int, raylet_pid: int = 0) -> Evidence:
    """Return the evidence for process `pid` of this machine."""
    path = Path(log_path)
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    if path.is_file():
        with path.open(errors="replace") as file:
            # Ray writes these lines for its own log files.
            markers = (":job_id:", ":actor_name:")
            # A deque: only the last lines of a log of any size stay in memory.
            lines.extend(line[:_LOG_CHARACTERS] for line in file if not line.startswith(markers))
    return Evidence(
        log_tail="\n".join(line.rstrip("\n") for line in lines).strip(),
        num_oom_kills=count_oom_kills(),
        process_state=_settled_state(pid),
        has_raylet=raylet_pid == 0 or process_state(raylet_pid) not in ("", "Z", "X"),
    )


def _settled_state(pid: int) -> str:
    """Return the state letter of a process, after waiting up to 2 s for its end."""
    # The connections of a process close before it is gone, and Ray reports the closed connection.
    deadline = time.monotonic() + _EXIT_S
    while process_state(pid) not in ("", "Z", "X", "T") and time.monotonic() < deadline:
        time.sleep(0.05)
    return process_state(pid)
