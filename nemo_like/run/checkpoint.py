"""Crash-safe checkpoint directories: write to a temporary name, write the manifest, rename.

The order of a save, each line durable before the next begins:

1. the caller and the policy's ranks write their files into `checkpoints/.writing_step_<N>`, the
   ranks possibly while training continues;
2. the driver checks that it sees every file that the ranks report, with its size, and writes
   `manifest.json` last;
3. the directory is renamed to `checkpoints/step_<N>`;
4. `<run>/latest` is replaced by a file with its name, and `<run>/best` if it is the best one;
5. only now are older checkpoints removed, down to `keep_latest`.

So after a kill at any point, `latest` refers to a complete checkpoint or does not exist. State is
JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nemo_like.config.schema import CheckpointingConfig
from nemo_like.run.files import (
    FileRecord,
    WriteError,
    describe_write_error,
    file_record,
    is_disk_full,
    reporting_write_errors,
    sync_file,
    system_error_number,
    write_json,
    write_text,
)

__all__ = ["Checkpoint", "CheckpointError", "Checkpointer", "OpenCheckpoint", "incomplete_reason"]

logger = logging.getLogger(__name__)

_WRITING = ".writing_"
_STEP = r"(0|[1-9][0-9]{0,17})"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint directory."""

    step: int
    path: Path

    def state(self) -> TrainingState:
        """Read the state of the training loop."""
        return TrainingState.load(self.path)


class OpenCheckpoint:
    """A checkpoint directory while it is written; report every rank's files with `add`."""

    def __init__(self, path: Path, step: int, *, prunes: bool, is_best: bool = False) -> None:
        self.path = path
        self.step = step
        self.is_best = is_best
        """The file `best` will name it."""
        self.prunes = prunes
        """Older checkpoints are removed, down to `keep_latest`, once this one is published."""
        self.reported: dict[str, FileRecord] = {}

    def add(self, subdirectory: str, reports: Sequence[Mapping[str, FileRecord]]) -> None:
        """Add the files that each rank wrote into `subdirectory`: name -> size and checksum."""
        for rank, report in enumerate(reports):
            for name, record in report.items():
                key = f"{subdirectory}/{name}"
                # Two ranks with the same file name would overwrite each other's weights.
                if key in self.reported:
                    raise CheckpointError(
                        f"rank {rank} and an earlier rank both wrote {key}; {self.path} is"
                        " discarded"
                    )
                self.reported[key] = record


