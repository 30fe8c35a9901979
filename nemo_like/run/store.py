"""Copies of checkpoints and exported models on an object store, through fsspec.

Each upload is a directory in `<checkpointing.upload_to>/<run_name>`. `step_<N>` has a checkpoint
and the files of the run that a resume needs, all at their paths in the run directory; `hf` and
`hf_ema` have exported models. The order of an upload:

1. an earlier upload of that name is removed, its `upload.json` first;
2. all files are written;
3. `upload.json` is written, with size and SHA-256 of every file;
4. `latest` or `best` is written, with the name of the upload;
5. only now are older checkpoints removed.

So after an interruption at any point an upload is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import Any

from nemo_like.config.errors import ConfigError, error_text
from nemo_like.run.checkpoint import MANIFEST, CheckpointError
from nemo_like.run.files import FileRecord, file_record, write_text

logger = logging.getLogger(__name__)

_UPLOAD = "upload.json"
_KEY = "checkpointing.upload_to"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
"""Protocol -> the extra with its package."""
_LOCAL = ("file", "local")
_RUN_FILES = ("config.yaml", "*.jsonl", "plan/*.json*", "logs/*_run_id")
"""Files of a run that a resume continues; config.yaml, which marks the directory of a run, first.
The last ones are the ids of the runs of trackers.
"""


class UploadCancelled(Exception):
    """The run has ended before the upload."""


class Store:
    """The uploads of one run. Methods raise the exceptions of the store's library."""

    def __init__(self, url: str, run_name: str) -> None:
        """Raises ConfigError, with the extra to install, for a URL that cannot be used."""
        # Imported where it is used: most runs have no store.
        from fsspec.core import url_to_fs

        protocol, separator, _ = url.partition("://")
        if not separator:
            raise ConfigError(f"{_KEY}: {url!r} is not a URL such as s3://bucket or file:///backup")
        # Only on a local file system a directory must exist before its files.
        options = {"auto_mkdir": True} if protocol in _LOCAL else {}
        try:
            self.file_system, root = url_to_fs(url, **options)
        except Exception as error:  # the libraries of stores raise any type
            advice = ""
            if isinstance(error, ImportError) and protocol in _EXTRAS:
                advice = f"; run pip install 'nemo-like[{_EXTRAS[protocol]}]'"
            raise ConfigError(f"{_KEY}: {url!r}: {error_text(error)}{advice}") from error
        self._bucket = root.partition("/")[0] if protocol in _EXTRAS else ""
        self._is_local = protocol in _LOCAL
        self.root = f"{root.rstrip('/')}/{run_name}"
        self.address = f"{url.rstrip('/')}/{run_name}"
        self.is_cancelled = False
        """Set it to end an upload of another thread before its next request."""

    @property
    def files(self) -> Any:
        """The file system. Raises UploadCancelled."""
        if self.is_cancelled:
            raise UploadCancelled
        return self.file_system

    def put(self, name: str, parent: Path, paths: Iterable[Path]) -> None:
        """Upload files of the directory `parent`, in place of an earlier upload of that name."""
        self.remove(name)
        records = {}
        for path in paths:
            relative = path.relative_to(parent).as_posix()
            if path.suffix == ".jsonl":
                # Records may be appended during the upload; a resume removes later ones.
                content = path.read_bytes()
                self.files.pipe_file(f"{self.root}/{name}/{relative}", content)
                record = FileRecord(len(content), hashlib.sha256(content).hexdigest())
            else:
                self.files.put_file(str(path), f"{self.root}/{name}/{relative}")
                record = file_record(path)
            records[relative] = asdict(record)
        self.files.pipe_file(f"{self.root}/{name}/{_UPLOAD}", json.dumps(records).encode())

    def put_checkpoint(self, run: Path, path: Path) -> bool:
        """Upload a checkpoint and the files of its run; return False if the store has it."""
        manifest = path / MANIFEST
        uploaded = self.records(path.name).get(manifest.relative_to(run).as_posix())
        if uploaded == file_record(manifest):
            return False
        files = (file for file in sorted(path.rglob("*")) if file.is_file())
        self.put(path.name, run, (*files, *_run_files(run)))
        return True

    def remove(self, name: str) -> None:
        """Remove an upload, if it exists."""
        # Its manifest first: an interrupted removal leaves no upload that seems complete.
        for relative in (f"{name}/{_UPLOAD}", name):
            with suppress(FileNotFoundError):
                self.files.rm(f"{self.root}/{relative}", recursive=True)

    def point(self, pointer: str, name: str) -> None:
        """Let the file `latest` or `best` name an upload; a reader sees the old or the new name."""
        path = f"{self.root}/{pointer}"
        # Object stores replace an object atomically, a local file system a renamed file.
        written = f"{path}.new" if self._is_local else path
        self.files.pipe_file(written, f"{name}\n".encode())
        if self._is_local:
            Path(written).replace(path)

    def named(self, pointer: str) -> str | None:
        """Return the upload that `latest` or `best` names; None without the file."""
        try:
            return self.files.cat_file(f"{self.root}/{pointer}").decode(errors="replace").strip()
        except FileNotFoundError:
            return None

    def steps(self) -> list[int]:
        """Return the steps of the complete and of incomplete checkpoints, newest first.

        Raises ConfigError if the bucket does not exist.
        """
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self.root, detail=False)
        except FileNotFoundError:
            if self._bucket and not self.files.exists(self._bucket):
                raise ConfigError(
                    f"{_KEY}: the bucket {self._bucket!r} of {self.address} does not exist, or your"
                    " credentials cannot read it; create it, or correct the URL"
                ) from None
            return []
        names = [path.rstrip("/").rpartition("/")[2].partition("step_") for path in paths]
        return sorted((int(step) for _, _, step in names if step.isdecimal()), reverse=True)

    def records(self, name: str) -> dict[str, FileRecord]:
        """Return the files of a complete upload; empty without one."""
        try:
            entries = json.loads(self.files.cat_file(f"{self.root}/{name}/{_UPLOAD}"))
            records = {path: FileRecord(**entry) for path, entry in entries.items()}
        except (FileNotFoundError, ValueError, TypeError, AttributeError):
            return {}
        # No file of a store may lead out of the run directory.
        is_inside = [not {"..", "/"} & set(PurePosixPath(path).parts) for path in records]
        return records if all(is_inside) else {}

    def prune(
        self, step: int, keep_latest: int, best: str | None, keep_hours: float | None = None
    ) -> None:
        """Remove the checkpoints up to `step` but the newest `keep_latest`, those that were
        uploaded in the last `keep_hours`, and `best`.
        """
        names = [f"step_{other}" for other in self.steps() if other <= step]
        complete = [name for name in names if self.records(name)]
        kept = {best, *complete[:keep_latest]}
        for name in names:
            if name in kept:
                continue
            if keep_hours is not None and name in complete:
                uploaded = self.files.modified(f"{self.root}/{name}/{_UPLOAD}")
                if time.time() - uploaded.timestamp() < 3600 * keep_hours:
                    continue
            self.remove(name)

    def get(self, name: str, target: Path, under: str = "") -> str | None:
        """Download the files of an upload that begin with `under`; return the problem, if any."""
        for relative, record in self.records(name).items():
            if not relative.startswith(under):
                continue
            path = target / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self.files.get_file(f"{self.root}/{name}/{relative}", str(path))
            except FileNotFoundError:
                return f"{relative} is missing"
            if file_record(path) != record:
                return f"{relative} does not have the content that was uploaded"
        return None


