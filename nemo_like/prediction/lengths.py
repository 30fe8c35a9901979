"""Row lengths from a file or from a past run."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from nemo_like.config.errors import ConfigError, counted, shown_path
from nemo_like.data.planning.plan import BatchPlan, plan_batch
from nemo_like.data.planning.prefixes import SharedPrefixes, SharedPrefixMode
from nemo_like.data.planning.spec import PlanSpec
from nemo_like.data.planning.token_counts import TokenCounts
from nemo_like.run.files import read_json_lines

_MAX_TOKENS = 2**40
"""A larger length is a mistake, and sums of such lengths in float64 would not be exact."""
COMPARED = (
    "packing/padding_share",
    "packing/utilization",
    "packing/num_microbatches",
    "packing/rank_imbalance_flops",
)
"""Metrics that are determined by lengths and plan alone."""
BUBBLE = "packing/pipeline_bubble_share"
"""One more such metric, of pipelines alone."""


@dataclass(frozen=True, eq=False)
class RowLengths:
    """Lengths of rows, with their source for messages.

    Example: `RowLengths(TokenCounts(np.array([418, 505])), "conv.csv, ContextTokens")`.
    """

    counts: TokenCounts
    source: str
    """File and columns, for the report."""
    locations: Sequence[str] | None = None
    """File and line of each row. Example: `conv.csv:17`."""
    is_ordered: bool = False
    """Rows are in the order of a run and are not shuffled."""

    @property
    def values(self) -> np.ndarray:
        """Tokens of each row, int64 [B]."""
        return self.counts.lengths

    @property
    def num_trained(self) -> np.ndarray | None:
        """Tokens of each row with loss, int64 [B]; None if they are not known."""
        return self.counts.num_trained

    def location(self, row: int) -> str:
        """Return file and line of a row, or its number if these are not known."""
        return f"row {row}" if self.locations is None else self.locations[row]


def read_lengths(
    path: Path,
    columns: Sequence[str] = (),
    *,
    group: str | None = None,
    prefix: str | None = None,
    limit: int | None = None,
) -> RowLengths:
    """Read the first `limit` lengths of a file.

    Each row is the sum of its `columns` in a CSV or JSONL file, where a list counts its items;
    without `columns` a line is one length. Rows with an equal value in the column `group` begin
    with the same tokens, as many as the column `prefix` has. Raises ConfigError with the line and
    the value.
    """
    shown = shown_path(path)
    try:
        # Spreadsheets write a byte order mark, which would become part of the first column's name.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not UTF-8: {error.reason}"
        raise ConfigError(
            f"{shown} cannot be read ({reason}); give a text, CSV or JSONL file of row lengths"
        ) from error
    values = []
    locations = []
    groups: dict[str, int] = {}
    group_ids = []
    prefix_lengths = []
    shared = [] if group is None or prefix is None else [group, prefix]
    # Lines after the limit are not parsed, so a mistake in them is no error.
    for location, cells in islice(_records(text, shown, [*columns, *shared]), limit):
        counts = cells[: len(cells) - len(shared)]
        total = sum(_count(value, location, columns, text) for value in counts)
        if not 1 <= total <= _MAX_TOKENS:
            raise ConfigError(f"{location}: '{total}' is not a length; a row has at least 1 token")
        if shared:
            num_shared = _count(cells[-1], location, columns, text)
            if num_shared > total:
                raise ConfigError(
                    f"{location}: the prefix has {num_shared} tokens ({prefix}) and the row"
                    f" {total}; the column of --prefix counts tokens at the start of the row"
                )
            group_ids.append(groups.setdefault(str(cells[-2]), len(groups)))
            prefix_lengths.append(num_shared)
        values.append(total)
        locations.append(location)
    if not values:
        raise ConfigError(f"{shown} has no rows; give a file with one length per line, or --column")
    description = " + ".join(columns) or "one length per line"
    prefixes = SharedPrefixes.of_groups(group_ids, prefix_lengths) if shared else None
    token_counts = TokenCounts(np.asarray(values, np.int64), None, prefixes)
    return RowLengths(token_counts, f"{shown}, {description}", locations)


def _records(text: str, shown: str, columns: Sequence[str]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the location of each row with the values of `columns`, or with the line itself."""
    if columns and not text.lstrip().startswith("{"):
        reader = csv.DictReader(io.StringIO(text))
        for row in reader:
            location = f"{shown}:{reader.line_num}"
            yield location, _cells(row, columns, location)
        return
    # `str.splitlines` would also split at characters that JSON does not escape.
    for number, line in enumerate(text.split("\n"), 1):
        location = f"{shown}:{number}"
        if not line.strip():
            continue
        if not columns:
            yield location, [line.strip()]
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{location}: not valid JSON: {error.msg}") from error
        yield location, _cells(record if isinstance(record, dict) else {}, columns, location)


def _cells(row: dict[str, Any], columns: Sequence[str], location: str) -> list[Any]:
    """Return the values of `columns`. Raises ConfigError with the columns that exist."""
    for name in columns:
        if row.get(name) is None:
            found = ", ".join(key for key, value in row.items() if value is not None)
            raise ConfigError(f"{location} has no column {name!r}; it has {found or 'none'}")
    return [row[name] for name in columns]


