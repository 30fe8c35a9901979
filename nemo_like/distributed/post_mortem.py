"""Why a call failed. Of a process that ended: Ray's report, the last lines of its log and the kernel's counters."""

from __future__ import annotations

import re
from collections import deque
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

from nemo_like.distributed.errors import WorkerDied, WorkerError, WorkerFailure
from nemo_like.distributed.worker_actor import Location, Raised, count_oom_kills, is_collective_error

_LOG_LINES = 20
_LOG_CHARACTERS = 300
_POST_MORTEM_TIMEOUT_S = 15.0
_COLOUR = re.compile(r"\x1b\[\d+m")
_CRASH = re.compile(r"Fatal Python error: ([^\n]+)|(terminate called[^\n]*)|\*\*\* (SIG[A-Z]+)")

_SAVE_MEMORY = (
    "Give a microbatch fewer tokens (policy.sequence_packing.train_mb_tokens, policy.dynamic_batching.train_mb_tokens,"
    " or policy.train_micro_batch_size without either; for scoring their logprob_ twins), turn"
    " policy.activation_checkpointing on, or put fewer workers on a node (cluster.workers_per_node)."
)
_CRASHED = "A native library failed in it; with cluster.backend=local a debugger sees the same in one process."


@dataclass(frozen=True, slots=True)
class Failure:
    """One call that failed on one worker."""

    rank: int
    method: str
    error: Raised | RayError
    """What the worker raised, or what Ray says of its process."""

    @property
    def is_secondary(self) -> bool:
        """Whether it is most likely the echo of another worker's failure."""
        return isinstance(self.error, Raised) and self.error.is_collective


def failure_of(ended: ObjectRef, rank: int, method: str) -> Failure | None:
    """How a call failed, or None if it did not: `ended` refers to its outcome, or to its result."""
    try:
        value = ray.get(ended)
    except RayTaskError as error:  # outside the worker's method: an argument or a result that cannot be (un)pickled
        cause = error.cause if isinstance(error.cause, Exception) else error
        return Failure(rank, method, Raised(cause, _COLOUR.sub("", str(error)), is_collective=False))
    except (RayActorError, OutOfMemoryError, NodeDiedError, WorkerCrashedError) as error:
        return Failure(rank, method, error)
    except RayError as error:
        return Failure(rank, method, Raised(error, str(error), is_collective=False))
    return Failure(rank, method, value) if isinstance(value, Raised) else None


def explain(failure: Failure, group: str, location: Location) -> WorkerFailure:
    """The failure as a user should see it."""
    if isinstance(failure.error, RayError):
        return _died(failure, group, location, str(failure.error))
    return WorkerError(
        group=group,
        rank=failure.rank,
        method=failure.method,
        cause=failure.error.cause,
        traceback_text=failure.error.traceback_text,
        advice=advise(failure.error.cause),
    )


def diagnose(report: str, log_tail: str, num_oom_kills: int) -> tuple[str, str]:
    """(cause, advice) from Ray's report, the log's last lines and the kernel's kills for memory in the worker's time."""
    crash = _CRASH.search(log_tail)
    exit_code = re.search(r"exit code (\d+)", report)
    if re.search(r"low on memory|memory pressure", report):
        return "Ray killed it because its node was running out of memory", _SAVE_MEMORY
    if num_oom_kills > 0:
        return "the kernel killed it because memory ran out", _SAVE_MEMORY
    if crash is not None:
        what = next(text for text in crash.groups() if text)
        if what in ("Bus error", "SIGBUS"):
            return f"it crashed ({what}), as happens when /dev/shm is full", "Give the container a larger /dev/shm."
        return f"it crashed ({what})", _CRASHED
    if exit_code is not None:
        return f"it ended itself with exit code {exit_code.group(1)}", "Something it imports calls sys.exit."
    if "ray.kill" in report:
        return "it was stopped through Ray (ray.kill)", "Nothing in this run does that to a worker in use."
    return (
        "it ended without a word, as after SIGKILL; most often a container's or a scheduler's memory limit",
        _SAVE_MEMORY,
    )


def advise(error: Exception) -> str:
    """What to change for an exception that has a known way out; empty for others."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return _SAVE_MEMORY
    if is_collective_error(error) and re.search("timed? ?out", str(error), re.IGNORECASE):
        return "A worker waited in vain for the others; if they were only slow, raise cluster.collective_timeout_s."
    return ""


def _died(failure: Failure, group: str, location: Location, report: str) -> WorkerDied:
    evidence = _ask_node(location)
    if evidence is None:
        log_tail, cause, advice = (
            "",
            "its node left the cluster",
            "Look at that machine, or take it out of the cluster.",
        )
    else:
        log_tail, num_oom_kills = evidence
        cause, advice = diagnose(report, log_tail, num_oom_kills - location.num_oom_kills)
    return WorkerDied(
        group=group,
        rank=failure.rank,
        method=failure.method,
        pid=location.pid,
        node=location.ip,
        cause=cause,
        advice=advice,
        log_tail=log_tail,
    )


def _ask_node(location: Location) -> tuple[str, int] | None:
    """The worker's last log lines and the node's count of memory kills; None if the node does not answer."""
    task = ray.remote(_read_evidence).options(
        num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(location.node_id, soft=False)
    )
    try:
        return ray.get(task.remote(location.log_path), timeout=_POST_MORTEM_TIMEOUT_S)
    except RayError:
        return None


def _read_evidence(log_path: str) -> tuple[str, int]:
    path = Path(log_path)
    lines: deque[str] = deque(maxlen=_LOG_LINES)
    if path.is_file():
        with path.open(errors="replace") as file:
            lines.extend(line[:_LOG_CHARACTERS] for line in file if not line.startswith((":job_id:", ":actor_name:")))
    return "\n".join(line.rstrip("\n") for line in lines).strip(), count_oom_kills()
