"""One driver per run directory: a lock file that survives SIGKILL and is recognised as stale
afterwards.

The file holds host, process id and process start time as JSON. It is created complete, by a hard
link or exclusively, which is atomic on network file systems as well. The driver also holds an
advisory lock (flock) on it, which the kernel releases when the process ends, however it ends. A
lock of another machine is never taken over without the user.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.files import reporting_write_errors

LOCK_NAME = "run.lock"
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_NUM_ATTEMPTS = 20
_ATTEMPT_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock."""

    host: str
    pid: int
    start_ticks: int
    """Start of the process in clock ticks since boot: a process id that is reused has another
    one.
    """
    boot_id: str
    """Identifies one boot of one machine; empty where the system does not tell."""
    started: str
    """When the lock was taken, for people."""

    @classmethod
    def this_process(cls) -> Holder:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=_start_ticks(os.getpid()) or 0,
            boot_id=_boot_id(),
            started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    @property
    def is_alive_here(self) -> bool:
        """Whether this machine runs the process now."""
        ticks = _start_ticks(self.pid)
        return ticks is not None and self.start_ticks in (0, ticks)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of the run in `directory`, which must exist.

    Raises ConfigError, naming host and process, if another driver holds it, and WriteError if it
    cannot be written.
    """
    path = directory / LOCK_NAME
    with reporting_write_errors(path):
        descriptor = _acquire(path)
    try:
        yield
    finally:
        if _is_file_of(path, descriptor):
            with suppress(
                OSError
            ):  # the directory was removed or made read-only; the lock is stale then
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """The descriptor of the lock file, which is this process's now."""
    refusal = ""
    for attempt in range(_NUM_ATTEMPTS):
        if attempt:
            time.sleep(_ATTEMPT_S)
        descriptor = _create(path)
        if descriptor is not None:
            return descriptor
        existing = _open(path)
        if existing is None:  # removed since `_create` saw it
            continue
        try:
            flock = _flock(existing)
            if not _is_file_of(path, existing):  # replaced meanwhile
                continue
            holder = _read(existing)
            refusal = _refusal(path, holder, flock)
            if not refusal:
                descriptor = _create(path, replace=True)
                assert descriptor is not None, "a replacement needs no free name"
                return descriptor
            if (
                flock != "taken"
                or holder is None
                or not _is_same_boot(holder)
                or holder.is_alive_here
            ):
                break
            # A process that the dead driver started still has its descriptor, or another driver
            # takes over right now.
        finally:
            os.close(existing)
    raise ConfigError(
        refusal or f"output_dir: {path} appears and disappears; other processes start the same run"
    )


def _refusal(path: Path, holder: Holder | None, flock: str) -> str:
    """Why the lock must not be taken over; empty if its process is known to be gone."""
    if holder is None:
        if flock == "held":
            return ""  # cut by a full disk or a power failure, and no process has it open
        return f"run_name: {path} cannot be read, so another driver may use this run; if none does, remove {path}"
    who = f"process {holder.pid} on host {holder.host} since {holder.started}"
    if holder.is_alive_here and _is_same_boot(holder):
        return f"run_name: the run in {path.parent} is in use by {who}; wait for it or stop it, or choose another run_name"
    if flock == "taken":
        return (
            f"run_name: the run in {path.parent} is in use by {who}, or by a process that it"
            f" started; stop it, or choose"
            " another run_name"
        )
    is_this_host = holder.host == socket.gethostname()
    if is_this_host or (_is_same_boot(holder) and flock == "held"):
        return ""
    return (
        f"run_name: the run in {path.parent} is locked by {who}, which this host"
        f" ({socket.gethostname()}) cannot check. If"
        f" that process has ended, remove {path} and start again; otherwise choose another run_name"
    )


def _create(path: Path, *, replace: bool = False) -> int | None:
    """Create the lock file complete and locked; None if there is one already and `replace` is
    off.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(
        aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
    )
    try:
        _write(descriptor)
        _flock(descriptor)
        if replace:
            os.replace(aside, path)
        elif not _link(aside, path):
            os.close(descriptor)
            return None
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        with suppress(FileNotFoundError):
            aside.unlink()
    return descriptor


def _link(aside: Path, path: Path) -> bool:
    """Give `aside` the name `path` too, if that is free. Where the file system has no hard links it
    is moved there.
    """
    try:
        os.link(aside, path)
    except FileExistsError:
        return (
            aside.stat().st_nlink == 2
        )  # a network file system may repeat a request that it has carried out
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        except FileExistsError:
            return False
        os.replace(aside, path)
    return True


def _open(path: Path) -> int | None:
    """An existing lock file, opened for reading; None if there is none."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(
            f"run_name: {path} belongs to another user, so the run may be in use by that user;"
            f" choose another run_name"
        ) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise ConfigError(
                f"run_name: {path} is not a regular file; remove it if no driver uses this run"
            ) from error
        raise


def _flock(descriptor: int) -> str:
    """ "held": by this process now; "taken": by another one; "unknown": the file system has no such
    locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return "unknown"
    return "held"


def _write(descriptor: int) -> None:
    os.write(descriptor, (json.dumps(asdict(Holder.this_process())) + "\n").encode())
    with suppress(
        OSError
    ):  # a pipe or a file system without fsync; the lock is a matter of live processes anyway
        os.fsync(descriptor)


def _read(descriptor: int) -> Holder | None:
    """The holder that the file names; None if the file is damaged."""
    try:
        values: Any = json.loads(os.pread(descriptor, 10_000, 0))
        return Holder(
            host=str(values["host"]),
            pid=int(values["pid"]),
            start_ticks=int(values["start_ticks"]),
            boot_id=str(values["boot_id"]),
            started=str(values["started"])[:40],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Whether the name still belongs to the open file."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _is_same_boot(holder: Holder) -> bool:
    return holder.boot_id == _boot_id()


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None if there is no such process, or
    only its zombie.
    """
    try:
        # The second field is the program's name in parentheses, which may hold spaces and
        # parentheses itself.
        fields = (
            Path(f"/proc/{pid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
            .split()
        )
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])
