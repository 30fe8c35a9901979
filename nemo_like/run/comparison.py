"""Compares what two runs of one config left: metrics, rows, plans, lengths and weights."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import read_json_lines

_OTHER = re.compile(
    r"(timing|performance|weight_sync|mismatch)/|policy/(rank_time|peak_memory)|unix_time_s"
    r"|generation/num_(restarts|discarded_tokens)|logprob_difference"
)
"""Names that differ between equal runs: clocks, what was lost with a replica of the generator, and
the last bits of its log-probs, which depend on its batches."""
_KEPT = (
    "rollouts/*.jsonl",
    "plan/*",
    "hf/*",
    "checkpoints/*/policy/*.safetensors",
    "checkpoints/*/training_state.json",
)


def differences(expected: Path, found: Path) -> Iterator[str]:
    """Yield how the run directory `found` differs from `expected`.

    Metrics, rows of rollouts, and the bytes of plans, lengths and weights are compared.
    """
    steps = [_metrics(path) for path in (expected, found)]
    if steps[0].keys() != steps[1].keys():
        yield f"metrics.jsonl has {len(steps[1])} instead of {len(steps[0])} steps"
    for step in steps[0].keys() & steps[1].keys():
        first, second = (each[step] for each in steps)
        names = sorted(
            name
            for name in first.keys() | second.keys()
            if first.get(name) != second.get(name) and not _OTHER.match(name)
        )
        if names:
            values = f"{second.get(names[0])} instead of {first.get(names[0])}"
            yield f"step {step}: {names[0]} is {values} (one of {len(names)} metrics that differ)"
            break
    kept = {path.relative_to(root) for root in (expected, found) for path in _kept_files(root)}
    for name in sorted(kept):
        paths = [root / name for root in (expected, found)]
        read = _rows if name.parts[0] == "rollouts" else Path.read_bytes
        if not all(path.is_file() for path in paths):
            yield f"{name} exists in one of the runs only"
        elif read(paths[0]) != read(paths[1]):
            yield f"{name} differs"


def prompt_differences(expected: Path, found: Path) -> Iterator[str]:
    """Yield how the prompts of the rollouts differ: each must be in both as often."""
    counts = [_prompts(path) for path in (expected, found)]
    if not counts[0]:
        yield f"{expected} has no rollouts (logger.save_rollouts)"
    for text, change in ((counts[0] - counts[1], "fewer"), (counts[1] - counts[0], "more")):
        if text:
            yield f"{text.total()} rows {change} of {len(text)} prompts were trained"
    steps = [len(_metrics(path)) for path in (expected, found)]
    if steps[0] != steps[1]:
        yield f"metrics.jsonl has {steps[1]} instead of {steps[0]} steps"


def _kept_files(run: Path) -> Iterator[Path]:
    for pattern in _KEPT:
        yield from (path for path in run.glob(pattern) if path.is_file())


def _rows(path: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not _OTHER.match(name)}
        for row in read_json_lines(path)
    ]


def _prompts(run: Path) -> Counter[str]:
    return Counter(
        str(row["prompt"])
        for path in run.glob("rollouts/step_*.jsonl")
        for row in read_json_lines(path)
    )


def _metrics(run: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record for record in read_json_lines(RunDirectory(run).metrics)}
