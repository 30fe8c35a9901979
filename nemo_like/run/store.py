"""Copies of checkpoints and exported models on an object store, through fsspec.

Each upload is a directory in `<checkpointing.upload_to>/<run_name>`. `step_<N>` has a checkpoint
and the files of the run that a resume needs, all at their paths in the run directory; `hf` and
`hf_ema` have exported models. The order of an upload:

1. an earlier upload of that name is removed, its `upload.json` first;
2. all files are written, and their sizes are compared with a listing of the store;
3. `upload.json` is written, with size and SHA-256 of every file;
4. `latest` and `best` are written, with the name of an upload;
5. only now are older checkpoints removed.

So after an interruption at any point an upload is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from threading import Event
from typing import NamedTuple

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.run.checkpoint import MANIFEST, CheckpointError, read_json
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import FileRecord, file_record, write_text

logger = logging.getLogger(__name__)

UPLOAD_MANIFEST = "upload.json"
_FORMAT = 1
_KEY = "checkpointing.upload_to"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Protocol -> the extra with its package."""


class UploadCancelled(Exception):
    """The run has ended before the upload."""


class DamagedUpload(Exception):
    """A file of an upload is missing or has other content. The message has the reason."""


class Source(NamedTuple):
    """Content of a file to upload."""

    content: Path | bytes
    """The file, or its content if it can change during the upload."""
    record: FileRecord