def open_store(url: str | None, run_name: str) -> Store | None:
    """Return the store of `checkpointing.upload_to`; None without one. Raises ConfigError."""
    return None if url is None else Store(url, run_name)


def _run_files(run: Path) -> Iterator[Path]:
    for pattern in _RUN_FILES:
        yield from sorted(run.glob(pattern))


def check_unused(store: Store) -> None:
    """Raise ConfigError if the store has checkpoints, before a run that is not a resume."""
    try:
        is_used = bool(store.steps())
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 (the libraries of stores raise any type)
        # Uploads are tried with every checkpoint.
        logger.warning("%s cannot be read now: %s", store.address, error_text(error))
        return
    if is_used:
        raise ConfigError(
            f"run_name: {store.address} has checkpoints of another run; choose another run_name, or"
            " set resume=true to continue it from its latest checkpoint"
        )


def restore(store: Store, run: Path) -> int | None:
    """Download the latest complete checkpoint into a run directory without the file `latest`.

    The checkpoint that `best` names is downloaded as well. Every file is compared with its
    checksum. Returns the step; None if there is nothing to download. Raises CheckpointError if the
    store cannot be read, or if no complete upload has the content that was uploaded, and
    ConfigError if the bucket does not exist.
    """
    # Written last: a kill during an earlier download leaves a directory without it.
    if (run / "latest").exists():
        return None
    try:
        return _restore(store, run, run / "checkpoints" / ".writing_download")
    except ConfigError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"no checkpoint can be downloaded from {store.address} ({error_text(error)}), and {run}"
            " has none, so the run would start again at step 0. Check the store and your"
            f" credentials, or set {_KEY} to null"
        ) from error


def _restore(store: Store, run: Path, download: Path, num_retries: int = 3) -> int | None:
    # As with local checkpoints, a step after `latest` is of a run that went back.
    latest, best = store.named("latest"), store.named("best")
    steps = sorted(store.steps(), key=lambda step: f"step_{step}" != latest)
    problems = []
    for step in steps:
        name = f"step_{step}"
        shutil.rmtree(download, ignore_errors=True)
        has_checksums = bool(store.records(name))
        # `latest` is written after the checksums.
        is_complete = has_checksums or name == latest
        problem = "its checksums are damaged" if is_complete else "its upload was interrupted"
        if has_checksums:
            problem = store.get(name, download)
        if problem is None:
            if best != name and best in {f"step_{each}" for each in steps}:
                # A damaged one is found by its own manifest.
                store.get(best, download, under=f"checkpoints/{best}/")
            _move(download, run)
            write_text(run / "latest", f"checkpoints/{name}\n")
            return step
        logger.warning("ignoring %s/%s: %s", store.address, name, problem)
        if is_complete:
            problems.append(f"{name}: {problem}")
    # A run that still writes may have replaced the checkpoints since the list was read.
    if num_retries > 0 and set(store.steps()) != set(steps):
        return _restore(store, run, download, num_retries - 1)
    if problems:
        raise CheckpointError("; ".join(problems))
    return None


def _move(download: Path, run: Path) -> None:
    for path in (*_run_files(download), *(download / "checkpoints").iterdir()):
        target = run / path.relative_to(download)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    shutil.rmtree(download, ignore_errors=True)
