"""Durable and atomic file writing. Every writer of a run uses it, so every failed write is the same
kind of error.

A file is written aside, synchronised to disk and renamed, so that a reader or a kill finds the old
content or the new. The temporary file is created exclusively: an existing symbolic link of its name
is removed, never written through.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_BYTES = 16 * 2**20
"""Free space below which a failed write is attributed to a full disk."""
_NO_DIRECTORY_SYNC = (
    errno.EINVAL,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EBADF,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
)
"""How file systems (SMB, some FUSE) refuse to synchronise a directory."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How libraries written in Rust report the system's error number."""


class WriteError(RuntimeError):
    """A file or directory could not be written. The message names it, the cause and what to do."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file that was written."""

    size: int
    sha256: str


@contextmanager
def reporting_write_errors(path: Path, what: str | None = None) -> Iterator[None]:
    """Turn an OSError, or another library's error with the system's number, into a WriteError about
    `path`.

    `what` describes the content, e.g. "the metrics of step 2"; None means the path says enough.
    ConfigError and other ValueErrors pass unchanged.
    """
    try:
        yield
    except (WriteError, ValueError):  # ConfigError is a ValueError; no failed system call is one
        raise
    except Exception as error:
        reported = next((seen for seen in _causes(error) if isinstance(seen, WriteError)), None)
        if reported is not None:  # by a worker, which knows the file
            raise WriteError(str(reported)) from error
        number = system_error_number(error)
        if number is None:
            raise
        raise WriteError(describe_write_error(path, number, what)) from error


def describe_write_error(path: Path, number: int, what: str | None = None) -> str:
    """One sentence each for the file, the cause and what to do. `number` is the system's error
    number.
    """
    subject = f"{what} cannot be written to {path}" if what else f"{path} cannot be written"
    folder = path if path.is_dir() else path.parent
    move = "set output_dir to another file system"
    if number in _FULL:
        cause, remedy = f"{os.strerror(number)}{_free_space(folder)}", f"Free some space or {move}"
    elif number == errno.EROFS:
        cause, remedy = os.strerror(number), f"Make it writable again or {move}"
    elif number in (errno.EACCES, errno.EPERM):
        cause = f"{os.strerror(number)} for user {os.geteuid()}"
        remedy = (
            f"Give this user write permission for {folder} or set output_dir to another directory"
        )
    elif number in (errno.ENOENT, errno.ESTALE, errno.ENOTDIR):
        cause = f"{os.strerror(number)}; {_missing_part(folder)} was removed or replaced"
        remedy = "Do not move or remove a run's directory while it runs"
    elif number == errno.EISDIR:
        cause, remedy = "a directory has this name", "Remove or rename that directory"
    elif number == errno.EFBIG:
        cause, remedy = os.strerror(number), f"Raise the limit (ulimit -f) or {move}"
    else:
        cause, remedy = os.strerror(number), f"Check the file system of {folder}, or {move}"
    return f"{subject}: {cause}. {remedy}; resume=true continues from the latest checkpoint, if there is one."


def system_error_number(error: BaseException) -> int | None:
    """The system's error number of a failed file operation, or of the failure that caused `error`;
    None if neither.
    """
    for seen in _causes(error):
        if isinstance(seen, OSError) and not isinstance(seen, (ConnectionError, TimeoutError)):
            return seen.errno
        match = _OS_ERROR.search(str(seen))
        if match is not None:
            return int(match[1])
    return None


