"""Records of a rollout: JSON lines to read, and a safetensors file to compute with.

`rollouts/step_<N>.jsonl` has one object per row. `rollouts/step_<N>.safetensors` has every column
of the batch that was trained: `<name>` for an array [B, ...], `<name>.values` and `<name>.offsets`
for values per token. Rows may have any number of spans of trained tokens.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.data.jagged import Jagged
from nemo_like.run.files import reporting_write_errors, write_bytes
from nemo_like.run.progress import Sample

Column = np.ndarray | Jagged

FORMAT = "nemo_like.rollout.1"
ENGINE_LOGPROBS = ("prev_logprobs", "policy_logprobs")
"""Columns with the training engine's log-probs of the tokens; a batch has at most one."""
_VALUES = ".values"
_OFFSETS = ".offsets"


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """Everything that the training of one step's rollout read, and what it logged."""

    step: int
    """The step that trained the rows, counted from 1."""
    weights_version: int
    """Optimizer state and weights at the beginning of the step: those after so many steps."""
    config: Mapping[str, Any]
    """The resolved config of the run, as plain values."""
    optimizer_steps: Sequence[Mapping[str, float | None]]
    """Metrics of each optimizer step by name; null for a number that is not finite."""
    columns: Mapping[str, Column]
    """By name: [B, ...] per row, Jagged [T, ...] per token."""
    has_images: bool = False
    """Prompts had images, which the record does not have."""

    def save(self, path: Path) -> None:
        """Write the file durably and atomically. Raises WriteError."""
        tensors = {}
        for name, column in self.columns.items():
            if name == "images":
                continue
            if isinstance(column, Jagged):
                tensors[name + _VALUES] = np.ascontiguousarray(column.values)
                tensors[name + _OFFSETS] = np.ascontiguousarray(column.offsets)
            else:
                tensors[name] = np.ascontiguousarray(column)
        metadata = {
            "format": FORMAT,
            "step": str(self.step),
            "weights_version": str(self.weights_version),
            "config": json.dumps(self.config),
            "optimizer_steps": json.dumps(self.optimizer_steps, allow_nan=False),
            "has_images": json.dumps("images" in self.columns),
        }
        write_bytes(path, save(tensors, metadata), f"the token ids of step {self.step}")

    @classmethod
    def load(cls, path: Path) -> RolloutRecord:
        """Read what `save` wrote. Raises ConfigError for another or a damaged file."""
        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if metadata.get("format") != FORMAT:
                raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
            return cls(
                step=int(metadata["step"]),
                weights_version=int(metadata["weights_version"]),
                config=json.loads(metadata["config"]),
                optimizer_steps=json.loads(metadata["optimizer_steps"]),
                columns=_columns(tensors),
                has_images=json.loads(metadata.get("has_images", "false")),
            )
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{shown_path(path)} is not the record of a rollout, or is damaged: {error}"
            ) from error


def _columns(tensors: Mapping[str, np.ndarray]) -> dict[str, Column]:
    """Return the columns of the tensors of a file, [B, ...], [T, ...] or offsets [B + 1]."""
    columns: dict[str, Column] = {}
    for name, tensor in tensors.items():
        if name.endswith(_OFFSETS):
            continue
        if name.endswith(_VALUES):
            column = name.removesuffix(_VALUES)
            columns[column] = Jagged(tensor, tensors[column + _OFFSETS])
        else:
            columns[name] = tensor
    return columns


