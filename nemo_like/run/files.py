"""Durable and atomic file writes with one kind of error, for all files of a run.

A file is written under a temporary name, synchronized to disk and renamed, so that after a kill it
has either the old or the new content. The temporary file is created exclusively: an existing
symbolic link of that name is removed and not followed.
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

from nemo_like.config.errors import ConfigError, shown_path

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_OS_ERROR = re.compile(r"\(os error (\d+)\)|Error code (\d+) \(")
"""The forms in which libraries written in Rust, and torch, report the system's error number."""
_MISSING = (errno.ENOENT, errno.ESTALE, errno.ENOTDIR)
_MOVE = "set output_dir to another file system"
_SOLUTIONS = {
    **dict.fromkeys(_DISK_FULL, f"Free some space or {_MOVE}"),
    **dict.fromkeys(_MISSING, "Do not move or remove a run's directory while it runs"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"Get write permission or {_MOVE}"),
    errno.EROFS: f"Make it writable again or {_MOVE}",
    errno.EISDIR: "Remove or rename the directory of that name",
    errno.EFBIG: f"Raise the limit (ulimit -f) or {_MOVE}",
    errno.ENOMEM: (
        "Free some memory of the machine, raise the limit of the process (ulimit -v) or of its"
        " container, or set checkpointing.async_save=false, which needs less"
    ),
}
"""The solution by the system's error number."""


class WriteError(RuntimeError):
    """A file or directory could not be written. The message has path, cause and solution."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of a file that was written."""

    size: int
    sha256: str


@contextmanager
def reporting_write_errors(path: Path, content: str | None = None) -> Iterator[None]:
    """Convert a failed system call to a WriteError about `path`.

    These are OSErrors, and errors of other libraries with the system's error number. `content`
    describes the content, e.g. "the metrics of step 2"; None if the path is clear. ConfigError and
    other ValueErrors are not converted.
    """
    try:
        yield
    except (WriteError, ValueError):
        # ConfigError is a ValueError; no failed system call is one.
        raise
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, WriteError):
                # Raised in a worker, with the path of the file that failed.
                raise WriteError(str(cause)) from error
        number = system_error_number(error)
        if number is None:
            raise
        raise WriteError(describe_write_error(path, number, content)) from error


def describe_write_error(path: Path, number: int, content: str | None = None) -> str:
    """Return the file, the cause and the solution; `number` is the system's error number."""
    subject = f"{path} cannot be written"
    if content:
        subject = f"{content} cannot be written to {path}"
    cause = os.strerror(number)
    directory = path if path.is_dir() else path.parent
    if number in _DISK_FULL:
        cause += _free_space(directory)
    elif number in _MISSING:
        cause += f"; {_missing_part(directory)} was removed or replaced"
    solution = _SOLUTIONS.get(number, f"Check the file system of {directory}, or {_MOVE}")
    return (
        f"{subject}: {cause}. {solution}; resume=true continues from the latest checkpoint, if"
        " there is one."
    )


def system_error_number(error: BaseException) -> int | None:
    """Return the system's error number in the causes of `error`: of a file operation, or ENOMEM."""
    for cause in _causes(error):
        # Errors of connections are OSErrors as well, but not of a file.
        if isinstance(cause, OSError) and not isinstance(cause, (ConnectionError, TimeoutError)):
            return cause.errno
        if isinstance(cause, MemoryError):
            return errno.ENOMEM
        match = _OS_ERROR.search(str(cause))
        if match is not None:
            return int(match[1] or match[2])
        # Some libraries report the text of the error without its number.
        if os.strerror(errno.ENOSPC) in str(cause):
            return errno.ENOSPC
    return None


def is_disk_full(error: BaseException) -> bool:
    """Return True if a write failed because of a full disk."""
    return system_error_number(error) in _DISK_FULL


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and its chain of causes, through WorkerError into the worker's exception."""
    cause: Any = error
    while isinstance(cause, BaseException):
        yield cause
        cause = cause.__cause__ or getattr(cause, "cause", None)


