"""Step folders that are complete or absent: written aside, listed in a manifest, renamed, named by
`latest`.

The order of a save, each line durable before the next begins:

1. the caller and the policy's ranks write their files into `checkpoints/.writing_step_<N>`;
2. the driver checks that it sees every file that the ranks report, with its size, and writes
   `manifest.json` last;
3. the folder is renamed to `checkpoints/step_<N>`;
4. `<run>/latest` is replaced by a file that names it;
5. only now are older folders removed, down to `keep_latest`.

So after a kill anywhere, `latest` names a complete checkpoint or does not exist. State is JSON;
nothing is unpickled.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nemo_like.checkpoint_manifest import (
    MANIFEST,
    CheckpointError,
    incomplete_reason,
    read_json,
    write_manifest,
)
from nemo_like.config.schema import CheckpointingConfig
from nemo_like.files import (
    FileRecord,
    WriteError,
    describe_write_error,
    is_disk_full,
    sync_directory,
    system_error_number,
    write_json,
    write_text,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Checkpointer",
    "OpenCheckpoint",
    "TrainingState",
    "incomplete_reason",
]

logger = logging.getLogger(__name__)

_STATE = "training_state.json"
_WRITING = ".writing_"
_STEP = r"(0|[1-9][0-9]{0,17})"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What a resumed loop needs besides the policy's own files; plain JSON values, floats restored
    exactly.

    Example: `TrainingState(step=20, loader={"epoch": 1, "cursor": 64}, counters={"num_tokens":
    81920.0})`.
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
        expected = {known.name: known.type for known in fields(TrainingState)}
        if not isinstance(values, dict) or set(values) != set(expected):
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise CheckpointError(
                f"{path} has {str(found)[:200]} where {sorted(expected)} are expected; another"
                f" version wrote it"
            )
        for name, value in values.items():
            wanted = int if name == "step" else dict
            if not isinstance(value, wanted) or isinstance(value, bool):
                raise CheckpointError(
                    f"{path} has a {type(value).__name__} under {name!r}; it is damaged"
                )
        return TrainingState(**values)


@dataclass(frozen=True)
class Checkpoint:
    """A complete step folder."""

    step: int
    path: Path

    def state(self) -> TrainingState:
        """The loop's state saved with it."""
        return TrainingState.load(self.path)


