"""The supervisor: starts one program, enforces its limits, and ends all that it started.

It is a separate process, `python -I -S`, which reads one request from stdin and writes the result
to stdout, each a line with a Python literal. Stdin stays open while the program runs: its end means
that the caller has ended. With namespaces its child is the first process of a PID namespace, which
starts the program and waits for it; without, its child is the program.

It imports little, because it is started for every program: json or ast would take longer to import
than all other modules together.
"""

from __future__ import annotations

import _ast
import fcntl
import os
import select
import sys
import time

from nemo_like.environments.sandbox import isolation, linux

TYPE_CHECKING = False  # The module typing takes long to import.
if TYPE_CHECKING:
    from typing import Any

_TICK_MS = 50
"""Milliseconds between two checks of memory and files."""
_CHUNK_BYTES = 1 << 16
_MAX_REPORT_BYTES = 1 << 20
_STATUS_FD = 5
"""After stdin, stdout, stderr, the report and the message."""
_FIRST_USER = 0x70000000
"""The ids from here on are not used by distributions, containers or systemd."""
_GRACE_S = 0.05
"""Time in which processes may end that the program started and did not wait for."""


def main() -> None:
    """Serve one request."""
    request = decode(sys.stdin.buffer.readline())
    is_probe = request["kind"] == "probe"
    # Without another user that can run the interpreter, programs of root run as root.
    changes_user = is_probe or not {"namespaces", "user"}.isdisjoint(request["mechanisms"])
    is_root = os.geteuid() == 0
    request["user_id"] = _unprivileged_user() if is_root and changes_user else None
    reply = encode(isolation.probe(request) if is_probe else run(request))
    while reply:
        reply = reply[os.write(1, reply) :]


def encode(value: Any) -> bytes:
    """Return a line with the literal of a value: None, numbers, texts, lists and dicts of them."""
    return ascii(value).encode("ascii") + b"\n"


def decode(line: bytes) -> Any:
    """Return the value of a literal, with lists for tuples. Raises SyntaxError and ValueError."""
    return _value(compile(line, "<request>", "eval", _ast.PyCF_ONLY_AST))


def _value(node: _ast.AST | None) -> Any:
    if isinstance(node, _ast.Expression):
        return _value(node.body)
    if isinstance(node, _ast.Constant):
        return node.value
    if isinstance(node, _ast.List | _ast.Tuple):
        return [_value(element) for element in node.elts]
    if isinstance(node, _ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_value(key): _value(item) for key, item in pairs}
    raise ValueError(f"a {type(node).__name__} is not plain data")


