"""The state of the training loop in a checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nemo_like.checkpoint_manifest import CheckpointError, read_json
from nemo_like.files import write_json

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
    rng: dict[str, Any] = field(default_factory=dict)
    """States of the driver's random generators, by name."""
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
        values = read_json(path)
        expected = {known.name: known.type for known in fields(TrainingState)}
        if isinstance(values, dict):
            # Absent in checkpoints of versions that had no such state.
            values.setdefault("selection", {})
            values.setdefault("model", {})
        if not isinstance(values, dict) or set(values) != set(expected):
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise CheckpointError(
                f"{path} has {str(found)[:200]} where {sorted(expected)} are expected; another"
                " version wrote it"
            )
        for name, value in values.items():
            expected_type = int if name == "step" else dict
            # bool is a subclass of int.
            if not isinstance(value, expected_type) or isinstance(value, bool):
                raise CheckpointError(
                    f"{path} has a {type(value).__name__} under {name!r}; it is damaged"
                )
        return TrainingState(**values)