class OpenCheckpoint:
    """A step folder while it is written. `path` is the folder; every rank's files must be reported
    with `add`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reported: dict[str, FileRecord] = {}

    def add(self, subfolder: str, reports: Sequence[Mapping[str, FileRecord]]) -> None:
        """Take over what each rank wrote into `subfolder`: file name -> size and checksum."""
        for rank, report in enumerate(reports):
            for name, record in report.items():
                key = f"{subfolder}/{name}"
                if key in self.reported:
                    raise CheckpointError(
                        f"rank {rank} and an earlier rank both wrote {key}; {self.path} is"
                        f" discarded"
                    )
                self.reported[key] = record


class Checkpointer:
    """Saves and finds the checkpoints of one run; a single process, the driver, owns it."""

    def __init__(self, run_path: Path, config: CheckpointingConfig) -> None:
        if config.keep_latest < 1:
            raise ValueError(
                f"checkpointing.keep_latest is {config.keep_latest}; keep at least 1 checkpoint"
            )
        self.config = config
        self.path = run_path / "checkpoints"
        self.latest_path = run_path / "latest"
        self._verified_step: int | None = None

    def should_save(self, step: int, *, is_last: bool = False) -> bool:
        """Whether `step` is due: every `save_period` steps and at the end, unless `latest` is this
        step already.
        """
        is_due = is_last or (self.config.save_period > 0 and step % self.config.save_period == 0)
        return self.config.enabled and is_due and not self._is_latest(step)

    @contextmanager
    def writing(self, step: int, *, prunes: bool = True) -> Iterator[OpenCheckpoint]:
        """Give an empty folder; when the block ends it becomes checkpoint `step`, when the block
        raises it is removed.

        All processes that write into the folder must be done with it when the block ends, and
        report their files. Raises CheckpointError if a file cannot be written or is not what was
        reported, and ValueError if `latest` is this very step; earlier checkpoints stay as they
        were in both cases. `prunes=False` keeps the older checkpoints, whatever `keep_latest` is,
        until the next one that prunes.
        """
        if self._is_latest(step):
            raise ValueError(
                f"{self._folder(step)} is the latest checkpoint already; call should_save({step})"
                f" first"
            )
        folder = self.path / f"{_WRITING}step_{step}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._remove(self.path.glob(f"{_WRITING}*"))
            folder.mkdir()
            checkpoint = OpenCheckpoint(folder)
            yield checkpoint
            write_manifest(folder, step, checkpoint.reported)
            self._publish(folder, step)
        except BaseException as error:
            message = self._failure_message(error, step, folder)
            shutil.rmtree(folder, ignore_errors=True)
            if message is not None:
                raise CheckpointError(message) from error
            raise
        if prunes:
            self._prune(step)

    def find_latest(self, check: Callable[[Path], str | None] | None = None) -> Checkpoint | None:
        """The checkpoint that `latest` names if it is complete, else the newest complete one, else
        None.

        Every file is compared with its checksum; `check` may give one more reason against a folder.
        The reason why a checkpoint is passed over is logged. None means that the run never had a
        checkpoint: raises CheckpointError if there are checkpoints and none is complete.
        """
        for leftover in sorted(self.path.glob(f"{_WRITING}*")):
            logger.warning("ignoring %s: its save was interrupted", leftover)
        named, steps = self._named_step(), self._steps()
        reasons = []
        for step in ([] if named is None else [named]) + [step for step in steps if step != named]:
            reason = self._problem(step, check)
            if reason is None:
                for newer in (newer for newer in steps if newer > step and step == named):
                    logger.warning(
                        "ignoring %s: `latest` names the older step_%d", self._folder(newer), step
                    )
                if reasons:
                    logger.warning("falling back to %s", self._folder(step))
                else:
                    logger.info("resuming from %s", self._folder(step))
                self._verified_step = step
                return Checkpoint(step, self._folder(step))
            logger.warning("ignoring %s: %s", self._folder(step), reason)
            reasons.append(f"step_{step}: {reason}")
        if reasons:
            raise CheckpointError(
                f"no checkpoint in {self.path} can be used, so the run cannot be resumed. "
                + "; ".join(reasons[:5])
                + ("; ..." if len(reasons) > 5 else "")
                + f". Restore one of them from a copy, or start again at step 0: choose another run_name, or remove"
                f" {self.path} and {self.latest_path} and run again with resume=true"
            )
        logger.warning("no checkpoint in %s: starting at step 0", self.path)
        return None

    def _problem(self, step: int, check: Callable[[Path], str | None] | None) -> str | None:
        folder = self._folder(step)
        reason = incomplete_reason(folder, step)
        if reason is not None:
            return reason
        try:
            if TrainingState.load(folder).step != step:
                return f"its {_STATE} is of another step"
        except CheckpointError as error:
            return str(error)
        return None if check is None else check(folder)

    def _folder(self, step: int) -> Path:
        return self.path / f"step_{step}"

    def _steps(self) -> list[int]:
        """Steps that have a folder, complete or not, newest first."""
        names = (re.fullmatch(f"step_{_STEP}", path.name) for path in self.path.glob("step_*"))
        return sorted((int(match[1]) for match in names if match), reverse=True)

    def _named_step(self) -> int | None:
        """The step that `latest` names; None if there is no such file or it says something else."""
        try:
            if not self.latest_path.is_file():
                if self.latest_path.exists():
                    logger.warning("%s is not a regular file; ignoring it", self.latest_path)
                return None
            with self.latest_path.open(encoding="utf-8", errors="replace") as file:
                text = file.read(1000).strip()
        except OSError as error:
            logger.warning("%s cannot be read (%s); ignoring it", self.latest_path, error.strerror)
            return None
        match = re.fullmatch(f"checkpoints/step_{_STEP}", text)
        if match is None:
            logger.warning(
                "%s says %r, not checkpoints/step_<N>; ignoring it", self.latest_path, text[:80]
            )
            return None
        return int(match[1])

    def _is_latest(self, step: int) -> bool:
        return step == self._named_step() and incomplete_reason(self._folder(step), step) is None

    def _publish(self, folder: Path, step: int) -> None:
        final = self._folder(step)
        if final.exists():  # not what `latest` names, or not complete: `writing` checked
            shutil.rmtree(final)
        folder.rename(final)
        sync_directory(self.path)
        write_text(self.latest_path, f"checkpoints/{final.name}\n")
        self._verified_step = step

    def _prune(self, step: int) -> None:
        """Remove all but the newest `keep_latest` up to `step`; newer ones are from before the run
        went back.
        """
        listed = [
            kept
            for kept in self._steps()
            if kept <= step and (self._folder(kept) / MANIFEST).exists()
        ]
        self._remove(
            self._folder(other)
            for other in set(self._steps()) - set(listed[: self.config.keep_latest])
        )

    def _remove(self, folders: Iterable[Path]) -> None:
        for folder in list(folders):
            try:
                if folder.is_symlink():
                    folder.unlink()
                else:
                    shutil.rmtree(folder)
            except (
                OSError
            ) as error:  # the new checkpoint is safe; a folder left behind costs space only
                logger.warning("could not remove %s: %s", folder, error)

    def _failure_message(self, error: BaseException, step: int, folder: Path) -> str | None:
        """What to tell the user if `error` is a failed write; None for any other error."""
        num_bytes = _folder_bytes(folder)
        if is_disk_full(error, self.path, num_bytes):
            return self._disk_full_message(step, num_bytes)
        number = system_error_number(error)
        cause: Any = error if isinstance(error, WriteError) else getattr(error, "cause", None)
        if isinstance(cause, (WriteError, CheckpointError)):
            problem = str(cause)
        elif number is not None:
            path = getattr(cause or error, "filename", None)
            problem = describe_write_error(Path(path) if isinstance(path, str) else folder, number)
        else:
            return None
        return f"the checkpoint of step {step} was not written: {problem} {self._earlier()}."

    def _disk_full_message(self, step: int, num_bytes: int) -> str:
        free = shutil.disk_usage(self.path).free
        return (
            f"the checkpoint of step {step} was not written: the disk of {self.path} ran full."
            f" {num_bytes / 1e9:.2f} GB "
            f"were written and removed again, {free / 1e9:.2f} GB are free now. {self._earlier()}."
            f" Free some space, lower "
            f"checkpointing.keep_latest (now {self.config.keep_latest}), or set output_dir to"
            f" another disk."
        )

    def _earlier(self) -> str:
        named = self._named_step() if self._verified_step is None else self._verified_step
        return (
            "There is no earlier one"
            if named is None
            else f"step_{named} is intact; resume=true continues there"
        )


def _folder_bytes(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:  # removed meanwhile
        return 0
