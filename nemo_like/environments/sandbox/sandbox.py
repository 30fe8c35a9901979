"""Runs untrusted Python programs: one supervisor process per program; see docs/sandbox.md."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from nemo_like.environments.sandbox.isolation import CLEAN_UP_S, remove_scratch
from nemo_like.environments.sandbox.supervisor import encode

logger = logging.getLogger(__name__)

Requirement = Literal["isolated", "limits"]
"""`isolated` refuses to run a program that could read or write files of the user, reach a network
or signal other processes. `limits` runs it with what is available, and warns."""

Mechanism = Literal["namespaces", "network", "seccomp", "landlock", "user"]
"""See `nemo_like.environments.sandbox.isolation.probe`."""

Reason = Literal["ok", "error", "signal", "timeout", "memory", "output", "disk", "left_processes"]
"""How a program ended: see `SandboxResult.reason`."""

_PACKAGE_PARENT = str(Path(__file__).parents[3])
_SUPERVISE = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from nemo_like.environments.sandbox.supervisor import main; main()"
)
_SYSTEM_PATHS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache")
_PROGRAM = "program.py"
# No directory of the program on the path, no user or other installed packages, no bytecode. Not
# -I, which would ignore PYTHONHASHSEED.
_FLAGS = ("-P", "-s", "-S", "-B")
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # A program that writes to its home directory fails.
    "HOME": "/nonexistent",
    # The order of sets is the same in every run.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
_END_MARGIN_S = 60.0
"""Max seconds that a supervisor may take in addition to the program."""
CLEAN_UP = "sandbox clean-up"
"""Name of the threads that remove files which a program left."""
_STOP_CHECK_S = 0.1
_LIMIT_NAMES = {"timeout": "time", "memory": "memory", "output": "output", "disk": "files"}


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


_DEFAULT_LIMITS = SandboxLimits()


class SandboxError(Exception):
    """A program could not be run, so it has no result."""


class Sandbox:
    """Runs Python programs with limits, isolated from files, networks and other processes.

    Programs see the standard library and the directories of `python_path`, which must not have
    secrets. A `Sandbox` may be used by several threads.
    """

    def __init__(
        self,
        limits: SandboxLimits = _DEFAULT_LIMITS,
        *,
        require: Requirement = "isolated",
        python_path: Sequence[str] = (),
        python: str | None = None,
        without: Sequence[Mechanism] = (),
    ) -> None:
        """Find out what this machine permits. `without` leaves mechanisms out.

        `python` is the interpreter of programs; None is the one that runs this process.

        Raises SandboxError if the isolation is weaker than required, with the reasons.
        """
        if require not in get_args(Requirement):
            choices = " or ".join(get_args(Requirement))
            raise ValueError(f"require is {require!r}; write {choices}")
        self.limits = limits
        self._python_path = tuple(os.path.abspath(path) for path in python_path)
        self._python = os.path.realpath(python or _own_python())
        problems = dict(find_problems(self._python))
        problems |= dict.fromkeys(without, "left out")
        self.mechanisms = tuple(name for name, problem in problems.items() if not problem)
        missing = missing_isolation(self.mechanisms)
        if not missing:
            return
        reasons = "; ".join(f"{name}: {text}" for name, text in problems.items() if text)
        text = f"the sandbox cannot keep programs from {missing} on this machine ({reasons})"
        if require == "isolated":
            raise SandboxError(
                f"{text}; permit user namespaces, or Landlock and seccomp (a container needs a"
                " seccomp profile that allows them), or run untrusted programs elsewhere;"
                " require=limits runs them all the same, with limits on time and memory only"
            )
        logger.warning("%s; programs run with require=limits", text)

    def run(
        self,
        source: str,
        *,
        stdin: str = "",
        message: str = "",
        stop: threading.Event | None = None,
    ) -> SandboxResult:
        """Run a Python program and return its result; no process of it is left then.

        The removal of its files may continue in a thread, which the end of this process waits for.

        `message` is what the program can read from file descriptor 4; what it writes to 3 is
        `SandboxResult.report`. `stop` ends the program from another thread. Raises SandboxError if
        the program cannot be started.
        """
        scratch = tempfile.mkdtemp(prefix="nemo-like-sandbox-")
        try:
            request = self._request(source, stdin, message, scratch)
            reply = _call_supervisor(request, self.limits.wall_s + _END_MARGIN_S, stop)
        finally:
            if not remove_scratch(scratch, CLEAN_UP_S):
                threading.Thread(target=remove_scratch, args=(scratch,), name=CLEAN_UP).start()
        if "setup_error" in reply:
            raise SandboxError(f"the sandbox could not be set up: {reply['setup_error']}")
        if reply["reason"] == "abandoned":
            raise SandboxError("the program was stopped")
        return SandboxResult(**reply)

    async def run_async(self, source: str, *, stdin: str = "", message: str = "") -> SandboxResult:
        """Run a program in a thread of a shared pool, which has one per core; see `run`.

        A cancelled call ends the program.
        """
        stop = threading.Event()
        loop = asyncio.get_running_loop()

        def run() -> SandboxResult:
            return self.run(source, stdin=stdin, message=message, stop=stop)

        future = loop.run_in_executor(_shared_pool(), run)
        try:
            return await future
        except asyncio.CancelledError:
            stop.set()
            raise

    def _request(self, source: str, stdin: str, message: str, scratch: str) -> dict[str, Any]:
        environment = dict(_ENVIRONMENT)
        if self._python_path:
            environment["PYTHONPATH"] = os.pathsep.join(self._python_path)
        return {
            "kind": "run",
            "mechanisms": self.mechanisms,
            "argv": [self._python, *_FLAGS, _PROGRAM],
            "env": environment,
            "files": {_PROGRAM: source},
            "stdin": stdin,
            "message": message,
            "limits": vars(self.limits),
            "scratch": scratch,
            "read_only": _read_only_paths(self._python, self._python_path),
        }


@cache
def find_problems(python: str) -> Mapping[str, str]:
    """Return why each `Mechanism` is unavailable on this machine; "" if it is available.

    `python` is the path of the interpreter. The first call in a process tries them and logs the
    result in one line.
    """
    if sys.platform != "linux":
        raise SandboxError(f"the sandbox needs Linux; this is {sys.platform}")
    scratch = tempfile.mkdtemp(prefix="nemo-like-sandbox-")
    request = {
        "kind": "probe",
        "argv": [python],
        "scratch": scratch,
        "read_only": _read_only_paths(python, ()),
    }
    try:
        problems = _call_supervisor(request, _END_MARGIN_S, None)
    finally:
        remove_scratch(scratch)
    available = [name for name, text in problems.items() if not text and name != "user"]
    missing = [f"; no {name} ({text})" for name, text in problems.items() if text]
    logger.info("sandbox: %s available%s", ", ".join(available) or "nothing", "".join(missing))
    return problems


def missing_isolation(mechanisms: Sequence[str]) -> str:
    """Return what programs can do that they must not, in words; "" if nothing.

    Example: `reaching a network`.
    """
    available = set(mechanisms)
    missing = []
    if not available & {"namespaces", "landlock"}:
        missing.append("reading and writing files of the user")
    if not available & {"network", "seccomp"} or (
        "namespaces" not in available and "seccomp" not in available
    ):
        missing.append("reaching a network")
    if not available & {"namespaces", "seccomp"}:
        missing.append("signalling other processes")
    if "namespaces" not in available and "user" not in available:
        # The kernel does not limit the number of processes of root.
        missing.append("starting any number of processes")
    return ", ".join(missing)


def _call_supervisor(
    request: dict[str, Any], timeout_s: float, stop: threading.Event | None
) -> dict[str, Any]:
    """Start a supervisor with a request and return its reply. Raises SandboxError."""
    try:
        process = subprocess.Popen(
            [_own_python(), "-I", "-S", "-c", _SUPERVISE, _PACKAGE_PARENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"the supervisor of the sandbox cannot be started: {error}") from error
    with process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(encode(request))
            process.stdin.flush()
            # Stdin stays open: its end would stop the program.
            reply = _read_all(process, time.monotonic() + timeout_s, stop)
        except OSError:
            reply = b""
        finally:
            with suppress(OSError):  # a request that the supervisor did not read
                process.stdin.close()
            if not _has_ended(process):
                process.kill()
        try:
            return ast.literal_eval(reply.decode("ascii"))
        except (ValueError, SyntaxError):
            problem = process.stderr.read().decode("utf-8", "replace").strip()
            raise SandboxError(
                "the supervisor of the sandbox failed:"
                f" {problem or f'it ended with status {process.wait()}'}"
            ) from None


def _read_all(
    process: subprocess.Popen[bytes], deadline: float, stop: threading.Event | None
) -> bytes:
    """Read the reply. On `stop` end the supervisor's input, which makes it end the program."""
    assert process.stdin is not None and process.stdout is not None
    reply = b""
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    while time.monotonic() < deadline:
        if stop is not None and stop.is_set():
            process.stdin.close()
            stop = None
        if not poller.poll(_STOP_CHECK_S * 1000):
            continue
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            return reply
        reply += part
    return b""


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Wait a moment for a process that has closed its output."""
    try:
        process.wait(5.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def _own_python() -> str:
    """Return the interpreter itself, without the links of a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", "") or sys.executable)


def _read_only_paths(python: str, python_path: tuple[str, ...]) -> list[str]:
    """Return the files and directories that a program may read, none within another."""
    # The interpreter is in the directory bin of its installation.
    prefix = os.path.dirname(os.path.dirname(python))
    paths = []
    for path in (*_SYSTEM_PATHS, prefix, *python_path):
        is_inside = any(path == other or path.startswith(f"{other}/") for other in paths)
        if os.path.lexists(path) and not is_inside:
            paths.append(path)
    return paths


@cache
def _shared_pool() -> ThreadPoolExecutor:
    num_threads = max(1, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(num_threads, thread_name_prefix="sandbox")
