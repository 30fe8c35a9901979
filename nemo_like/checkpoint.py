"""Step folders that are either whole or not there: written aside, sealed by a manifest, renamed, named by `latest`.

The order of a save, each line durable before the next begins:

1. the caller writes its files into `checkpoints/.writing_step_<N>`;
2. `manifest.json`, the list of those files, is written last into it;
3. the folder is renamed to `checkpoints/step_<N>`;
4. `<run>/latest` is replaced by a file that names it;
5. only now are older folders removed, down to `keep_latest`.

So after a kill anywhere, `latest` names a whole checkpoint or does not exist. State is JSON; tensors are the business
of whoever writes them, on storage that all of them and this process see. Nothing here is ever unpickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nemo_like.config.schema import CheckpointingConfig

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
_STATE = "training_state.json"
_WRITING = ".writing_"
_MAX_HASHED_BYTES = 64 * 2**20
"""Files above this are checked by size alone: hashing 100 GB would read all of it again, for minutes."""
_FULL_BYTES = 16 * 2**20
"""Free space under which a failed write is put down to a full disk; some writers do not pass the system's reason on."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why and what to do."""


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What a resumed loop needs besides the policy's own files; plain JSON values, floats restored exactly.

    Example: `TrainingState(step=20, loader={"epoch": 1, "cursor": 64}, counters={"num_tokens": 81920.0})`.
    """

    step: int
    """Steps done."""
    loader: dict[str, Any] = field(default_factory=dict)
    """Position of the data loader."""
    rng: dict[str, Any] = field(default_factory=dict)
    """States of the driver's random generators, by name."""
    counters: dict[str, float] = field(default_factory=dict)
    """Totals since the start of the run, such as tokens seen."""

    def save(self, folder: Path) -> None:
        """Write `training_state.json`; raises ValueError if something in it has no JSON form."""
        write_json(folder / _STATE, asdict(self))

    @staticmethod
    def load(folder: Path) -> TrainingState:
        """Read `training_state.json`; raises CheckpointError if it is missing or has other keys."""
        path = folder / _STATE
        values = read_json(path)
        expected = {known.name for known in fields(TrainingState)}
        if not isinstance(values, dict) or set(values) != expected:
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise CheckpointError(f"{path} has {found} where {sorted(expected)} are expected; another version wrote it")
        return TrainingState(**values)


@dataclass(frozen=True)
class Checkpoint:
    """A whole step folder."""

    step: int
    path: Path

    def state(self) -> TrainingState:
        """The loop's state saved with it."""
        return TrainingState.load(self.path)


