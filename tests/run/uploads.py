"""Checkpoints to upload, and file systems that fail or wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_like.config.schema import CheckpointingConfig
from nemo_like.run.checkpoint import Checkpointer, TrainingState
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import write_bytes


def open_run(path: Path, keep_latest: int = 2) -> tuple[RunDirectory, Checkpointer]:
    """An empty run with a config."""
    for folder in ("plan", "logs"):
        (path / folder).mkdir(parents=True)
    directory = RunDirectory(path)
    directory.config.write_text("seed: 1\n")
    return directory, Checkpointer(path, CheckpointingConfig(keep_latest=keep_latest))


def save(directory: RunDirectory, checkpointer: Checkpointer, step: int, *, best: bool = False):
    """Log a step and save its checkpoint, whose content depends on the step."""
    with directory.metrics.open("a") as metrics:
        metrics.write(f'{{"step": {step}}}\n')
    checkpoint = checkpointer.begin(step, is_best=best)
    with checkpointer.discarding(checkpoint):
        (checkpoint.path / "policy").mkdir()
        record = write_bytes(checkpoint.path / "policy/weights", weights(step))
        checkpoint.add("policy", [{"weights": record}])
        TrainingState(step=step).save(checkpoint.path)
    checkpointer.publish(checkpoint)


def weights(step: int) -> bytes:
    return f"weights of {step} ".encode() * 40


class Interrupted(Exception):
    """The process was killed, or the store has failed."""


class Files:
    """A file system whose changes call a function first."""

    def __init__(self, files: Any, before: Callable[[str, str], float]) -> None:
        self.files = files
        self.before = before
        """Gets the method and the path; returns the part of the change that is done, below 1 before
        an interruption."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.files, name)

    def pipe_file(self, path: str, content: bytes) -> None:
        part = self.before("pipe_file", path)
        if part > 0:
            self.files.pipe_file(path, content[: int(len(content) * part)])
        _interrupt(part)

    def put_file(self, source: str, path: str) -> None:
        part = self.before("put_file", path)
        if part > 0:
            content = Path(source).read_bytes()
            self.files.pipe_file(path, content[: int(len(content) * part)])
        _interrupt(part)

    def rm(self, path: str, recursive: bool) -> None:
        part = self.before("rm", path)
        names = sorted(self.files.find(path))
        for name in names[: int(len(names) * part)]:
            self.files.rm_file(name)
        _interrupt(part)
        self.files.rm(path, recursive=recursive)


def _interrupt(part: float) -> None:
    if part < 1:
        raise Interrupted("the store is down")