class Checkpointer:
    """Saves and finds the checkpoints of one run. Only one process, the driver, may use it."""

    def __init__(self, run_path: Path, config: CheckpointingConfig) -> None:
        self.config = config
        self.path = run_path / "checkpoints"
        self.latest_path = run_path / "latest"
        self.best_path = run_path / "best"
        self.in_use: frozenset[Path] = frozenset()
        """Checkpoints that are not removed, because they are being uploaded."""
        self._verified_step: int | None = None

    def saved_steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        steps = reversed(self._steps())
        return [step for step in steps if (self._directory(step) / MANIFEST).exists()]

    def selected(self) -> dict[str, Path]:
        """Return the checkpoints that the files `latest` and `best` name, by the file."""
        named = {path.name: self._named_step(path) for path in (self.latest_path, self.best_path)}
        return {name: self._directory(step) for name, step in named.items() if step is not None}

    def should_save(self, step: int, *, is_last: bool = False, is_best: bool = False) -> bool:
        """Return True every `save_period` steps, at the end, and for the best step so far.

        False if `latest` is this step.
        """
        period = self.config.save_period
        is_due = is_last or is_best or (period > 0 and step % period == 0)
        return self.config.enabled and is_due and not self._is_latest(step)

    def begin(self, step: int, *, prunes: bool = True, is_best: bool = False) -> OpenCheckpoint:
        """Create the empty directory of a checkpoint, to be filled and then published.

        `prunes=False` keeps the older checkpoints, whatever `keep_latest` is, until the next one
        that prunes. `is_best` lets `best` name the checkpoint, which is then kept. Raises
        CheckpointError if the directory cannot be created, and ValueError if `latest` is this
        step.
        """
        if self._is_latest(step):
            raise ValueError(
                f"{self._directory(step)} is the latest checkpoint already; call"
                f" should_save({step}) first"
            )
        directory = self.path / f"{_WRITING}step_{step}"
        checkpoint = OpenCheckpoint(directory, step, prunes=prunes, is_best=is_best)
        with self.discarding(checkpoint):
            self.path.mkdir(parents=True, exist_ok=True)
            # Directories of saves that were interrupted; the lock of the run excludes others.
            self._remove(self.path.glob(f"{_WRITING}*"))
            directory.mkdir()
        return checkpoint

    def publish(self, checkpoint: OpenCheckpoint) -> None:
        """Make the directory the checkpoint of its step and `latest`.

        All processes that write into the directory must have finished, and their files must be
        reported. Raises CheckpointError if a file cannot be written or differs from its report;
        earlier checkpoints are unchanged then.
        """
        with self.discarding(checkpoint):
            write_manifest(checkpoint.path, checkpoint.step, checkpoint.reported)
            self._publish(checkpoint.path, checkpoint.step)
        if checkpoint.is_best:
            self.set_best(checkpoint.step)
        if checkpoint.prunes:
            self._prune(checkpoint.step)

    @contextmanager
    def discarding(self, checkpoint: OpenCheckpoint) -> Iterator[None]:
        """Remove the directory if the block raises. A failed write is raised as CheckpointError."""
        try:
            yield
        except BaseException as error:
            # Before the removal, which changes the free space that the message reports.
            message = self._failure_message(error, checkpoint.step, checkpoint.path)
            shutil.rmtree(checkpoint.path, ignore_errors=True)
            if message is not None:
                raise CheckpointError(message) from error
            raise

    def find_latest(self, check: Callable[[Path], str | None] | None = None) -> Checkpoint | None:
        """Return the checkpoint of `latest` if it is complete, else the newest complete one.

        Every file is compared with its checksum; `check` may return another problem of a directory.
        The problem of every skipped checkpoint is logged. Returns None if the run never had a
        checkpoint; raises CheckpointError if there are checkpoints and none is complete.
        """
        for leftover in sorted(self.path.glob(f"{_WRITING}*")):
            logger.warning("ignoring %s: its save was interrupted", leftover)
        named = self._named_step()
        steps = self._steps()
        candidates = [step for step in steps if step != named]
        if named is not None:
            candidates.insert(0, named)
        reasons = []
        for step in candidates:
            reason = self._problem(step, check)
            if reason is None:
                newer = [each for each in steps if each > step]
                # The run went back to an older step, or a kill came before `latest`.
                if step == named and newer:
                    logger.warning(
                        "ignoring steps %s: `latest` names the older step_%d", newer, step
                    )
                if reasons:
                    logger.warning("falling back to %s", self._directory(step))
                else:
                    logger.info("resuming from %s", self._directory(step))
                self._verified_step = step
                return Checkpoint(step, self._directory(step))
            logger.warning("ignoring %s: %s", self._directory(step), reason)
            reasons.append(f"step_{step}: {reason}")
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.path} can be used, so the run cannot be resumed."
                f" {'; '.join(reasons[:5])}. Restore one of them from a copy, or start again at"
                f" step 0: choose another run_name, or remove {self.path} and {self.latest_path}"
                " and run again with resume=true"
            )
        return None

    def set_best(self, step: int | None) -> None:
        """Let the file `best` name the checkpoint of `step`; None removes the file.

        Without a complete checkpoint of `step` the file is removed, with a warning. Raises
        WriteError.
        """
        if step is not None and not (self._directory(step) / MANIFEST).exists():
            logger.warning("the best checkpoint, of step %d, does not exist any more", step)
            step = None
        if step is None:
            with reporting_write_errors(self.best_path):
                self.best_path.unlink(missing_ok=True)
        elif self._named_step(self.best_path) != step:
            write_text(self.best_path, f"checkpoints/step_{step}\n")

    def find(self, name: str) -> Path:
        """Return the directory of the checkpoint `best`, or of a step such as `20`.

        Raises CheckpointError if there is none.
        """
        step = None
        if name == "best":
            step = self._named_step(self.best_path) if self.best_path.exists() else None
        elif re.fullmatch(_STEP, name):
            step = int(name)
        steps = self.saved_steps()
        if step not in steps:
            raise CheckpointError(
                f"{self.path} has no checkpoint {name!r}; it has steps"
                f" {', '.join(map(str, steps)) or 'none'}"
                + ("" if name != "best" else ", and checkpointing.keep_best records the best one")
            )
        return self._directory(step)

    def _problem(self, step: int, check: Callable[[Path], str | None] | None) -> str | None:
        """Return the problem of the checkpoint of `step`, or None if it is complete."""
        directory = self._directory(step)
        reason = incomplete_reason(directory, step)
        if reason is not None:
            return reason
        try:
            if TrainingState.load(directory).step != step:
                return f"its {STATE_FILE} is of another step"
        except CheckpointError as error:
            return str(error)
        return None if check is None else check(directory)

    def _directory(self, step: int) -> Path:
        return self.path / f"step_{step}"

    def _steps(self) -> list[int]:
        """Return the steps that have a directory, complete or not, newest first."""
        matches = [re.fullmatch(f"step_{_STEP}", path.name) for path in self.path.glob("step_*")]
        return sorted((int(match[1]) for match in matches if match is not None), reverse=True)

    def _named_step(self, path: Path | None = None) -> int | None:
        """Return the step that a file names, by default `latest`.

        None without the file or with other content.
        """
        path = path or self.latest_path
        try:
            text = path.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read (%s); ignoring it", path, error.strerror)
            return None
        match = re.fullmatch(f"checkpoints/step_{_STEP}", text)
        if match is None:
            logger.warning("%s has %r, not checkpoints/step_<N>; ignoring it", path, text[:80])
            return None
        return int(match[1])

    def _is_latest(self, step: int) -> bool:
        if step != self._named_step():
            return False
        # Checksums of files that this process wrote or read are not computed again: after SIGTERM
        # there may be no time for it.
        checks_content = step != self._verified_step
        directory = self._directory(step)
        return incomplete_reason(directory, step, checks_content=checks_content) is None

    def _publish(self, directory: Path, step: int) -> None:
        """Rename the complete directory and write `latest`."""
        final = self._directory(step)
        # `begin` has checked that it is not the complete checkpoint of `latest`.
        if final.exists():
            shutil.rmtree(final)
        directory.rename(final)
        sync_file(self.path)
        # Last: until here a kill leaves `latest` at the previous checkpoint.
        write_text(self.latest_path, f"checkpoints/{final.name}\n")
        self._verified_step = step

    def _prune(self, step: int) -> None:
        """Remove all checkpoints but `best` and those up to `step` that `keep_latest` and
        `keep_hours` select.
        """
        steps = self._steps()
        kept = []
        for other in steps:
            # Newer steps are of a run that was resumed at an older step.
            if other <= step and (self._directory(other) / MANIFEST).exists():
                kept.append(other)
        best = self._named_step(self.best_path)
        newest = kept[: self.config.keep_latest]
        kept = [
            other for other in kept if other == best or other in newest or self._is_recent(other)
        ]
        removed = [self._directory(other) for other in steps if other not in kept]
        self._remove(directory for directory in removed if directory not in self.in_use)

    def _is_recent(self, step: int) -> bool:
        hours = self.config.keep_hours
        if hours is None:
            return False
        return time.time() - (self._directory(step) / MANIFEST).stat().st_mtime < 3600 * hours

    def _remove(self, directories: Iterable[Path]) -> None:
        for directory in list(directories):
            try:
                shutil.rmtree(directory)
            except OSError as error:
                # The new checkpoint is safe; a directory that remains costs space only.
                logger.warning("could not remove %s: %s", directory, error)

    def _failure_message(self, error: BaseException, step: int, directory: Path) -> str | None:
        """Return the message for a failed write; None for any other error."""
        number = system_error_number(error)
        cause: Any = error if isinstance(error, WriteError) else getattr(error, "cause", None)
        if isinstance(cause, (WriteError, CheckpointError)):
            problem = str(cause)
        elif number is not None:
            path = getattr(cause or error, "filename", None)
            failed_path = Path(path) if isinstance(path, str) else directory
            problem = describe_write_error(failed_path, number)
        else:
            return None
        if is_disk_full(error):
            keep_latest = self.config.keep_latest
            problem += f" A lower checkpointing.keep_latest (now {keep_latest}) needs less space."
        latest = self._named_step() if self._verified_step is None else self._verified_step
        earlier = "There is no earlier one"
        if latest is not None:
            earlier = f"step_{latest} is intact; resume=true continues there"
        return f"the checkpoint of step {step} was not written: {problem} {earlier}."