def is_disk_full(error: BaseException, path: Path, num_written_bytes: int) -> bool:
    """Whether a failed write is a full disk: by the error's number, by its text, or by the space
    left at `path`.
    """
    if any(
        system_error_number(seen) in _FULL or os.strerror(errno.ENOSPC) in str(seen)
        for seen in _causes(error)
    ):
        return True
    if not isinstance(error, Exception) or num_written_bytes == 0:
        return False
    try:
        return shutil.disk_usage(path).free < _FULL_BYTES
    except OSError:
        return False


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from, and so on; a worker's exception counts as the cause of the
    driver's.
    """
    seen: Any = error
    while isinstance(seen, BaseException):
        yield seen
        seen = seen.__cause__ or getattr(seen, "cause", None)


@contextmanager
def replacing(path: Path, what: str | None = None) -> Iterator[Path]:
    """Give the path of a temporary file beside `path`; when the block ends, the file durably
    replaces `path`.

    Raises WriteError. If the block raises, `path` stays as it was and the temporary file is
    removed.
    """
    aside = path.with_name(f".{path.name}.new")
    with reporting_write_errors(path, what):
        try:
            remove_file(aside)
            yield aside
            sync_file(aside)
            aside.replace(path)
        except BaseException:
            with suppress(OSError):
                remove_file(aside)
            raise
        sync_directory(path.parent)


def write_bytes(path: Path, content: bytes, what: str | None = None) -> FileRecord:
    """Replace `path` durably and atomically; raises WriteError. The file gets the permissions of
    the umask.
    """
    with replacing(path, what) as aside:
        descriptor = os.open(
            aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


def write_text(path: Path, text: str, what: str | None = None) -> FileRecord:
    """`write_bytes` of UTF-8 text. A lone surrogate, which UTF-8 cannot hold, becomes its JSON and
    YAML escape.
    """
    return write_bytes(path, text.encode("utf-8", errors="backslashreplace"), what)


def write_json(path: Path, value: Any, what: str | None = None) -> FileRecord:
    """Write plain JSON values; raises ValueError, naming the file, for anything JSON cannot hold
    (NaN, tensors).
    """
    try:
        text = json.dumps(value, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name} can hold only plain JSON values: {error}") from error
    return write_text(
        path, text, what
    )  # without a newline at its end, a file cut anywhere is no JSON


def write_json_lines(path: Path, records: Iterable[Any], what: str | None = None) -> FileRecord:
    """One JSON object per line, durably and atomically."""
    return write_text(
        path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), what
    )


class AppendedFile:
    """A file that grows by whole records. A record is with the operating system when `append`
    returns.

    An append that fails leaves the file without a part of the record. Raises WriteError, also when
    the file was removed or replaced: what is written to a removed file is lost without any error
    from the system.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reporting_write_errors(path):
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
            status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)

    def append(self, content: bytes, what: str | None = None) -> None:
        """Write `content` to the end of the file. `what` describes it in the message of a
        WriteError.
        """
        self.check(what)
        with reporting_write_errors(self.path, what):
            size, left = os.fstat(self._descriptor).st_size, memoryview(content)
            try:
                while left:
                    left = left[os.write(self._descriptor, left) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def check(self, what: str | None = None) -> None:
        """Raise WriteError if the file was removed or replaced."""
        with reporting_write_errors(self.path, what):
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) != self._identity:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def append_json(self, record: Any, what: str | None = None) -> None:
        """One strict JSON object and a newline."""
        self.append((json.dumps(record, allow_nan=False) + "\n").encode(), what)

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        with reporting_write_errors(self.path):
            _fsync(self._descriptor)

    def close(self) -> None:
        """May be called again."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with reporting_write_errors(self.path):
                os.close(descriptor)


def finish_library_file(path: Path) -> FileRecord:
    """Give a file that another library wrote the permissions of the umask, make it durable, and
    compute its record.
    """
    with reporting_write_errors(path):
        os.chmod(path, 0o666 & ~_umask())
        sync_file(path)
        return file_record(path)


def file_record(path: Path) -> FileRecord:
    """Size and checksum of an existing file, read in chunks; raises OSError."""
    with path.open("rb") as file:
        return FileRecord(
            os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
        )


def remove_file(path: Path) -> None:
    """Remove a file or a symbolic link (not its target) if there is one."""
    path.unlink(missing_ok=True)


def remove_link(path: Path) -> None:
    """Remove a symbolic link, so that a directory of this name is created and not written through
    it; raises OSError.
    """
    if path.is_symlink():
        path.unlink()


def sync_file(path: Path) -> None:
    """Wait until the file's content is on disk; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on disk, on file systems that can do that; raises
    OSError.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a directory that may be written but not listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_DIRECTORY_SYNC:
            raise
    finally:
        os.close(descriptor)


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (
            errno.EINVAL,
            errno.ENOTSUP,
        ):  # a pipe or device, or a file system without fsync
            raise


def _umask() -> int:
    """This process's umask, without changing it where Linux tells it."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    current = os.umask(0o022)
    os.umask(current)
    return current


def _free_space(folder: Path) -> str:
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free)"
    except OSError:
        return ""


def _missing_part(folder: Path) -> str:
    """The topmost directory on the way to `folder` that is not there; `folder` or the file itself
    if all are.
    """
    for part in (*reversed(folder.parents), folder):
        if not part.is_dir():
            return str(part)
    return "the file"