def _unprivileged_user() -> int:
    """Return the id of a user that no one else has, for the program of this root process.

    In a user namespace with fewer users it is the last of them.
    """
    user_id = _FIRST_USER + os.getpid()
    last = 0
    with open("/proc/self/uid_map", "rb") as file:
        for line in file:
            first, _, count = map(int, line.split())
            if first <= user_id < first + count:
                return user_id
            last = max(last, first + count - 1)
    return last


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Run the program of a request and return its result, or `{"setup_error": text}`."""
    linux.become_subreaper()
    has_namespaces = "namespaces" in request["mechanisms"]
    user_id = request["user_id"]
    scratch = request["scratch"]
    keeps_root = False
    try:
        if has_namespaces:
            keeps_root = isolation.enter_pid_namespace(user_id)
        elif user_id is not None:
            os.chown(scratch, user_id, user_id)
            linux.change_user(user_id)
        linux.set_dumpable(enabled=False)
        num_other_tasks = 2
        if not has_namespaces and user_id is None:
            num_other_tasks += linux.num_tasks(os.geteuid())
        pipes = [os.pipe() for _ in range(4)]
        inputs = [_memory_file(request["stdin"]), _memory_file(request["message"])]
        start = time.monotonic()
        pid = os.fork()
    except OSError as error:
        return {"setup_error": str(error)}
    if pid == 0:
        outputs = [write for _, write in pipes]
        _start(request, inputs, outputs, num_other_tasks, keeps_root=keeps_root)
    for _, write in pipes:
        os.close(write)
    monitor = _Monitor(request, pid, [read for read, _ in pipes], start)
    monitor.watch()
    try:
        monitor.end()
    finally:
        if has_namespaces or user_id is None:
            # A caller that has ended cannot remove the rest.
            limit_s = float("inf") if monitor.is_abandoned else isolation.CLEAN_UP_S
            isolation.remove_scratch(scratch, limit_s)
    return monitor.result()


def _memory_file(text: str) -> int:
    """Return a file descriptor of an anonymous file with `text`, at its beginning."""
    file = os.memfd_create("input")
    content = text.encode("utf-8", "surrogatepass")
    while content:
        content = content[os.write(file, content) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


def _start(
    request: dict[str, Any],
    inputs: list[int],
    outputs: list[int],
    num_other_tasks: int,
    *,
    keeps_root: bool,
) -> None:
    """Start the program from the supervisor's child. Does not return.

    `inputs` are stdin and the message, `outputs` stdout, stderr, report and status.
    """
    status = outputs[3]
    try:
        linux.die_with_parent()
        scratch = request["scratch"]
        has_namespaces = "namespaces" in request["mechanisms"]
        if has_namespaces:
            isolation.enter_root(
                scratch,
                request["read_only"],
                int(request["limits"]["scratch_mb"]),
                request["user_id"] if keeps_root else None,
                has_network_namespace="network" in request["mechanisms"],
            )
            scratch = isolation.SCRATCH
        if keeps_root:
            linux.change_user(request["user_id"])
            linux.die_with_parent()
            linux.set_dumpable(enabled=False)
        linux.drop_capabilities()
        for name, text in request["files"].items():
            with open(f"{scratch}/{name}", "w", encoding="utf-8", errors="surrogatepass") as file:
                file.write(text)
        if has_namespaces:
            pid = os.fork()
            if pid != 0:
                _serve_as_init(pid, status)
        _execute(request, scratch, inputs, outputs, num_other_tasks)
    except BaseException as error:  # noqa: BLE001 (nothing may run on in a copy of the supervisor)
        os.write(status, encode({"setup_error": str(error)}))
    os._exit(1)


def _serve_as_init(pid: int, status: int) -> None:
    """Wait for the program `pid` as the first process of its PID namespace; report its end.

    The kernel kills all other processes of the namespace when this one ends. Does not return.
    """
    linux.ignore_interrupts()
    while True:
        ended, code, usage = os.wait4(-1, 0)
        if ended == pid:
            break
    report = {
        "code": code,
        "left": linux.has_children_after(_GRACE_S),
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "rss_kb": usage.ru_maxrss,
    }
    os.write(status, encode(report))
    os._exit(0)


def _execute(
    request: dict[str, Any],
    scratch: str,
    inputs: list[int],
    outputs: list[int],
    num_other_tasks: int,
) -> None:
    """Replace this process by the program, with the limits and the isolation in place."""
    os.setsid()
    linux.restore_signals()
    sources = [inputs[0], *outputs[:3], inputs[1], outputs[3]]
    # Copied out of the way first: a target may be the number of another source.
    copies = [fcntl.fcntl(source, fcntl.F_DUPFD, 100) for source in sources]
    for target, copy in enumerate(copies):
        # The status pipe is closed by execve.
        os.dup2(copy, target, inheritable=target != _STATUS_FD)
    os.closerange(_STATUS_FD + 1, 1 << 20)
    outputs[3] = _STATUS_FD
    try:
        os.chdir(scratch)
        isolation.apply_limits(request["limits"], num_other_tasks)
        isolation.restrict(request["mechanisms"], request["read_only"], scratch)
        environment = dict(request["env"], TMPDIR=scratch)
        os.execve(request["argv"][0], request["argv"], environment)
    except BaseException as error:  # noqa: BLE001 (reported by the supervisor)
        os.write(_STATUS_FD, encode({"setup_error": str(error)}))
    os._exit(1)


class _Monitor:
    """Reads the outputs of the program, checks its limits and ends it."""

    def __init__(self, request: dict[str, Any], pid: int, outputs: list[int], start: float) -> None:
        self._limits = request["limits"]
        self._has_namespaces = "namespaces" in request["mechanisms"]
        self._scratch = request["scratch"]
        self._pid = pid
        self._start = start
        self._seconds = 0.0
        self._outputs = outputs
        """File descriptors of stdout, stderr, report and status."""
        self._texts: list[bytearray] = [bytearray() for _ in outputs]
        self._num_output_bytes = 0
        self._reason = ""
        self._code: int | None = None
        self._usage: Any = None
        self._left = False
        for output in outputs:
            os.set_blocking(output, False)

    @property
    def is_abandoned(self) -> bool:
        """True if the caller has ended, or has stopped the program."""
        return self._reason == "abandoned"

    def watch(self) -> None:
        """Wait until the program ends or exceeds a limit, or the caller ends."""
        poller = select.poll()
        poller.register(0, select.POLLIN)
        for output in self._outputs:
            poller.register(output, select.POLLIN)
        ended = os.pidfd_open(self._pid)
        poller.register(ended, select.POLLIN)
        deadline = self._start + self._limits["wall_s"]
        next_check = 0.0
        while not self._reason:
            for file, _ in poller.poll(_TICK_MS):
                if file == 0:
                    # The caller writes nothing more: its end of the pipe is closed.
                    self._reason = "abandoned"
                elif file in self._outputs and not self._read(self._outputs.index(file)):
                    poller.unregister(file)
            if self._collect():
                return
            now = time.monotonic()
            if now > deadline:
                self._reason = "timeout"
            if now > next_check:
                self._check_sizes()
                next_check = now + _TICK_MS / 1000

    def end(self) -> None:
        """End every process that the program started, and read what it wrote before."""
        self._seconds = time.monotonic() - self._start
        if self._has_namespaces:
            if self._code is None:
                # The kernel ends all processes of a PID namespace with its first one.
                os.kill(self._pid, linux.SIGKILL)
                _, self._code, self._usage = os.wait4(self._pid, 0)
        else:
            if self._code is not None:
                self._left = linux.has_children_after(_GRACE_S)
            linux.end_descendants()
        for index in range(len(self._outputs)):
            while self._read(index):
                pass

    def result(self) -> dict[str, Any]:
        """Return the result. Call after `end`."""
        status = decode(bytes(self._texts[3])) if self._texts[3] else {}
        if "setup_error" in status:
            return status
        code = status.get("code", self._code)
        usage = self._usage
        cpu_s = status.get("cpu_s", usage.ru_utime + usage.ru_stime if usage else 0.0)
        exit_status = None
        number = None
        if code is not None and os.WIFSIGNALED(code):
            number = os.WTERMSIG(code)
        elif code is not None:
            exit_status = os.WEXITSTATUS(code)
        max_kept = self._limits["max_kept_bytes"]
        stdout, stderr = (
            bytes(text[:max_kept]).decode("utf-8", "replace") for text in self._texts[:2]
        )
        reason = self._reason
        left = status.get("left", self._left)
        if not reason:
            reason = _reason(exit_status, number, cpu_s, self._limits["cpu_s"], stderr, left=left)
        return {
            "reason": reason,
            "exit_status": exit_status,
            "signal": number,
            "stdout": stdout,
            "stderr": stderr,
            "report": bytes(self._texts[2]).decode("utf-8", "replace"),
            "seconds": self._seconds,
            "cpu_s": cpu_s,
            "max_rss_mb": status.get("rss_kb", usage.ru_maxrss if usage else 0) / 1024,
        }

    def _read(self, index: int) -> bool:
        """Read one chunk of an output; return False at its end, or if nothing is there."""
        try:
            chunk = os.read(self._outputs[index], _CHUNK_BYTES)
        except BlockingIOError:
            return False
        text = self._texts[index]
        is_printed = index < 2
        max_kept = self._limits["max_kept_bytes"] if is_printed else _MAX_REPORT_BYTES
        text += chunk[: max(0, max_kept - len(text))]
        if is_printed:
            self._num_output_bytes += len(chunk)
        if self._num_output_bytes > self._limits["max_output_bytes"]:
            self._reason = self._reason or "output"
            return False
        return bool(chunk)

    def _collect(self) -> bool:
        """Return True if the child has ended."""
        ended, code, usage = os.wait4(self._pid, os.WNOHANG)
        if ended == 0:
            return False
        self._code = code
        self._usage = usage
        return True

    def _check_sizes(self) -> None:
        """Compare the resident memory of all processes, and the files on disk, with the limits."""
        if self._reason:
            return
        pids = [self._pid, *linux.descendants(self._pid)]
        if linux.resident_bytes(pids) > int(self._limits["memory_mb"]) << 20:
            self._reason = "memory"
        max_bytes = int(self._limits["scratch_mb"]) << 20
        # The scratch directory of a mount namespace has a fixed size.
        if not self._has_namespaces and isolation.size_bytes(self._scratch, max_bytes) > max_bytes:
            self._reason = "disk"


def _reason(
    exit_status: int | None,
    number: int | None,
    cpu_s: float,
    max_cpu_s: float,
    stderr: str,
    *,
    left: bool,
) -> str:
    """Return the reason of a program that ended by itself."""
    if number is not None:
        is_cpu_limit = number == linux.SIGKILL and cpu_s >= max_cpu_s
        return "timeout" if number == linux.SIGXCPU or is_cpu_limit else "signal"
    if exit_status != 0:
        lines = stderr.strip().splitlines()
        is_memory = bool(lines) and lines[-1].startswith("MemoryError")
        return "memory" if is_memory else "error"
    return "left_processes" if left else "ok"