class Checkpointer:
    """Saves and finds the checkpoints of one run; a single process, the driver, owns it."""

    def __init__(self, run_path: Path, config: CheckpointingConfig) -> None:
        if config.keep_latest < 1:
            raise ValueError(f"checkpointing.keep_latest is {config.keep_latest}; keep at least 1 checkpoint")
        self.config = config
        self.path = run_path / "checkpoints"
        self.latest_path = run_path / "latest"

    def should_save(self, step: int, *, is_last: bool = False) -> bool:
        """Whether `step` is due: every `save_period` steps and at the end, unless `latest` is this step already."""
        is_due = is_last or (self.config.save_period > 0 and step % self.config.save_period == 0)
        return self.config.enabled and is_due and not self._is_latest(step)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Give an empty folder; when the block ends it becomes checkpoint `step`, when the block raises it is removed.

        All processes that write into the folder must be done with it when the block ends. Raises CheckpointError on a
        full disk and ValueError if `latest` is this very step; earlier checkpoints stay as they were in both cases.
        """
        if self._is_latest(step):
            raise ValueError(f"{self._folder(step)} is the latest checkpoint already; ask should_save({step}) first")
        self.path.mkdir(parents=True, exist_ok=True)
        self._remove(self.path.glob(f"{_WRITING}*"))
        folder = self.path / f"{_WRITING}step_{step}"
        try:
            folder.mkdir()
            yield folder
            _seal(folder, step)
            self._publish(folder, step)
        except BaseException as error:
            num_bytes = _folder_bytes(folder)
            is_disk_full = _is_disk_full(error, self.path, num_bytes)
            shutil.rmtree(folder, ignore_errors=True)
            if is_disk_full:
                raise CheckpointError(self._disk_full_message(step, num_bytes)) from error
            raise
        self._prune(step)

    def find_latest(self) -> Checkpoint | None:
        """The checkpoint `latest` names if it is whole, else the newest that is; logs why others are passed over."""
        for leftover in sorted(self.path.glob(f"{_WRITING}*")):
            logger.warning("ignoring %s: its save was interrupted", leftover)
        named, steps = self._named_step(), self._steps()
        for step in ([] if named is None else [named]) + [step for step in steps if step != named]:
            reason = incomplete_reason(self._folder(step), step)
            if reason is None:
                for newer in (newer for newer in steps if newer > step and step == named):
                    logger.warning("ignoring %s: `latest` names the older step_%d", self._folder(newer), step)
                logger.info("resuming from %s", self._folder(step))
                return Checkpoint(step, self._folder(step))
            logger.warning("ignoring %s: %s", self._folder(step), reason)
        logger.warning("no complete checkpoint in %s: starting at step 0", self.path)
        return None

    def _folder(self, step: int) -> Path:
        return self.path / f"step_{step}"

    def _steps(self) -> list[int]:
        """Steps that have a folder, whole or not, newest first."""
        names = (re.fullmatch(r"step_(\d+)", path.name) for path in self.path.glob("step_*"))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def _named_step(self) -> int | None:
        """The step that `latest` names; None if there is no such file or it says something else."""
        if not self.latest_path.exists():
            return None
        text = self.latest_path.read_text(encoding="utf-8", errors="replace").strip()
        match = re.fullmatch(r"checkpoints/step_(\d+)", text)
        if match is None:
            logger.warning("%s says %r, not checkpoints/step_<N>; ignoring it", self.latest_path, text[:80])
            return None
        return int(match[1])

    def _is_latest(self, step: int) -> bool:
        return step == self._named_step() and incomplete_reason(self._folder(step), step) is None

    def _publish(self, folder: Path, step: int) -> None:
        final = self._folder(step)
        if final.exists():  # not what `latest` names, or not whole: `writing` checked
            shutil.rmtree(final)
        folder.rename(final)
        _fsync(self.path)
        replace_text(self.latest_path, f"checkpoints/{final.name}\n")

    def _prune(self, step: int) -> None:
        """Remove all but the newest `keep_latest` up to `step`; newer ones are from before the run went back."""
        whole = [kept for kept in self._steps() if kept <= step and (self._folder(kept) / _MANIFEST).exists()]
        self._remove(self._folder(other) for other in set(self._steps()) - set(whole[: self.config.keep_latest]))

    def _remove(self, folders: Iterable[Path]) -> None:
        for folder in list(folders):
            try:
                shutil.rmtree(folder)
            except OSError as error:  # the new checkpoint is safe; a folder left behind costs space only
                logger.warning("could not remove %s: %s", folder, error)

    def _disk_full_message(self, step: int, num_bytes: int) -> str:
        free = shutil.disk_usage(self.path).free
        named = self._named_step()
        earlier = "There is no earlier one" if named is None else f"step_{named} is intact; resume=true continues there"
        return (
            f"the checkpoint of step {step} was not written: the disk of {self.path} ran full. {num_bytes / 1e9:.2f} GB "
            f"were written and removed again, {free / 1e9:.2f} GB are free now. {earlier}. Free some space, lower "
            f"checkpointing.keep_latest (now {self.config.keep_latest}), or set output_dir to another disk."
        )


def incomplete_reason(folder: Path, step: int) -> str | None:
    """Why `folder` is not a whole checkpoint of `step`; None if it is. Reads files up to 64 MiB, only sizes above."""
    path = folder / _MANIFEST
    if not path.exists():
        return f"it has no {_MANIFEST}, so its save was interrupted" if folder.exists() else "it does not exist"
    try:
        manifest = read_json(path)
        files, saved_step = manifest["files"], manifest["step"]
        reasons = (_file_problem(folder / name, entry["size"], entry["sha256"]) for name, entry in files.items())
        problem = next((reason for reason in reasons if reason is not None), None)
    except (CheckpointError, KeyError, TypeError, AttributeError) as error:
        return f"its {_MANIFEST} is damaged ({type(error).__name__}: {error})"
    return problem if saved_step == step else f"its {_MANIFEST} is of step {saved_step}"


def write_json(path: Path, value: Any) -> None:
    """Write plain JSON values; raises ValueError, naming the file, for anything JSON cannot hold (NaN, tensors)."""
    try:
        text = json.dumps(value, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path.name} can hold only plain JSON values: {error}") from error
    path.write_text(text, encoding="utf-8")  # without a newline at its end, a file cut anywhere is no JSON


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote; raises CheckpointError if the file is missing or broken."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def replace_text(path: Path, text: str) -> None:
    """Replace a small file so that a reader, or a kill, finds either the old text or the new."""
    aside = path.with_name(f".{path.name}.new")
    aside.write_text(text, encoding="utf-8")
    _fsync(aside)
    aside.replace(path)
    _fsync(path.parent)


def _seal(folder: Path, step: int) -> None:
    """Make every file of `folder` durable and write the manifest that lists them."""
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    if not files:
        raise ValueError(f"nothing was written for the checkpoint of step {step}")
    for path in paths:
        _fsync(path)
    entries = {}
    for path in files:
        size = path.stat().st_size
        entries[path.relative_to(folder).as_posix()] = {
            "size": size,
            "sha256": _sha256(path) if size <= _MAX_HASHED_BYTES else None,
        }
    write_json(folder / _MANIFEST, {"format": 1, "step": step, "files": entries})
    _fsync(folder / _MANIFEST)
    _fsync(folder)


def _file_problem(path: Path, size: int, sha256: str | None) -> str | None:
    if not path.is_file():
        return f"{path.name} is missing"
    if path.stat().st_size != size:
        return f"{path.name} has {path.stat().st_size} bytes where {size} were written"
    if sha256 is not None and _sha256(path) != sha256:
        return f"{path.name} does not have the content that was written"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _is_disk_full(error: BaseException, path: Path, num_bytes: int) -> bool:
    """Whether a failed write is a full disk, as the system's error, as another library's text, or by the space left."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if os.strerror(errno.ENOSPC) in str(seen):
            return True
        seen = seen.__cause__ or seen.__context__
    return isinstance(error, Exception) and num_bytes > 0 and shutil.disk_usage(path).free < _FULL_BYTES
