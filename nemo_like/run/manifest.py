"""The manifest of a checkpoint directory: its files with sizes and checksums, and their check."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from nemo_like.run.files import FileRecord, file_record, sync_file, write_json

MANIFEST = "manifest.json"
_FORMAT = 2
VISIBLE_WITHIN_S = 5.0
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
            sync_file(path)
        elif path.is_file():
            name = path.relative_to(directory).as_posix()
            record = reported.get(name) or file_record(path)
            entries[name] = {"size": record.size, "sha256": record.sha256}
    write_json(directory / MANIFEST, {"format": _FORMAT, "step": step, "files": entries})


def incomplete_reason(directory: Path, step: int, *, checks_content: bool = True) -> str | None:
    """Return the reason why a checkpoint of `step` is incomplete; None if it is complete.

    Reads every file, unless `checks_content` is False: then only the sizes of the files are
    compared.
    """
    path = directory / MANIFEST
    if not directory.exists():
        return "it does not exist"
    if not path.exists():
        return f"it has no {MANIFEST}, so its save was interrupted"
    try:
        manifest = read_json(path)
        found_step = manifest["step"]
        found_format = manifest["format"]
        files = {name: FileRecord(**entry) for name, entry in manifest["files"].items()}
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} is damaged ({error})"
    if found_format != _FORMAT:
        return f"its {MANIFEST} has format {found_format}; this version reads format {_FORMAT}"
    if found_step != step:
        return f"its {MANIFEST} is of step {found_step}"
    # Sizes first: they find most problems without reading the files.
    for name, record in files.items():
        size = visible_size(directory / name)
        if size is None:
            return f"{name} is missing or cannot be read"
        if size != record.size:
            return f"{name} has {size} bytes where {record.size} were written"
    if not checks_content:
        return None

    def content_problem(name: str) -> str | None:
        try:
            is_equal = file_record(directory / name).sha256 == files[name].sha256
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        return None if is_equal else f"{name} does not have the content that was written"

    # Threads are enough: hashing releases the GIL.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        return next(filter(None, pool.map(content_problem, files)), None)


def read_json(path: Path) -> Any:
    """Read a JSON file of a checkpoint. Raises CheckpointError if it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def wait_until_visible(is_visible: Callable[[], bool]) -> bool:
    """Wait up to 5 s for what another node wrote; return False if it does not appear."""
    deadline = time.monotonic() + VISIBLE_WITHIN_S
    while not is_visible():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


def visible_size(path: Path) -> int | None:
    """Return the size of a file; None if this process cannot open it."""
    try:
        # Opened, because `stat` alone may return a cached size on a network file system.
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError:
        return None


def _await_file(path: Path, size: int, step: int) -> None:
    """Wait until this process sees the file with its size. Raises CheckpointError after 5 s."""
    if wait_until_visible(lambda: visible_size(path) == size):
        return
    found = visible_size(path)
    state = "does not see it" if found is None else f"sees {found:,} bytes"
    raise CheckpointError(
        f"the checkpoint of step {step} was not published: a policy worker wrote {size:,}"
        f" bytes to {path}, but the driver {state}. Driver and workers must share the file"
        " system of output_dir; set output_dir to a directory that all nodes share"
    )