STATE_FILE = "training_state.json"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """The state of the training loop, beside the policy's own files; plain JSON values.

    Floats are restored exactly.

    Example: `TrainingState(step=20, loader={"epoch": 1, "cursor": 64}, counters={"num_tokens":
    81920.0})`.
    """

    step: int
    """Steps done."""
    loader: dict[str, Any] = field(default_factory=dict)
    """Position of the data loader."""
    counters: dict[str, float] = field(default_factory=dict)
    """Totals since the start of the run, such as tokens seen."""
    selection: dict[str, Any] = field(default_factory=dict)
    """Best values of the metrics that select checkpoints and end the run."""
    model: dict[str, str] = field(default_factory=dict)
    """Identities of frozen models by config key; the checkpoint does not have their weights."""

    def save(self, directory: Path) -> None:
        """Write `training_state.json`. Raises ValueError for a value that JSON does not support."""
        write_json(directory / STATE_FILE, asdict(self))

    @staticmethod
    def load(directory: Path) -> TrainingState:
        """Read `training_state.json`. Raises CheckpointError if it is missing or has other keys."""
        path = directory / STATE_FILE
        try:
            return TrainingState(**read_json(path))
        except TypeError as error:
            raise CheckpointError(
                f"{path} does not have the keys of this version, so another version wrote it"
                f" ({error})"
            ) from error


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
