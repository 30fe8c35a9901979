"""The lock of a run directory, which one driver may use.

The driver holds an advisory lock (flock) on the file `run.lock`. The kernel releases it at the end
of the process, also after SIGKILL, so a lock is never stale. The file has host and process id of
the driver, for the message to another one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nemo_like.config.errors import ConfigError
from nemo_like.run.files import reporting_write_errors

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
_WAIT_S = 5.0
"""Processes that a killed driver started can hold its lock for a moment longer."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the run in `directory`, which must exist, inside the block.

    Raises ConfigError with host and process if another driver has the lock, and WriteError if it
    cannot be written.
    """
    path = directory / LOCK_NAME
    with reporting_write_errors(path):
        descriptor = _acquire(path)
        os.ftruncate(descriptor, 0)
        owner = {"host": socket.gethostname(), "pid": os.getpid()}
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    try:
        yield
    finally:
        if _is_file_of(path, descriptor):
            # The directory may be read-only now.
            with suppress(OSError):
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Take the lock and return the descriptor of its file. Raises ConfigError."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        is_locked = _flock(descriptor, path)
        # The driver before this one may have removed the file since it was opened.
        if is_locked and _is_file_of(path, descriptor):
            return descriptor
        owner = os.pread(descriptor, 1000, 0)
        os.close(descriptor)
        if not is_locked and (not _has_ended(owner) or time.monotonic() >= deadline):
            raise ConfigError(
                f"run_name: the run in {path.parent} is in use by {_describe(owner)}; wait for it"
                " or stop it, or choose another run_name"
            )
        time.sleep(0.05)


def _flock(descriptor: int, path: Path) -> bool:
    """Lock the file; return False if another process has locked it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # A file system that is mounted without locks.
        logger.warning(
            "%s cannot be locked (%s), so a second driver of this run is not refused",
            path,
            error.strerror,
        )
    return True


def _is_file_of(path: Path, descriptor: int) -> bool:
    """Return True if `path` is still the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except OSError:
        return False


def _has_ended(owner: bytes) -> bool:
    """Return True if the process that wrote the lock file has ended, as far as this host knows."""
    try:
        values = json.loads(owner)
        is_here = values["host"] == socket.gethostname()
        return is_here and not Path(f"/proc/{values['pid']}").exists()
    except (ValueError, KeyError, TypeError):
        return False


def _describe(owner: bytes) -> str:
    try:
        values = json.loads(owner)
        return f"process {values['pid']} on host {values['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
