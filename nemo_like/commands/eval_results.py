"""Results of `nemo-like eval`: means with confidence intervals, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from nemo_like.commands.answer_files import Record
from nemo_like.commands.answer_rows import PromptFile
from nemo_like.config.text import plural
from nemo_like.rollout.intervals import Estimate, estimates
from nemo_like.rollout.metrics import ScoredAnswers, answer_means


@dataclass(frozen=True, kw_only=True)
class SetResults:
    """Results on one file of rows."""

    num_prompts: int
    num_left_out: int = 0
    """Rows that are too long."""
    num_reward_errors: int = 0
    """Answers on which a reward function failed."""
    metrics: Mapping[str, Estimate]
    """By name, as a run logs them as `validation/<name>`."""
    sources: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    """Metrics of the rows of each source."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results on all files."""

    sets: Mapping[str, SetResults]
    """By name of the file; "" for the one without a name."""
    settings: Mapping[str, Any]
    confidence: float | None = None
    """Level of the intervals; None without intervals."""


def evaluation_results(
    records: Sequence[Record],
    files: Sequence[PromptFile],
    *,
    pass_reward: float,
    confidence: float,
    settings: Mapping[str, Any],
) -> Results:
    """Return the results of the records of `evaluate`, which are in the order of `files`."""
    sets = {}
    first = 0
    for file in files:
        own = records[first : first + len(file.prompts)]
        first += len(file.prompts)
        answers = scored_answers(own)
        sources: dict[str, Mapping[str, Estimate]] = {}
        if file.sources is not None:
            source_of = np.array(file.sources)
            for source in sorted(set(file.sources)):
                selected = answers.take(np.flatnonzero(source_of == source))
                sources[source] = _estimates(selected, pass_reward, confidence)
        num_errors = 0
        for record in own:
            num_errors += sum(problem is not None for problem in record.get("errors", []))
        sets[file.name] = SetResults(
            num_prompts=len(own),
            num_left_out=file.num_left_out,
            num_reward_errors=num_errors,
            metrics=_estimates(answers, pass_reward, confidence),
            sources=sources,
        )
    return Results(sets=sets, settings=settings, confidence=confidence)


def scored_answers(records: Sequence[Record]) -> ScoredAnswers:
    """Return the answers of P records, which have equally many, as arrays [P, n]."""
    num_samples = len(records[0]["completions"])
    # An environment may return a component in some conversations only; it is 0 in the others.
    names: dict[str, None] = {}
    for record in records:
        names |= dict.fromkeys(record["components"])
    components = {}
    for name in names:
        values = [record["components"].get(name, [0.0] * num_samples) for record in records]
        components[name] = np.array(values, dtype=np.float64)
    reasons = np.array([record["finish_reasons"] for record in records])
    return ScoredAnswers(
        rewards=np.array([record["rewards"] for record in records], dtype=np.float64),
        is_scored=np.array([record["is_scored"] for record in records], dtype=bool),
        lengths=np.array([record["num_tokens"] for record in records], dtype=np.int64),
        is_truncated=reasons != "stop",
        components=components,
    )


def results_json(results: Results) -> dict[str, Any]:
    """Return the results as JSON values."""
    sets = {}
    for name, each in results.sets.items():
        sets[name or "data"] = asdict(each)
    values: dict[str, Any] = {"sets": sets, "settings": dict(results.settings)}
    if results.confidence is not None:
        values["confidence"] = results.confidence
    return values


def results_table(results: Results) -> str:
    """Return the results as a table for the terminal."""
    lines = []
    for name, each in results.sets.items():
        title = f"{name}: " if name else ""
        title += f"{each.num_prompts:,} {plural(each.num_prompts, 'prompt')}"
        if each.num_left_out:
            title += f", {each.num_left_out:,} left out"
        if each.num_reward_errors:
            title += f", {each.num_reward_errors:,} failed rewards"
        if lines:
            lines.append("")
        lines += [title, *_metric_lines(each.metrics, results.confidence)]
        for source, metrics in each.sources.items():
            lines += [f"source {source}", *_metric_lines(metrics, results.confidence)]
    return "\n".join(lines)


def _estimates(
    answers: ScoredAnswers, pass_reward: float, confidence: float
) -> dict[str, Estimate]:
    means = answer_means(answers, pass_reward=pass_reward)
    return estimates(means, confidence=confidence)


def _metric_lines(metrics: Mapping[str, Estimate], confidence: float | None) -> list[str]:
    """Return a line per metric: name, value, interval and its method."""
    lines = []
    for name, estimate in metrics.items():
        line = f"  {name:<36}{estimate.value:>12.4f}"
        if estimate.low is not None and confidence is not None:
            line += (
                f"  [{estimate.low:.4f}, {estimate.high:.4f}] {confidence:.0%} {estimate.method}"
            )
        lines.append(line)
    return lines