def json_numbers(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return the values with None, which is null in JSON, for numbers that are not finite."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def row_values(columns: Mapping[str, Column], locations: Sequence[str]) -> list[dict[str, Any]]:
    """Return location, lengths and log-prob differences of each row, as JSON values.

    `columns` are [B, ...] or Jagged [T] and have `input_ids`, `token_mask` and
    `generation_logprobs`; `locations` has B entries, such as `data/train.jsonl:17`. The difference
    of a token is the training engine's log-prob minus the generator's. The mean is over the
    absolute values of the trained tokens; it is left out without the engine's log-probs, and null
    for a row without trained tokens or with one that is not finite.
    """
    trained = _trained_tokens(columns)
    engine = next((columns[name] for name in ENGINE_LOGPROBS if name in columns), None)
    generation = columns["generation_logprobs"]
    assert isinstance(generation, Jagged)
    rows = []
    for row, location in enumerate(locations):
        values: dict[str, Any] = {
            "source": location,
            "num_tokens": len(trained[row]),
            "num_trained_tokens": int(trained[row].sum()),
        }
        if isinstance(engine, Jagged):
            difference = np.abs(engine[row] - generation[row])[trained[row]]
            mean = float(difference.mean()) if len(difference) else math.nan
            largest = float(difference.max()) if len(difference) else math.nan
            values |= json_numbers(
                {"logprob_difference_mean": mean, "logprob_difference_max": largest}
            )
        rows.append(values)
    return rows


def _trained_tokens(columns: Mapping[str, Column]) -> Jagged:
    """Return which tokens are trained, bool [T]: the mask without rows that are left out.

    The first token of a row has no token before it that could predict it.
    """
    mask = columns["token_mask"]
    assert isinstance(mask, Jagged)
    trained = mask.values.astype(bool)
    starts = mask.offsets[:-1][mask.lengths > 0]
    trained[starts] = False
    row_mask = columns.get("row_mask")
    if isinstance(row_mask, np.ndarray):
        trained &= np.repeat(row_mask.astype(bool), mask.lengths)
    return Jagged(trained, mask.offsets)


def recorded_steps(directory: Path, suffix: str) -> list[int]:
    """Return the steps with a file `step_<N><suffix>` in `directory`, in order."""
    steps = []
    for path in directory.glob(f"step_*{suffix}"):
        # At most 18 digits, as in the names of checkpoints.
        match = re.fullmatch(r"step_([0-9]{1,18})", path.name.removesuffix(suffix))
        if match is not None:
            steps.append(int(match[1]))
    return sorted(steps)


def remove_old_tokens(directory: Path, num_kept: int, checkpoint_steps: Sequence[int]) -> None:
    """Remove all token files but the newest `num_kept` and those that can be replayed.

    A step can be replayed if the weights before it exist: the initial model, and the
    checkpoints of `checkpoint_steps`. Raises WriteError.
    """
    replayable = {1, *(step + 1 for step in checkpoint_steps)}
    for step in recorded_steps(directory, ".safetensors")[:-num_kept]:
        if step not in replayable:
            path = directory / f"step_{step}.safetensors"
            with reporting_write_errors(path):
                path.unlink(missing_ok=True)


def record_sample(record: Mapping[str, Any], *, marks_roles: bool = False) -> Sample:
    """Return a row of `rollouts/step_<N>.jsonl` for display, with its reward and its parts.

    With `marks_roles` the role is in front of every message.
    """
    # Reward functions may have the name `answer`.
    notes = {"expected": str(record["answer"])}
    for name, value in record.items():
        if name.startswith("reward_"):
            notes[name.removeprefix("reward_")] = _shown(value)
    notes["finish"] = str(record["finish_reason"])
    messages = [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": record["completion"]},
    ]
    segments: list[tuple[str, bool]] = []
    # The text of each turn, on separate lines.
    for message in () if "segments" in record else record.get("messages", messages):
        if segments:
            segments.append(("\n", False))
        if marks_roles:
            segments.append((f"[{message['role']}] ", False))
        text = str(message.get("content") or "")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            text += f"\n[call] {function['name']} {json.dumps(function['arguments'])}"
        segments.append((text, message["role"] == "assistant"))
    # A branch: tokens that were given, and turns of the model.
    for index, text in enumerate(record.get("segments", ())):
        segments.append((text, index % 2 == 1))
    return Sample(tuple(segments), reward=record["reward"], notes=notes)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
