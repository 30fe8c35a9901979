"""The reference of a policy worker: a model that is not trained, but may be updated.

A checkpoint has the weights of an updated reference beside those of the policy, because they are
not the initial weights any more.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from nemo_like.policy.checkpoint.sharded import PendingSave
from nemo_like.policy.checkpoint.sharded_reader import MANIFEST
from nemo_like.policy.engine import Engine
from nemo_like.run.files import FileRecord

_DIRECTORY = "reference"
"""Directory of the reference inside the policy's directory of a checkpoint."""


class ReferenceModel:
    """The reference engine of one rank; every rank calls every method."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_updated = False

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which `engine` computes the reference."""
        return nullcontext()

    def update(self, policy: Engine) -> None:
        """Copy the weights of the policy, which has the same model and layout."""
        self.engine.copy_weights(policy)
        self._is_updated = True

    def save(self, directory: Path, *, in_background: bool) -> PendingSave | None:
        """Write the weights into the policy's `directory`; None if they are the initial ones."""
        if not self._is_updated:
            return None
        return self.engine.save(directory / _DIRECTORY, in_background=in_background)

    def load(self, directory: Path) -> None:
        """Read the weights from the policy's `directory`, if it has those of a reference.

        Raises CheckpointError for a damaged checkpoint.
        """
        path = directory / _DIRECTORY
        if (path / MANIFEST).is_file():
            self.engine.load(path)
            self._is_updated = True


class BaseModelReference:
    """The policy without its LoRA adapters; it never changes and needs no engine of its own."""

    def __init__(self, policy: Engine) -> None:
        self.engine = policy

    def computing(self) -> AbstractContextManager[None]:
        """Return a context in which `engine` computes the reference."""
        return self.engine.base_model()

    def update(self, policy: Engine) -> None:
        """Raise ValueError: the weights of the model are frozen."""
        raise ValueError(
            "the reference of a policy with LoRA adapters is the model without them, which cannot"
            " be updated; set grpo.reference_update_period to 0"
        )

    def save(self, directory: Path, *, in_background: bool) -> None:
        """Write nothing: the model files have the weights."""

    def load(self, directory: Path) -> None:
        """Read nothing: the model files have the weights."""


class WorkerSave:
    """The checkpoint of one rank that is being written: the policy, and an updated reference."""

    def __init__(self, policy: PendingSave, reference: PendingSave | None) -> None:
        self._policy = policy
        self._reference = reference

    def is_written(self) -> bool:
        """Return True if `finish` does not wait for files of this rank."""
        is_reference_written = self._reference is None or self._reference.is_written()
        return self._policy.is_written() and is_reference_written

    def finish(self) -> dict[str, FileRecord]:
        """Wait for the files of all ranks; see `PendingSave.finish`.

        Files of the reference have the name of its directory in front.
        """
        records = dict(self._policy.finish())
        if self._reference is not None:
            for name, record in self._reference.finish().items():
                records[f"{_DIRECTORY}/{name}"] = record
        return records
