"""The lock of a run directory, which one driver may use. A lock of a killed driver is detected.

The file has host, process id and process start time as JSON. It is created complete, by a hard
link or exclusively, which is atomic on network file systems as well. The driver also has an
advisory lock (flock) on it, which the kernel releases at the end of the process, also after
SIGKILL. A lock of another machine is never taken over without the user.
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
from typing import Any, Literal

from nemo_like.config.errors import ConfigError
from nemo_like.run.files import reporting_write_errors

LOCK_NAME = "run.lock"
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_NEW_FILE = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_MAX_ATTEMPTS = 20
_ATTEMPT_S = 0.25


@dataclass(frozen=True, kw_only=True)
class LockOwner:
    """The process that owns a lock."""

    host: str
    pid: int
    start_ticks: int
    """Start of the process in clock ticks since boot; it distinguishes a reused process id."""
    boot_id: str
    """Identifies one boot of one machine; empty if the system does not report it."""
    started: str
    """Time at which the lock was taken, for messages."""

    @classmethod
    def this_process(cls) -> LockOwner:
        return cls(
            host=socket.gethostname(),
            pid=os.getpid(),
            start_ticks=_start_ticks(os.getpid()) or 0,
            boot_id=_boot_id(),
            started=time.strftime("%Y-%m-%d %H:%M:%S %z"),
        )

    @property
    def is_alive_here(self) -> bool:
        """True if the process runs on this machine now."""
        ticks = _start_ticks(self.pid)
        # 0: the start time was unknown when the lock was taken.
        return ticks is not None and self.start_ticks in (0, ticks)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the run in `directory`, which must exist, inside the block.

    Raises ConfigError with host and process if another driver has the lock, and WriteError if it
    cannot be written.
    """
    path = directory / LOCK_NAME
    with reporting_write_errors(path):
        descriptor = _acquire(path)
    try:
        yield
    finally:
        if _is_file_of(path, descriptor):
            # The directory was removed or made read-only; the lock is stale then.
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Take the lock and return the descriptor of the lock file. Raises ConfigError."""
    refusal = ""
    for attempt in range(_MAX_ATTEMPTS):
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
            if not _is_file_of(path, existing):  # replaced since it was opened
                continue
            owner = _read(existing)
            refusal = _refusal(path, owner, flock)
            if not refusal:
                descriptor = _create(path, replace=True)
                assert descriptor is not None, "a replacement needs no unused name"
                return descriptor
            # A taken flock of a dead driver is temporary: a process that it started still has the
            # descriptor, or another driver takes over now. Everything else is final.
            is_dead_here = owner is not None and _is_same_boot(owner) and not owner.is_alive_here
            if flock != "taken" or not is_dead_here:
                break
        finally:
            os.close(existing)
    raise ConfigError(
        refusal or f"output_dir: {path} appears and disappears; other processes start the same run"
    )


def _refusal(path: Path, owner: LockOwner | None, flock: str) -> str:
    """Return the reason not to take over the lock; empty if its process is known to be gone."""
    if owner is None:
        if flock == "acquired":
            # Truncated by a full disk or a power failure, and no process has it open.
            return ""
        return (
            f"run_name: {path} cannot be read, so another driver may use this run; if none does,"
            f" remove {path}"
        )
    process = f"process {owner.pid} on host {owner.host} since {owner.started}"
    if owner.is_alive_here and _is_same_boot(owner):
        return (
            f"run_name: the run in {path.parent} is in use by {process}; wait for it or stop it, or"
            " choose another run_name"
        )
    if flock == "taken":
        return (
            f"run_name: the run in {path.parent} is in use by {process}, or by a process that it"
            " started; stop it, or choose another run_name"
        )
    is_this_host = owner.host == socket.gethostname()
    # The process has ended: on this host, or on this machine under another host name (a
    # container), where only the acquired flock proves it.
    if is_this_host or (_is_same_boot(owner) and flock == "acquired"):
        return ""
    return (
        f"run_name: the run in {path.parent} is locked by {process}, which this host"
        f" ({socket.gethostname()}) cannot check. If that process has ended, remove {path} and"
        " start again; otherwise choose another run_name"
    )


def _create(path: Path, *, replace: bool = False) -> int | None:
    """Create the lock file, complete and locked; None if it exists and `replace` is off."""
    # Written under a temporary name: no other process can see a file without content or flock.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_RDWR | _NEW_FILE | os.O_NOFOLLOW, 0o666)
    try:
        _write(descriptor)
        _flock(descriptor)
        if replace:
            os.replace(temporary, path)
        elif not _link(temporary, path):
            os.close(descriptor)
            return None
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    return descriptor


def _link(temporary: Path, path: Path) -> bool:
    """Link `temporary` to `path`; return False if that exists.

    On a file system without hard links the file is renamed.
    """
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A network file system may repeat a request that it has carried out already.
        return temporary.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        # The exclusive creation reserves the name; `replace` is atomic but would not detect it.
        try:
            descriptor = os.open(path, os.O_WRONLY | _NEW_FILE, 0o666)
        except FileExistsError:
            return False
        os.close(descriptor)
        os.replace(temporary, path)
    return True


def _open(path: Path) -> int | None:
    """Open an existing lock file; None if there is none. Raises ConfigError."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise ConfigError(
            f"run_name: {path} belongs to another user, so the run may be in use by that user;"
            " choose another run_name"
        ) from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise ConfigError(
                f"run_name: {path} is not a regular file; remove it if no driver uses this run"
            ) from error
        raise


def _flock(descriptor: int) -> Literal["acquired", "taken", "unknown"]:
    """Lock the file: acquired, taken by another process, or unknown without support for it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "taken"
    except OSError as error:
        if error.errno not in _NO_FLOCK:
            raise
        return "unknown"
    return "acquired"


def _write(descriptor: int) -> None:
    text = json.dumps(asdict(LockOwner.this_process())) + "\n"
    os.write(descriptor, text.encode())
    # A file system without fsync. The lock only matters while processes live, so it need not
    # survive a power failure.
    with suppress(OSError):
        os.fsync(descriptor)


def _read(descriptor: int) -> LockOwner | None:
    """Read the owner from the file; None if the file is damaged."""
    try:
        values: Any = json.loads(os.pread(descriptor, 10_000, 0))
        return LockOwner(
            host=str(values["host"]),
            pid=int(values["pid"]),
            start_ticks=int(values["start_ticks"]),
            boot_id=str(values["boot_id"]),
            started=str(values["started"])[:40],
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Return True if `path` is still the name of the open file."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    opened = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (opened.st_dev, opened.st_ino)


def _is_same_boot(owner: LockOwner) -> bool:
    return owner.boot_id == _boot_id()


def _boot_id() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # Field 2 is the program's name in parentheses, which may itself have spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):  # a zombie
        return None
    return int(fields[19])