def check_store(url: str | None) -> None:
    """Raise ConfigError, with the extra to install, unless a URL names a known store."""
    # Imported where it is used: most runs have no store.
    import fsspec

    if url is None:
        return
    protocol, separator, _ = url.partition("://")
    if not separator:
        raise ConfigError(
            f"{_KEY}: {url!r} is not a URL; write for example s3://bucket/prefix or file:///backup"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        advice = "" if extra is None else f"; run pip install 'nemo-like[{extra}]'"
        raise ConfigError(f"{_KEY}: {url!r} needs another package: {error}{advice}") from error
    except ValueError as error:
        known = ", ".join(sorted(_EXTRAS))
        raise ConfigError(
            f"{_KEY}: {url!r}: {error}; use {known}, file or another protocol of fsspec"
        ) from error


class Store:
    """The uploads of one run. Methods raise the exceptions of the store's library."""

    def __init__(self, url: str, run_name: str) -> None:
        """Raises ConfigError for an unknown or unusable URL."""
        from fsspec.core import url_to_fs

        check_store(url)
        # Only directories of a local file system must exist before their files.
        options = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
        try:
            self.files, root = url_to_fs(url, **options)
        except Exception as error:  # the libraries of stores raise any type
            raise ConfigError(f"{_KEY}: {url!r}: {error_text(error)}") from error
        self._root = f"{root.rstrip('/')}/{run_name}"
        self.address = f"{url.rstrip('/')}/{run_name}"
        self.cancelled = Event()
        """Set to end an upload of another thread before its next file."""

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def put(self, name: str, sources: Mapping[str, Source]) -> None:
        """Upload files, by their path below `name`; in place of an earlier upload."""
        self.remove(name)
        for relative, source in sources.items():
            self._write(self._path(name, relative), source.content)
        self.files.invalidate_cache()
        found = self.files.find(self._path(name), detail=True)
        # Some file systems return their paths with a slash at the beginning.
        sizes = {path.lstrip("/"): entry["size"] for path, entry in found.items()}
        for relative, source in sources.items():
            size = sizes.get(self._path(name, relative).lstrip("/"))
            if size != source.record.size:
                raise DamagedUpload(
                    f"{name}/{relative} has {size} bytes where {source.record.size} were written"
                )
        entries = {relative: asdict(source.record) for relative, source in sources.items()}
        text = json.dumps({"format": _FORMAT, "files": entries})
        self._write(self._path(name, UPLOAD_MANIFEST), text.encode())

    def _write(self, path: str, content: Path | bytes) -> None:
        if self.cancelled.is_set():
            raise UploadCancelled
        if isinstance(content, bytes):
            self.files.pipe_file(path, content)
        else:
            self.files.put_file(str(content), path)

    def remove(self, name: str) -> None:
        """Remove an upload, if it exists."""
        # Its manifest first: an interrupted removal leaves no upload that seems complete.
        for path in (self._path(name, UPLOAD_MANIFEST), self._path(name)):
            if self.cancelled.is_set():
                raise UploadCancelled
            with suppress(FileNotFoundError):
                self.files.rm(path, recursive=True)

    def point(self, pointer: str, name: str) -> None:
        """Let the file `latest` or `best` name an upload."""
        self._write(self._path(pointer), f"{name}\n".encode())

    def named(self, pointer: str) -> str | None:
        """Return the upload that `latest` or `best` names; None without the file."""
        try:
            return self.files.cat_file(self._path(pointer)).decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def steps(self) -> list[int]:
        """Return the steps of uploads, complete or not, newest first."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rpartition("/")[2] for path in paths]
        numbers = [name.removeprefix("step_") for name in names if name.startswith("step_")]
        return sorted((int(number) for number in numbers if number.isdecimal()), reverse=True)

    def records(self, name: str) -> dict[str, FileRecord]:
        """Return the files of a complete upload; empty without one."""
        try:
            manifest = json.loads(self.files.cat_file(self._path(name, UPLOAD_MANIFEST)))
            if manifest["format"] != _FORMAT:
                return {}
            records = {path: FileRecord(**entry) for path, entry in manifest["files"].items()}
        except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
            return {}
        # No file of a store may lead out of the run directory.
        is_inside = [not {"..", "/"} & set(PurePosixPath(path).parts) for path in records]
        return records if all(is_inside) else {}

    def prune(self, step: int, keep_latest: int, best: str | None) -> None:
        """Remove the checkpoints before `step` but the newest `keep_latest` and `best`."""
        older = [other for other in self.steps() if other <= step]
        complete = [f"step_{other}" for other in older if self.records(f"step_{other}")]
        for other in older:
            name = f"step_{other}"
            if name not in complete[:keep_latest] and name != best:
                self.remove(name)

    def get(self, name: str, target: Path, under: str = "") -> None:
        """Download the files of an upload that begin with `under`. Raises DamagedUpload."""
        records = self.records(name)
        for relative in (path for path in records if path.startswith(under)):
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.files.get_file(self._path(name, relative), str(path))
            except FileNotFoundError as error:
                raise DamagedUpload(f"{relative} is missing") from error
            if file_record(path) != records[relative]:
                raise DamagedUpload(f"{relative} does not have the content that was uploaded")


def checkpoint_sources(directory: RunDirectory, step: int) -> dict[str, Source]:
    """Return the files of a checkpoint and of the run, by their path in the run directory.

    The files of the run may have records of later steps, which a resume removes.
    """
    checkpoint = directory.path / "checkpoints" / f"step_{step}"
    sources = {}
    for name, entry in read_json(checkpoint / MANIFEST)["files"].items():
        path = checkpoint / name
        sources[path.relative_to(directory.path).as_posix()] = Source(path, FileRecord(**entry))
    for path in (checkpoint / MANIFEST, *_run_files(directory)):
        content = path.read_bytes()
        record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
        sources[path.relative_to(directory.path).as_posix()] = Source(content, record)
    return sources


def _run_files(directory: RunDirectory) -> Iterator[Path]:
    """Yield the files of a run that a resume continues, config.yaml first."""
    yield directory.config
    yield from sorted(directory.path.glob("*.jsonl"))
    yield from sorted(directory.lengths.parent.glob("*.json*"))
    # The ids of the runs of trackers.
    yield from sorted(directory.logs.glob("*_run_id"))


def export_sources(export: Path) -> dict[str, Source]:
    """Return the files of an exported model."""
    paths = [path for path in sorted(export.rglob("*")) if path.is_file()]
    return {p.relative_to(export).as_posix(): Source(p, file_record(p)) for p in paths}


def check_unused(store: Store) -> None:
    """Raise ConfigError if the store has checkpoints, before a run that is not a resume."""
    try:
        is_used = bool(store.steps())
    except Exception as error:  # noqa: BLE001 (the libraries of stores raise any type)
        # Uploads are tried with every checkpoint.
        logger.warning("%s cannot be read now: %s", store.address, error_text(error))
        return
    if is_used:
        raise ConfigError(
            f"run_name: {store.address} has checkpoints of another run; choose another run_name, or"
            " set resume=true to continue it from its latest checkpoint"
        )


def restore(store: Store, directory: RunDirectory) -> int | None:
    """Download the newest complete checkpoint into a run directory without checkpoints.

    The checkpoint that `best` names is downloaded as well. Every file is compared with its
    checksum. Returns the step; None if the store has no complete checkpoint, or if the directory
    has a file `latest`. Raises CheckpointError if the store cannot be read, or if no complete
    upload in it has the content that was uploaded.
    """
    # Written last: a kill during an earlier download leaves a directory without it.
    if (directory.path / "latest").exists():
        return None
    checkpoints = directory.path / "checkpoints"
    try:
        return _restore(store, directory, checkpoints / ".writing_download")
    except DamagedUpload as error:
        problem, advice = str(error), "Restore one of its uploads"
    except Exception as error:  # noqa: BLE001 (the libraries of stores raise any type)
        problem, advice = error_text(error), "Check its address and your credentials"
    raise CheckpointError(
        f"no checkpoint can be downloaded from {store.address} ({problem}), and {directory.path}"
        f" has none, so the run would start again at step 0. {advice}, or set {_KEY} to null"
    )


def _restore(store: Store, directory: RunDirectory, download: Path) -> int | None:
    steps = store.steps()
    # The newest may be of a run that went back to an older step, as with local checkpoints.
    steps.sort(key=lambda step: f"step_{step}" != store.named("latest"))
    problem = None
    for step in steps:
        name = f"step_{step}"
        if not store.records(name):
            logger.warning("ignoring %s/%s: its upload was interrupted", store.address, name)
            continue
        shutil.rmtree(download, ignore_errors=True)
        try:
            store.get(name, download)
        except DamagedUpload as error:
            logger.warning("ignoring %s/%s: %s", store.address, name, error)
            problem = DamagedUpload(f"{name}: {error}")
            continue
        _restore_best(store, download, steps)
        _move(download, directory)
        write_text(directory.path / "latest", f"checkpoints/{name}\n")
        return step
    if problem is not None:
        raise problem
    return None


def _restore_best(store: Store, download: Path, steps: Collection[int]) -> None:
    best = store.named("best")
    is_known = best in {f"step_{step}" for step in steps}
    if best is None or not is_known or (download / "checkpoints" / best).exists():
        return
    try:
        store.get(best, download, under=f"checkpoints/{best}/")
    except DamagedUpload as error:
        logger.warning("the best checkpoint, %s/%s, is not used: %s", store.address, best, error)
        shutil.rmtree(download / "checkpoints" / best, ignore_errors=True)


def _move(download: Path, directory: RunDirectory) -> None:
    """Move the downloaded files to their places: after a kill in between they are moved again."""
    for path in _run_files(RunDirectory(download)):
        target = directory.path / path.relative_to(download)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    for path in (download / "checkpoints").iterdir():
        target = directory.path / "checkpoints" / path.name
        shutil.rmtree(target, ignore_errors=True)
        path.replace(target)
    shutil.rmtree(download, ignore_errors=True)