@contextmanager
def replacing(path: Path, content: str | None = None) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` durably when the block ends.

    If the block raises, `path` is unchanged and the temporary file is removed. Raises WriteError.
    """
    # In the same directory: a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.new")
    with reporting_write_errors(path, content):
        try:
            temporary.unlink(missing_ok=True)
            yield temporary
            sync_file(temporary)
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        # A rename is durable once the directory is.
        sync_file(path.parent)


def write_bytes(path: Path, data: bytes, content: str | None = None) -> FileRecord:
    """Replace `path` durably and atomically, with the permissions of the umask.

    Raises WriteError.
    """
    # Exclusive creation: a link of that name is not followed.
    with replacing(path, content) as temporary, temporary.open("xb") as file:
        file.write(data)
    return FileRecord(len(data), hashlib.sha256(data).hexdigest())


def write_text(path: Path, text: str, content: str | None = None) -> FileRecord:
    """Replace `path` by UTF-8 text durably and atomically. Raises WriteError."""
    # A lone surrogate, which UTF-8 does not support, becomes its JSON and YAML escape.
    return write_bytes(path, text.encode("utf-8", errors="backslashreplace"), content)


def write_json(path: Path, value: Any, content: str | None = None) -> FileRecord:
    """Write plain JSON values durably and atomically.

    Raises WriteError, and ValueError for a value that JSON does not support (NaN, a tensor).
    """
    try:
        text = json.dumps(value, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name} can have only plain JSON values: {error}") from error
    # Without a newline at the end, a truncated file is never valid JSON.
    return write_text(path, text, content)


def write_json_lines(path: Path, records: Iterable[Any], content: str | None = None) -> FileRecord:
    """Write one JSON object per line durably and atomically. Raises WriteError."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    return write_text(path, "".join(lines), content)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a JSONL file; an incomplete last line, left by a kill, is skipped.

    A file that does not exist has no lines. Raises ConfigError for another line that is not JSON.
    """
    lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                yield json.loads(line)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ConfigError(
                    f"{shown_path(path)}:{number}: not valid JSON: {error.msg}"
                ) from error


class AppendedFile:
    """A file to which complete records are appended, without a buffer in this process.

    An append that fails leaves no part of the record. Raises WriteError, also if the file was
    removed or replaced: a write to a removed file is lost without an error of the system.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reporting_write_errors(path):
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
            status = os.fstat(self._descriptor)
        self._identity = (status.st_dev, status.st_ino)

    def append(self, record: bytes, content: str | None = None) -> None:
        """Append a record. `content` describes it in the message of a WriteError."""
        self.check(content)
        with reporting_write_errors(self.path, content):
            size = os.fstat(self._descriptor).st_size
            remaining = memoryview(record)
            try:
                # A write may be partial, for example at a limit of the file size.
                while remaining:
                    num_written = os.write(self._descriptor, remaining)
                    remaining = remaining[num_written:]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, size)
                raise

    def check(self, content: str | None = None) -> None:
        """Raise WriteError if the file was removed or replaced."""
        with reporting_write_errors(self.path, content):
            status = os.stat(self.path)
            if (status.st_dev, status.st_ino) != self._identity:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))

    def append_json(self, record: Any, content: str | None = None) -> None:
        """Append one strict JSON object and a newline."""
        self.append((json.dumps(record, allow_nan=False) + "\n").encode(), content)

    def sync(self) -> None:
        """Wait until everything appended is on disk."""
        with reporting_write_errors(self.path):
            _fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._descriptor >= 0:
            descriptor = self._descriptor
            self._descriptor = -1
            with reporting_write_errors(self.path):
                os.close(descriptor)


def finish_library_file(path: Path) -> FileRecord:
    """Make a file of another library durable and return its record.

    The file gets the permissions of the umask: some libraries create files for the owner only.
    """
    umask = os.umask(0o022)
    os.umask(umask)
    with reporting_write_errors(path):
        os.chmod(path, 0o666 & ~umask)
        sync_file(path)
        return file_record(path)


def file_record(path: Path) -> FileRecord:
    """Return size and checksum of an existing file, read in chunks. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return FileRecord(size, hashlib.file_digest(file, "sha256").hexdigest())


def remove_link(path: Path) -> None:
    """Remove a symbolic link, so that nothing is written to its target. Raises OSError."""
    if path.is_symlink():
        path.unlink()


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on disk, or the names in a directory.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # A pipe or a device, or a file system without fsync, or without it for directories.
        if error.errno in (errno.EIO, *_DISK_FULL):
            raise


def _free_space(directory: Path) -> str:
    try:
        return f" ({shutil.disk_usage(directory).free / 1e6:,.0f} MB are free)"
    except OSError:
        return ""


def _missing_part(directory: Path) -> str:
    """Return the first missing directory of a path, or "the file" if the directory exists."""
    for part in (*reversed(directory.parents), directory):
        if not part.is_dir():
            return str(part)
    return "the file"
