"""`nemo-like show` prints recorded rollouts of a GRPO run; `nemo-like replay` repeats an optimizer
step from its record, with the loss of the run and with another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nemo_like.config.errors import ConfigError, counted, shown_path
from nemo_like.console import say
from nemo_like.rollout.records import RolloutRecord, record_sample, recorded_steps
from nemo_like.run.directory import RunDirectory
from nemo_like.run.progress import Progress, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_like.algorithms.grpo.replay import ReplayReport

_SORT_KEYS = {"reward": "reward", "length": "num_tokens", "difference": "logprob_difference_max"}
"""Key of a record for each value of --sort."""
_DETAILS = {
    "num_tokens": "tokens",
    "num_trained_tokens": "trained tokens",
    "advantage": "advantage",
    "logprob_difference_mean": "mean log-prob difference",
    "logprob_difference_max": "max log-prob difference",
    "weight_versions": "weight versions",
    "source": "source",
    "status": "status",
    "attempts": "attempts",
    "calls": "calls",
    "trained_calls": "trained calls",
    "turn_rewards": "rewards per turn",
    "error": "error",
    "kept": "kept by dynamic sampling",
}
"""Values of a record that are shown besides its rewards, with their labels."""
_FIRST = ("policy/grad_norm", "policy/loss")
"""Metrics that are printed before the others."""
_NOT_COMPARED = {
    *("policy/lr", "policy/skipped_steps", "policy/rank_time_worst_over_mean"),
    *("policy/recompilations", "policy/peak_memory_gb", "policy/peak_memory_mean_gb"),
    *("policy/expert_load_max", "policy/expert_rank_load_max"),
}
"""Metrics of an optimizer step that was taken."""


def show(arguments: argparse.Namespace) -> int:
    """Print the rows and return the exit code. Raises ConfigError for a missing record."""
    directory = RunDirectory(arguments.source)
    step = arguments.step
    if step is None:
        step = max(recorded_steps(directory.rollouts(0).parent, ".jsonl"), default=0)
    records = list(_read_records(directory, step))
    order = list(range(len(records)))
    if arguments.sort is not None:
        key = _SORT_KEYS[arguments.sort]
        # Stable, so that equal rows stay in the order of the batch.
        order.sort(key=lambda row: _sort_value(records[row].get(key)), reverse=True)
    chosen = [order[position] for position in parse_rows(arguments.rows, len(order))]
    samples = [_sample(records[row], row) for row in chosen]
    if arguments.tokens:
        samples = _with_tokens(samples, chosen, directory, step)
    progress = Progress()
    members: dict[Any, list[int]] = {}
    for row, record in enumerate(records):
        members.setdefault(record["group"], []).append(row)
    statuses = {record["episode"]: record["status"] for record in records if "episode" in record}
    if statuses:
        counts = Counter(statuses.values()).items()
        parts = ", ".join(f"{count} {status}" for status, count in counts)
        say(f"step {step}: {counted(len(statuses), 'episode')}: {parts}")
    shown_prompt = None
    for row, sample in zip(chosen, samples, strict=True):
        group = records[row]["group"]
        rows = members[group]
        heading = f"step {step}, prompt {group}, completion {rows.index(row) + 1}/{len(rows)}"
        if "episode" in records[row]:
            episode = records[row]["episode"]
            rows = [each for each in rows if records[each]["episode"] == episode]
            heading = f"step {step}, prompt {group}, episode {episode}, row {rows.index(row) + 1}"
            heading += f"/{len(rows)}"
        # The prompt of completions that follow one another is shown once.
        segments = sample.segments
        if shown_prompt == (group, sample.prompt):
            segments = tuple(itertools.dropwhile(lambda segment: not segment[1], segments))
        shown_prompt = (group, sample.prompt)
        progress.show_sample(replace(sample, segments=segments), heading)
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
            available = (
                "rollouts are recorded by GRPO runs with logger.save_rollouts; `nemo-like report"
                f" {shown_path(directory.path)}` shows any run"
            )
        raise ConfigError(f"there is no {shown_path(path)}; {available}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown_path(path)} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"{shown_path(path)} has no rows: step {step} sampled none")
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(
                f"{shown_path(path)}:{number}: not valid JSON: {error.msg}"
            ) from error


def _sort_value(value: Any) -> float:
    """Return the sort key of a value: rows without one come last."""
    return value if isinstance(value, (int, float)) and not math.isnan(value) else -math.inf


def _sample(record: Mapping[str, Any], row: int) -> Sample:
    """Return a record for display, with the row of the batch and the details that it has."""
    sample = record_sample(record, marks_roles=True)
    notes = {"row": str(row), **sample.notes}
    for name, label in _DETAILS.items():
        value = record.get(name)
        if isinstance(value, float):
            notes[label] = f"{value:.4g}"
        elif isinstance(value, list):
            notes[label] = " ".join(f"{each:.4g}" for each in value) or "none"
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
    from nemo_like.config.paths import model_directory
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
        if row >= len(record.columns["input_ids"]):
            # Of a group that dynamic sampling dropped: its tokens are not in the batch.
            decoded.append(sample)
            continue
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


def replay(arguments: argparse.Namespace) -> int:
    """Replay the step, print the comparison and return the exit code. Raises ConfigError."""
    # Imported here: it imports torch, which `show` does not need.
    from nemo_like.algorithms.grpo.replay import replay_step

    report = replay_step(arguments.source, arguments.step, arguments.overrides)
    say(report_text(report))
    return 0


def report_text(report: ReplayReport) -> str:
    """Return the comparison as a table.

    The columns are the logged values and the repeated ones, and with overrides the repeated ones
    and those with overrides; each pair is followed by its difference.
    """
    title = (
        f"step {report.step}, optimizer step 1 of {report.num_optimizer_steps}:"
        f" {counted(report.num_rows, 'row')}, weights of {report.weights}"
    )
    lines = [
        title,
        f"packing/*: all rows of the step, planned for the run's layout {report.layout}",
        "",
        *_table(("logged", report.logged), ("replayed", report.replayed)),
    ]
    if report.overridden is not None:
        lines += [
            "",
            f"with {' '.join(report.overrides)}",
            *_table(("replayed", report.replayed), ("overridden", report.overridden)),
        ]
    return "\n".join(lines)


def _table(
    left: tuple[str, Mapping[str, float | None]], right: tuple[str, Mapping[str, float | None]]
) -> list[str]:
    """Return the lines of a table with two sides, (title, metrics) each, and their difference."""
    (left_title, before), (right_title, after) = left, right
    lines = [f"{'metric':<36}{left_title:>16}{right_title:>16}{'difference':>14}"]
    names = (before.keys() | after.keys()) - _NOT_COMPARED
    for name in sorted(names, key=lambda name: (name not in _FIRST, name)):
        old = before.get(name)
        new = after.get(name)
        difference = "" if old is None or new is None else f"{new - old:+.3g}"
        lines.append(f"{name:<36}{_number(old):>16}{_number(new):>16}{difference:>14}")
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.8g}"
