"""The manifest of a checkpoint directory: its files with sizes and checksums, and their check."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_like.run.files import FileRecord, file_record, sync_directory, write_json

MANIFEST = "manifest.json"
_FORMAT = 2
"""Every file has a checksum. Format 1, which is still read, has none for files above 64 MiB."""
_READ_FORMATS = (1, _FORMAT)
_MAX_JSON_BYTES = 256 * 2**20
_PARALLEL_BYTES = 64 * 2**20
"""Checkpoints from this size on are read by several threads."""
_VISIBLE_WITHIN_S = 5.0
"""A network file system may show a file that another node wrote only after a short time."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read. The message has the cause and the solution."""


def write_manifest(directory: Path, step: int, reported: Mapping[str, FileRecord]) -> None:
    """Check that this process sees every reported file, and write the manifest of all files.

    `reported` has the files of the policy's ranks by their path relative to `directory`, with sizes
    and checksums that each rank computed; these large files are not read again. All other files are
    small files of the calling process and are read. Raises CheckpointError if nothing was reported,
    or if a reported file is missing or has another size.
    """
    if not reported:
        raise CheckpointError(
            f"no policy worker reported a file of the checkpoint of step {step}, so it would have"
            " no weights"
        )
    for name, record in reported.items():
        _await_file(directory / name, record.size, step)
    entries = {}
    for path in sorted(directory.rglob("*")):
        if path.is_dir():
            # The names of the files must be durable before the manifest that lists them.
            sync_directory(path)
        elif path.is_file():
            name = path.relative_to(directory).as_posix()
            record = reported.get(name) or file_record(path)
            entries[name] = {"size": record.size, "sha256": record.sha256}
    write_json(directory / MANIFEST, {"format": _FORMAT, "step": step, "files": entries})


def incomplete_reason(directory: Path, step: int, *, checks_content: bool = True) -> str | None:
    """Return the reason why a checkpoint of `step` is incomplete; None if it is complete.

    Reads every file that has a checksum, unless `checks_content` is False: then only the sizes of
    the files are compared.
    """
    path = directory / MANIFEST
    if not directory.exists():
        return "it does not exist"
    if not path.exists():
        return f"it has no {MANIFEST}, so its save was interrupted"
    try:
        manifest = read_json(path)
        files = _checked_files(manifest)
    except CheckpointError as error:
        return f"its {MANIFEST} is damaged ({error})"
    if manifest.get("step") != step:
        return f"its {MANIFEST} is of step {str(manifest.get('step'))[:20]}"
    # Sizes first: they find most problems without reading the files.
    root = directory.resolve()
    for name, (size, _) in files.items():
        problem = _size_problem(root, root / name, size)
        if problem is not None:
            return problem
    if not checks_content:
        return None

    def content_problem(name: str) -> str | None:
        return _content_problem(root / name, files[name][1])

    sizes = [size for size, _ in files.values()]
    total_size = sum(sizes)
    if total_size < _PARALLEL_BYTES:
        return next(filter(None, map(content_problem, files)), None)
    # Threads are enough: hashing releases the GIL.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return next(filter(None, pool.map(content_problem, files)), None)


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_JSON_BYTES:
            raise CheckpointError(
                f"cannot read {path}: it is not a regular file of at most {_MAX_JSON_BYTES:,} bytes"
            )
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise CheckpointError(f"cannot read {path}: it is nested too deeply") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {str(error)[:200]}") from error


def _checked_files(manifest: Any) -> dict[str, tuple[int, str | None]]:
    """Return (size, checksum) by name. Raises CheckpointError for a malformed manifest."""
    if not isinstance(manifest, dict):
        raise CheckpointError(f"it has a {type(manifest).__name__} instead of an object")
    if manifest.get("format") not in _READ_FORMATS:
        raise CheckpointError(
            f"it has format {str(manifest.get('format'))[:20]}; this version reads formats"
            f" {_READ_FORMATS[0]} to {_FORMAT}"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError("it lists no files")
    checked = {}
    for name, entry in files.items():
        checked[name] = _checked_entry(name, entry, manifest["format"])
    return checked


def _checked_entry(name: str, entry: Any, format_number: int) -> tuple[int, str | None]:
    parts = PurePosixPath(name).parts
    # A copied checkpoint must not direct reads to files outside of it.
    is_relative = bool(parts) and not name.startswith("/") and ".." not in parts
    if not is_relative or "\\" in name or "\0" in name:
        raise CheckpointError(f"it lists {name[:80]!r}, which is not a path inside the checkpoint")
    if not isinstance(entry, dict):
        raise CheckpointError(f"it has no size for {name[:80]!r}")
    size = entry.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise CheckpointError(f"it has no size for {name[:80]!r}")
    checksum = entry.get("sha256")
    may_lack_checksum = format_number == 1
    if not isinstance(checksum, str) and not (checksum is None and may_lack_checksum):
        raise CheckpointError(f"it has no checksum for {name[:80]!r}")
    return size, checksum


def _size_problem(root: Path, path: Path, size: int) -> str | None:
    try:
        if not path.resolve().is_relative_to(root):
            return f"{path.name} is a link to a path outside the checkpoint"
        if not path.is_file():
            return f"{path.name} is missing"
        found = path.stat().st_size
    except (OSError, RuntimeError, ValueError) as error:
        # No permission, a cycle of links, or an invalid name.
        return f"{path.name} cannot be read ({error})"
    if found != size:
        return f"{path.name} has {found} bytes where {size} were written"
    return None


def _content_problem(path: Path, sha256: str | None) -> str | None:
    if sha256 is None:
        return None
    try:
        is_equal = file_record(path).sha256 == sha256
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None if is_equal else f"{path.name} does not have the content that was written"


def _await_file(path: Path, size: int, step: int) -> None:
    """Wait until this process sees the file with its size. Raises CheckpointError after 5 s."""
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    while (found := _visible_size(path)) != size:
        if time.monotonic() >= deadline:
            state = "does not see it" if found is None else f"sees {found:,} bytes"
            raise CheckpointError(
                f"the checkpoint of step {step} was not published: a policy worker wrote {size:,}"
                f" bytes to {path}, but the driver {state}. Driver and workers must share the file"
                " system of output_dir; set output_dir to a directory that all nodes share"
            )
        time.sleep(0.1)


def _visible_size(path: Path) -> int | None:
    try:
        # Opened, because `stat` alone may return a cached size on a network file system.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None
