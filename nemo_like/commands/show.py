"""`nemo-like show`: print recorded rollouts of a GRPO run."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.rollout.records import RolloutRecord, record_sample, recorded_steps
from nemo_like.run.directory import RunDirectory
from nemo_like.run.progress import Progress, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SORT_KEYS: dict[str, Callable[[Mapping[str, Any]], float]] = {
    "reward": lambda record: _key(record.get("reward")),
    "length": lambda record: _key(record.get("num_tokens", record.get("completion_tokens"))),
    "difference": lambda record: _key(record.get("logprob_difference_max")),
}
_DETAILS = {
    "num_tokens": "tokens",
    "num_trained_tokens": "trained tokens",
    "advantage": "advantage",
    "logprob_difference_mean": "mean log-prob difference",
    "logprob_difference_max": "max log-prob difference",
    "weight_versions": "weight versions",
    "source": "source",
}
"""Values of a record that are shown besides its rewards, with their labels."""


def run(arguments: argparse.Namespace) -> int:
    """Print the rows and return the exit code. Raises ConfigError for a missing record."""
    directory = RunDirectory(arguments.source)
    records = list(_read_records(directory, arguments.step))
    order = list(range(len(records)))
    if arguments.sort is not None:
        key = _SORT_KEYS[arguments.sort]
        # Stable, so that equal rows stay in the order of the batch.
        order.sort(key=lambda row: key(records[row]), reverse=True)
    chosen = [order[position] for position in parse_rows(arguments.rows, len(order))]
    samples = [_sample(records[row], row) for row in chosen]
    if arguments.tokens:
        samples = _with_tokens(samples, chosen, directory, arguments.step)
    Progress().show_samples(samples, f"step {arguments.step}, rollout")
    return 0


def parse_rows(text: str, num_rows: int) -> list[int]:
    """Return the positions of e.g. `0-3,8`; a range may end beyond the last of `num_rows`.

    Raises ConfigError for other text and for a single position beyond the last.
    """
    positions: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--rows {text!r}: {part!r} is not a row or a range; write 0-3,8")
        start = int(first)
        stop = int(last) + 1 if dash else start + 1
        if start >= num_rows or stop <= start:
            raise ConfigError(
                f"--rows {text!r}: {part!r} selects nothing; the step has rows 0 to {num_rows - 1}"
            )
        positions += range(start, min(stop, num_rows))
    return positions


def _read_records(directory: RunDirectory, step: int) -> Iterator[dict[str, Any]]:
    path = directory.rollouts(step)
    try:
        # Not `splitlines`: texts may contain other line separators, such as U+2028.
        with path.open(encoding="utf-8") as file:
            lines = list(file)
    except FileNotFoundError as error:
        steps = recorded_steps(path.parent, ".jsonl")
        if steps:
            available = f"recorded are steps {', '.join(map(str, steps))}"
        else:
            available = "give the directory of a GRPO run with logger.save_rollouts"
        raise ConfigError(f"there is no {shown_path(path)}; {available}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(
            f"step {step} trained no rows: dynamic sampling found no group with unequal rewards"
        )
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{shown_path(path)}:{number}: not valid JSON: {error.msg}"
            ) from error


def _key(value: Any) -> float:
    """Return the sort key of a value: rows without one come last."""
    return value if isinstance(value, (int, float)) and not math.isnan(value) else -math.inf


def _sample(record: Mapping[str, Any], row: int) -> Sample:
    """Return a record for display, with the row of the batch and the details that it has."""
    sample = record_sample(record)
    notes = {"row": str(row), **sample.notes}
    for name, label in _DETAILS.items():
        value = record.get(name)
        if isinstance(value, float):
            notes[label] = f"{value:.4g}"
        elif value is not None:
            notes[label] = str(value)
    return Sample(sample.segments, reward=sample.reward, notes=notes)


def _with_tokens(
    samples: Sequence[Sample], rows: Sequence[int], directory: RunDirectory, step: int
) -> list[Sample]:
    """Return the samples with the text of the recorded token ids instead of their segments.

    Raises ConfigError without a record of the token ids or without the tokenizer.
    """
    # Imported here: transformers takes seconds.
    from nemo_like.config.model_directory import model_directory
    from nemo_like.models.pretrained import load_tokenizer

    path = directory.rollout_tokens(step)
    if not path.is_file():
        recorded = recorded_steps(path.parent, ".safetensors")
        raise ConfigError(
            f"--tokens: there is no {shown_path(path)}; token ids are recorded of"
            f" {', '.join(map(str, recorded)) or 'no step'}"
        )
    record = RolloutRecord.load(path)
    policy = record.config["policy"]
    name = policy["tokenizer_name"] or policy["model_name"]
    try:
        tokenizer = load_tokenizer(model_directory("--tokens", name, weights=False))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--tokens: the tokenizer of {name!r} cannot be loaded: {error}"
        ) from error
    decoded = []
    for sample, row in zip(samples, rows, strict=True):
        segments = tuple(_segments(record, row, tokenizer))
        decoded.append(Sample(segments, reward=sample.reward, notes=sample.notes))
    return decoded


def _segments(
    record: RolloutRecord, row: int, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[str, bool]]:
    """Yield the spans of equal token mask of a row as (text, is_trained)."""
    token_ids = record.columns["input_ids"][row].tolist()
    mask = record.columns["token_mask"][row].astype(bool).tolist()
    start = 0
    for position in range(1, len(token_ids) + 1):
        if position == len(token_ids) or mask[position] != mask[start]:
            yield str(tokenizer.decode(token_ids[start:position])), mask[start]
            start = position
