"""What `validate` finds, the result that it shows, and the preview of the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from nemo_like.config.check import batching_section
from nemo_like.config.errors import ConfigError
from nemo_like.config.parallel import policy_layout
from nemo_like.config.schema import PolicyConfig, RunConfig
from nemo_like.config.text import counted
from nemo_like.data.jagged import TokenCounts
from nemo_like.data.planning.balance import few_plans
from nemo_like.data.planning.plan import plan_batch
from nemo_like.models.spec import ModelSpec
from nemo_like.policy.batching import plan_spec
from nemo_like.run.progress import Progress, Sample, sample_text

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Value = TypeVar("Value")


@dataclass(frozen=True)
class Report:
    """The result of `validate`. A run fails with each of `problems`; `warnings` do not stop it."""

    sections: Mapping[str, tuple[str, ...]]
    """Title -> lines."""
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """Return the complete report as text; tokens with loss are enclosed in ⟦ ⟧."""
        lines = list(self._lines())
        for index, sample in enumerate(self.samples, 1):
            lines.append(sample_text(sample, f"sample {index}"))
        # The verdict comes last, where it is visible after a long report.
        return "\n".join([*lines, *self._verdict()])

    def show(self, progress: Progress) -> None:
        """Print the report through `progress`, which colors the tokens with loss on a terminal."""
        progress.print_line("\n".join(self._lines()))
        progress.show_samples(self.samples, "sample")
        progress.print_line("\n".join(self._verdict()))

    def _lines(self) -> Iterator[str]:
        for title, lines in self.sections.items():
            yield f"{title}:"
            yield from (f"  {line}" for line in lines)

    def _verdict(self) -> Iterator[str]:
        yield from (f"warning: {warning}" for warning in self.warnings)
        yield from (f"problem: {problem}" for problem in self.problems)
        num_problems = len(self.problems)
        if num_problems == 0:
            yield "ok: no problem found"
        else:
            noun = "problem" if num_problems == 1 else "problems"
            yield f"{num_problems} {noun} to solve"


@dataclass
class Diagnostics:
    """Lines, samples, warnings and problems in the order in which the checks add them."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    """Title -> lines; sections are shown in the order in which they are first named."""
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add_lines(self, title: str, *lines: str) -> None:
        """Append lines to a section, which is created if necessary."""
        self.sections.setdefault(title, []).extend(lines)

    def check(self, function: Callable[[], Value]) -> Value | None:
        """Return the result of `function`; add a problem and return None if it raises ConfigError.

        Any other exception is a bug and passes unchanged.
        """
        try:
            return function()
        except ConfigError as error:
            # The remaining checks still run: a user wants to see all problems at once.
            self.problems += error.problems or [str(error)]
            return None

    def report(self) -> Report:
        """Return the report, without empty sections."""
        sections = {title: tuple(lines) for title, lines in self.sections.items() if lines}
        return Report(sections, tuple(self.samples), tuple(self.problems), tuple(self.warnings))


def describe_plan(
    config: RunConfig,
    title: str,
    counts: TokenCounts,
    model: PretrainedConfig | None,
    diagnostics: Diagnostics,
) -> None:
    """Add one line about the plan of a step with these rows.

    The rows of an example are consecutive; `model` gives the work of a row. With packing or dynamic
    batching the line also has the padding without them.
    """
    lengths = counts.lengths
    if len(lengths) == 0:
        return
    policy = config.policy_in_rows
    spec = None if model is None else ModelSpec.from_config(model)
    plain = replace(
        policy,
        sequence_packing=replace(policy.sequence_packing, enabled=False),
        dynamic_batching=replace(policy.dynamic_batching, enabled=False),
    )
    try:
        # Two plans do not pay for the import of numba.
        with few_plans():
            metrics = _plan_metrics(config, policy, counts, spec)
            plain_metrics = _plan_metrics(config, plain, counts, spec)
    except ValueError as error:
        diagnostics.problems.append(f"{title} cannot be planned: {error}")
        return
    padding = f"{metrics['packing/padding_share']:.1%} padding"
    if batching_section(config) is not None:
        padding_share = plain_metrics["packing/padding_share"]
        num_rows = policy.train_micro_batch_size
        padding += f" ({padding_share:.1%} if padded {counted(num_rows, 'row')} at a time)"
    diagnostics.add_lines(
        "plan",
        f"{title}: {counted(len(lengths), 'row')}, {int(lengths.sum()):,} tokens, {padding};"
        f" microbatches per worker and optimizer step: {metrics['packing/num_microbatches']:g}",
    )


def _plan_metrics(
    config: RunConfig, policy: PolicyConfig, counts: TokenCounts, model: ModelSpec | None
) -> dict[str, float]:
    """Return the metrics `packing/*` of a training step; ValueError if it cannot be planned."""
    spec = plan_spec(
        policy,
        purpose="train",
        parallel_layout=policy_layout(config),
        model=model,
        seed=config.seed,
    )
    groups = None
    # The rows of a preference pair must share a microbatch.
    if config.rows_per_example > 1:
        groups = np.arange(len(counts.lengths)) // config.rows_per_example
    return plan_batch(counts.lengths, spec, groups, counts.num_trained).metrics()
