"""Exceptions of the cluster and of workers, with the cause and the setting to change."""

from __future__ import annotations

from nemo_like.config.text import error_text


class ClusterError(RuntimeError):
    """The cluster cannot be reached, or has not the resources that `cluster.*` requests."""


class WorkerFailure(RuntimeError):
    """A worker of a group failed and the other workers were stopped. `str()` is for the user."""

    def __init__(self, message: str, *, group: str, rank: int, method: str) -> None:
        super().__init__(message)
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
        super().__init__(message, group=group, rank=rank, method=method)
        # A note instead of a part of the message, so that `str()` stays one paragraph.
        self.cause = cause
        self.traceback_text = traceback_text
        self.add_note(f"In the worker:\n{traceback_text}")


class WorkerHung(WorkerFailure):
    """A worker reported no progress for too long and was killed.

    `stack` is the stack of its main thread, empty if unknown; `setting` is the key of the deadline.
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
        )
        self.pid = pid
        self.node = node
        self.stack = stack
        if stack:
            self.add_note(f"The stack of its main thread:\n{stack}")


class WorkerDied(WorkerFailure):
    """A worker's process ended. `log_tail` has the last lines of its standard error."""

    def __init__(
        self,
        *,
        group: str,
        rank: int,
        method: str,
        pid: int,
        node: str,
        cause: str,
        advice: str,
        log_tail: str = "",
    ) -> None:
        super().__init__(
            f"worker {rank} of the {group} group (pid {pid} on node {node}) died in `{method}`:"
            f" {cause}. {advice} The other workers of the group were stopped.",
            group=group,
            rank=rank,
            method=method,
        )
        self.pid = pid
        self.node = node
        self.cause = cause
        self.log_tail = log_tail
        if log_tail:
            self.add_note(f"The last lines of its log:\n{log_tail}")
