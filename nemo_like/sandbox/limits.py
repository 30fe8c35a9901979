"""Limits of a program in the sandbox, and the result of its run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["ok", "error", "signal", "timeout", "memory", "output", "disk", "left_processes"]
"""How a program ended: see `SandboxResult.reason`."""


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Limits of one program, all of its processes together unless stated otherwise."""

    wall_s: float = 10.0
    """Seconds from the start to the end."""
    cpu_s: float = 10.0
    """Seconds of CPU time of each process."""
    memory_mb: int = 512
    """MiB of address space of each process, and of resident memory of all of them."""
    scratch_mb: int = 32
    """MiB of files, and of each file."""
    max_processes: int = 32
    """Processes and threads at a time."""
    max_open_files: int = 64
    """Open files of each process."""
    max_output_bytes: int = 1 << 20
    """Bytes of stdout and stderr together, after which the program is killed."""
    max_kept_bytes: int = 1 << 16
    """Bytes of stdout and of stderr that the result has; the rest is read and discarded."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name} is {value}; it must be above 0")


@dataclass(frozen=True, kw_only=True)
class SandboxResult:
    """The end of a program.

    Example: `SandboxResult(reason="ok", exit_status=0, stdout="4", ..., seconds=0.03)`.
    """

    reason: Reason
    """`ok`: exit status 0. `error`: another exit status. `signal`: ended by a signal. `timeout`,
    `memory`, `output`, `disk`: exceeded the limit of this name. `left_processes`: ended while
    processes that it had started were running; they were killed."""
    exit_status: int | None
    """None if a signal ended it."""
    signal: int | None
    """Number of the signal that ended it."""
    stdout: str
    """The first `max_kept_bytes`."""
    stderr: str
    """The first `max_kept_bytes`."""
    report: str
    """What the program wrote to file descriptor 3."""
    seconds: float
    """Wall-clock time of the program."""
    cpu_s: float
    """CPU time of the program and of its children that ended before it."""
    max_rss_mb: float
    """Largest resident memory of one of its processes, MiB."""

    @property
    def is_ok(self) -> bool:
        """True if the program exited with status 0 within its limits."""
        return self.reason == "ok"

    def summary(self) -> str:
        """Return the end of the program in one line. Example: `timeout after 10.0 s`."""
        if self.reason == "error":
            lines = self.stderr.strip().splitlines() or [""]
            return f"exit status {self.exit_status}: {lines[-1][:200]}".rstrip(": ")
        if self.reason == "signal":
            return f"ended by signal {self.signal} after {self.seconds:.1f} s"
        if self.reason == "left_processes":
            return "left processes behind, which were killed"
        if self.reason == "ok":
            return f"ended after {self.seconds:.1f} s"
        return f"exceeded the limit on {_LIMIT_NAMES[self.reason]} after {self.seconds:.1f} s"


_LIMIT_NAMES = {"timeout": "time", "memory": "memory", "output": "output", "disk": "files"}
