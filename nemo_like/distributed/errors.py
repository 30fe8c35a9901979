"""Exceptions of the cluster and of workers, with the cause and advice: the setting to change."""

from __future__ import annotations

import re
from collections.abc import Callable

from nemo_like.config.errors import counted, error_text


class ClusterError(RuntimeError):
    """The cluster cannot be reached, or has not the resources that `cluster.*` requests."""

    num_nodes: int | None = None
    """Nodes of the cluster that have the resources of one node of the run; None if unknown."""


class WorkerFailure(RuntimeError):
    """A worker of a group failed and the other workers were stopped. `str()` is for the user.

    A note is shown with a traceback only, so that `str()` stays one paragraph.
    """

    def __init__(self, message: str, *, group: str, rank: int, method: str, note: str = "") -> None:
        super().__init__(message)
        if note:
            self.add_note(note)
        self.group = group
        self.rank = rank
        self.method = method


class WorkerError(WorkerFailure):
    """A worker raised `cause`; `traceback_text` is the traceback in the worker."""

    def __init__(
        self,
        *,
        group: str,
        rank: int,
        method: str,
        cause: Exception,
        traceback_text: str,
        advice: str = "",
    ) -> None:
        message = f"worker {rank} of the {group} group failed in `{method}`: {error_text(cause)}"
        if advice:
            message += f"\n{advice}"
        note = f"In the worker:\n{traceback_text}"
        super().__init__(message, group=group, rank=rank, method=method, note=note)
        self.cause = cause
        self.traceback_text = traceback_text


class WorkerHung(WorkerFailure):
    """A worker reported no progress for too long and was killed.

    `stack` is the Python stack of its process, empty if unknown; `setting` is the key of the
    deadline.
    """

    def __init__(
        self,
        *,
        group: str,
        rank: int,
        method: str,
        pid: int,
        node: str,
        silent_s: float,
        activity: str,
        state: str,
        stack: str = "",
        setting: str = "cluster.progress_timeout_s",
    ) -> None:
        super().__init__(
            f"worker {rank} of the {group} group (pid {pid} on node {node}) hangs in `{method}`: no"
            f" progress for {silent_s:.0f} s ({setting}); last activity:"
            f" {activity}. {state} The workers of the group were stopped. If the call was only"
            f" slow, raise {setting}.",
            group=group,
            rank=rank,
            method=method,
            note=f"Its stack:\n{stack}" if stack else "",
        )


class WorkerDied(WorkerFailure):
    """A worker's process ended. The note has the last lines of its standard error."""


SAVE_MEMORY = (
    "Give a microbatch fewer tokens (policy.sequence_packing.train_mb_tokens,"
    " policy.dynamic_batching.train_mb_tokens, or policy.train_micro_batch_size without either; for"
    " log-probs the logprob_ settings), set policy.activation_checkpointing to selective or full,"
    " or put fewer workers on a node (cluster.workers_per_node)."
)
SAVE_GENERATION_MEMORY = (
    "If its memory was the cause, lower policy.generation.vllm.max_num_seqs or"
    " policy.generation.vllm.kv_cache_gib, or policy.generation.hf.batch_size."
)
SAVE_REWARD_MODEL_MEMORY = (
    "Give a microbatch fewer tokens (reward.models.NAME.mb_tokens), limit the conversations"
    " (reward.models.NAME.max_length), set reward.models.NAME.precision to bfloat16, or give the"
    " reward model separate workers (reward.models.NAME.num_workers)."
)
_COLLECTIVE = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|broken pipe|socket (timeout|closed)|timed"
    r" out",
    re.IGNORECASE,
)
_DISTRIBUTED_ERRORS = {"DistError", "DistBackendError", "DistNetworkError"}
"""Names of torch.distributed's exceptions, which include NCCL's."""


def is_collective_error(error: BaseException) -> bool:
    """Return True for an exception of torch.distributed's communication.

    Types are compared by name, so that the driver does not import torch.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & _DISTRIBUTED_ERRORS:
        return True
    # Gloo raises plain RuntimeErrors, which only their text identifies.
    if type(error) is not RuntimeError:
        return False
    return _COLLECTIVE.search(str(error)) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or in host memory.

    torch's types are compared by name, so that the driver does not import it.
    """
    is_torch = type(error).__name__ == "OutOfMemoryError"
    # On CPU torch raises a plain RuntimeError.
    on_host = type(error) is RuntimeError and "DefaultCPUAllocator: " in str(error)
    return is_torch or on_host or isinstance(error, MemoryError)


def advise_on_memory(group: str) -> str:
    """Return the settings that lower the memory of a worker of `group`."""
    if group.startswith("reward_model"):
        return SAVE_REWARD_MODEL_MEMORY
    return SAVE_GENERATION_MEMORY if group.startswith("generation") else SAVE_MEMORY


def progress_setting(group: str, method: str) -> str:
    """Return the key of the progress deadline of a call of `method` in `group`."""
    # A constructor loads a model; the generator's deadline applies to a decoding step.
    if group.startswith("generation") and method != "__init__":
        return "policy.generation.progress_timeout_s"
    return "cluster.progress_timeout_s"


def advise(error: Exception, group: str = "") -> str:
    """Return the settings to change for a known exception in `group`; empty for others."""
    if is_out_of_memory(error):
        return advise_on_memory(group)
    if is_collective_error(error) and re.search("timed? ?out", str(error), re.IGNORECASE):
        return (
            "A worker waited for the others until the timeout; if they were only slow, raise"
            " cluster.progress_timeout_s."
        )
    return ""


class Restarts:
    """The restarts of one kind of worker so far, up to `cluster.max_restarts`."""

    def __init__(self, limit: int, report: Callable[[str], None]) -> None:
        """`report` gets a line about each restart."""
        self._limit = limit
        self._report = report
        self.num = 0

    def add(self, worker: str, failure: Exception, *, group: str, rank: int = 0) -> None:
        """Count and report a restart of `worker`, for example `replica 1 of the generator`.

        Raises WorkerFailure of `group` and `rank` beyond the limit.
        """
        if self.num >= self._limit:
            raise WorkerFailure(
                f"{worker} failed after {counted(self.num, 'restart')}, the limit of"
                f" cluster.max_restarts={self._limit}: {failure}",
                group=group,
                rank=rank,
                method="restart",
            ) from failure
        self.num += 1
        self._report(
            f"{worker} failed and is restarted (restart {self.num} of at most {self._limit}):"
            f" {failure}"
        )