def _count(value: object, location: str, columns: Sequence[str], text: str) -> int:
    """Return a number of tokens. Raises ConfigError unless it is a whole number of at least 0."""
    # A list, of token ids for example, is counted.
    if isinstance(value, list):
        return len(value)
    # JSON may have numbers and booleans; a float is more likely another column than a length.
    if isinstance(value, int | str) and str(value).strip().isdecimal():
        return int(value)
    hint = "lengths are whole numbers of tokens"
    if not columns:
        first = text.lstrip().partition("\n")[0]
        hint += f"; for a CSV or JSONL file give --column NAME (the first line is {first!r})"
    raise ConfigError(f"{location}: {value!r} is not a length; {hint}")


@dataclass(frozen=True)
class PastRun:
    """The recorded lengths and metrics of a run."""

    path: Path
    steps: dict[int, TokenCounts]
    """Step -> counts of its rows, in the order they were planned."""
    metrics: dict[int, dict[str, float]]
    """Step -> metric -> value, from metrics.jsonl."""
    episodes: dict[int, np.ndarray] = field(default_factory=dict)
    """Step -> episode of each row, int64 [B], of a run of programs."""

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    def rows(self, limit: int | None = None) -> RowLengths:
        """Return the first `limit` rows of all full steps in order.

        The last step of an epoch may have fewer rows; it would not be a typical batch.
        """
        sizes = {step: self._size(step) for step in self.steps}
        full = [self.steps[step] for step in self.steps if sizes[step] == max(sizes.values())]
        source = f"{counted(len(full), 'step')} of the run {shown_path(self.path)}"
        counts = TokenCounts.concat(full)
        return RowLengths(
            counts.take(np.arange(len(counts.lengths))[:limit]), source, is_ordered=True
        )

    def _size(self, step: int) -> int:
        """Return the number of rows of a step, or of its episodes."""
        rows = self.episodes.get(step)
        return len(self.steps[step].lengths) if rows is None else len(np.unique(rows))

    def spec_of_rows(self, spec: PlanSpec) -> PlanSpec:
        """Return `spec` with a batch of as many rows as its episodes have had on average."""
        num_rows = sum(len(self.steps[step].lengths) for step in self.episodes)
        if spec.global_batch_size is None or num_rows == 0:
            return spec
        num_episodes = sum(self._size(step) for step in self.episodes)
        mean_rows = round(spec.global_batch_size * num_rows / num_episodes)
        return replace(spec, global_batch_size=max(mean_rows, 1))

    def compare(
        self, spec: PlanSpec, shared_prefix: SharedPrefixMode
    ) -> dict[str, tuple[float, float]]:
        """Return metric -> (logged mean, mean planned from the lengths with `spec`).

        The means are over the steps that have both; without such a step the result is empty.
        """
        both = [(each, plan.metrics()) for each, plan in self.logged_plans(spec, shared_prefix)]
        if not both:
            return {}
        names = [name for name in (*COMPARED, BUBBLE) if all(name in each for each in both[0])]
        return {
            name: (fmean(logged[name] for logged, _ in both), fmean(each[name] for _, each in both))
            for name in names
        }

    def logged_plans(
        self, spec: PlanSpec, shared_prefix: SharedPrefixMode
    ) -> list[tuple[dict[str, float], BatchPlan]]:
        """Return the metrics of each logged step, and the plan of its rows with `spec`."""
        found = []
        for step, counts in self.steps.items():
            metrics = self.metrics.get(step, {})
            # A run that was killed may have planned a step without logging it.
            if metrics.keys() >= set(COMPARED):
                episodes = self.episodes.get(step)
                plan = plan_batch(
                    counts, spec, episodes=episodes, shared_prefix=shared_prefix, warn=False
                )
                found.append((metrics, plan))
        return found


def read_run(path: Path) -> PastRun:
    """Read the run of `path`, its metrics.jsonl or its directory.

    Raises ConfigError if the run has no row lengths.
    """
    folder = path if path.is_dir() else path.parent
    recorded = folder / "plan" / "lengths.jsonl"
    steps: dict[int, TokenCounts] = {}
    episodes: dict[int, np.ndarray] = {}
    for line in read_json_lines(recorded):
        # A resumed run plans some steps again; the last record counts.
        steps[int(line["step"])] = TokenCounts.from_dict(line)
        if "episode" in line:
            episodes[int(line["step"])] = np.array(line["episode"], dtype=np.int64)
    if not any(len(counts.lengths) for counts in steps.values()):
        raise ConfigError(
            f"{shown_path(folder)} has no row lengths in {shown_path(recorded)}; give the"
            " metrics.jsonl in the directory of a run that trained a step"
        )
    metrics = {int(line["step"]): line for line in read_json_lines(folder / "metrics.jsonl")}
    return PastRun(folder, dict(sorted(steps.items())), metrics, episodes)
