"""What the report of a run shows, read from the files of the run directory. Nothing is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import yaml

from nemo_like.config.errors import ConfigError, shown_path
from nemo_like.data.planning.plan import BatchPlan
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.rollout.records import recorded_steps
from nemo_like.run.directory import RunDirectory, flatten, is_in_use
from nemo_like.run.files import read_json_lines

_KINDS = ("sft", "grpo", "dpo", "distill", "rm")
"""Jobs; the config of a run has the section of its job."""
_LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ([\w.]+): (.*)")
_START = re.compile(r"process \d+ on host .* starts")
_END = re.compile(r"ended by (\w+): ")
_LISTED_WARNINGS = 50


class State(NamedTuple):
    """How a run ended, or that it has not."""

    name: Literal["running", "finished", "stopped", "failed", "killed"]
    text: str
    """The message of the end, if there is one."""


class Warned(NamedTuple):
    """One warning of a run."""

    text: str
    place: str
    """The step and the rule, or the level and the module that logged it."""
    key: str = ""
    """The config key to change."""
    is_severe: bool = False
    """True for errors, and for a rule that stops the run."""


@dataclass(frozen=True, eq=False)
class LogLine:
    """One record of the log; `text` may have several lines."""

    level: str
    module: str
    text: str


class RunFiles:
    """The files of one run, each read on first use."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a directory without a run."""
        self.directory = RunDirectory(path)
        if not self.directory.metrics.is_file() and not self.directory.config.is_file():
            raise ConfigError(
                f"{shown_path(path)} is not the directory of a run: it has no metrics.jsonl and no"
                " config.yaml; give OUTPUT_DIR/RUN_NAME of a run"
            )
        self.name = path.resolve().name

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """Metric -> value of each of `steps`, float64 [S]; NaN where it was not logged."""
        names = dict.fromkeys(name for record in self._records for name in record)
        return {
            name: np.array([_number(record.get(name)) for record in self._records])
            for name in names
            if name != "step"
        }

    @cached_property
    def steps(self) -> np.ndarray:
        """Steps with metrics, int64 [S]."""
        return np.array([int(record["step"]) for record in self._records], dtype=np.int64)

    @cached_property
    def _records(self) -> list[dict[str, Any]]:
        by_step = {record["step"]: record for record in read_json_lines(self.directory.metrics)}
        return [by_step[step] for step in sorted(by_step)]

    def values(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a metric where it is a finite number, [n] each."""
        values = self.metrics.get(name, np.full(len(self.steps), np.nan))
        is_logged = np.isfinite(values)
        return self.steps[is_logged], values[is_logged]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None if it was never logged."""
        _, values = self.values(name)
        return float(values[-1]) if len(values) else None

    @cached_property
    def config_text(self) -> str:
        """The YAML of config.yaml; empty without the file."""
        path = self.directory.config
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """Values by dotted key."""
        return flatten(yaml.safe_load(self.config_text) or {})

    @property
    def kind(self) -> str:
        """The job: sft, grpo, ...; empty if the config does not tell."""
        sections = {key.partition(".")[0] for key in self.config}
        return next((kind for kind in _KINDS if kind in sections), "")

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each row of all recorded steps, int64 [n]."""
        records = read_json_lines(self.directory.lengths)
        lengths = [TokenCounts.from_dict(record).lengths for record in records]
        return np.concatenate([np.zeros(0, np.int64), *lengths])

    @cached_property
    def first_plan(self) -> BatchPlan | None:
        """The plan of the first step; None if it is not recorded."""
        path = self.directory.plan(0)
        return BatchPlan.from_json(path.read_text(encoding="utf-8")) if path.is_file() else None

    @property
    def rollout_steps(self) -> list[int]:
        """Steps with recorded rollouts."""
        return recorded_steps(self.directory.rollouts(0).parent, ".jsonl")

    @property
    def token_steps(self) -> list[int]:
        """Steps whose rollouts are recorded with their token ids."""
        return recorded_steps(self.directory.rollouts(0).parent, ".safetensors")

    @cached_property
    def log(self) -> list[LogLine]:
        """The records of the driver's log."""
        path = self.directory.logs / "driver.log"
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        records: list[tuple[str, str, list[str]]] = []
        for line in text.rstrip("\n").split("\n"):
            match = _LOG_LINE.fullmatch(line)
            if match is not None:
                records.append((match[1], match[2], [match[3]]))
            elif records:
                records[-1][2].append(line)
        return [LogLine(level, module, "\n".join(lines)) for level, module, lines in records]

    @cached_property
    def state(self) -> State:
        """How the run ended, by its log since its last start."""
        if is_in_use(self.directory):
            return State("running", "")
        for line in reversed(self.log):
            if line.text.startswith("done: "):
                return State("finished", line.text)
            match = _END.match(line.text)
            if match is not None:
                stopped = match[1] in ("RunStopped", "KeyboardInterrupt")
                return State("stopped" if stopped else "failed", line.text)
            if _START.match(line.text):
                break
        return State("killed", "the log has no end of the run; its process was killed")

    @property
    def versions(self) -> str:
        """Versions of the packages at the last start; empty if they are not in the log."""
        prefix = "versions: "
        lines = (line.text for line in reversed(self.log) if line.text.startswith(prefix))
        return next(lines, prefix).removeprefix(prefix)

    @property
    def warnings(self) -> list[Warned]:
        """Findings of the health rules, and the last warnings and errors of the log."""
        logged = [
            Warned(line.text, f"{line.level.lower()}, {line.module}", "", line.level != "WARNING")
            for line in self.log
            if line.level not in ("DEBUG", "INFO")
        ]
        return [*self._health(), *dict.fromkeys(logged[-_LISTED_WARNINGS:])]

    def _health(self) -> Iterator[Warned]:
        for record in read_json_lines(self.directory.path / "health.jsonl"):
            place = f"step {record['step']}, health rule {record['rule']}"
            yield Warned(
                str(record["message"]), place, str(record["key"]), record["level"] == "stop"
            )


def _number(value: object) -> float:
    """Return a number of metrics.jsonl; NaN for null and for a metric that is missing."""
    return float(value) if isinstance(value, int | float) else float("nan")
