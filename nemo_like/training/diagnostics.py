"""What `validate` finds: lines, samples, warnings and problems, and the report of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from nemo_like.config.errors import ConfigError
from nemo_like.run.progress import Progress, Sample

Value = TypeVar("Value")


@dataclass(frozen=True)
class Report:
    """The result of `validate`. A run fails with each of `problems`; `warnings` do not stop it."""

    sections: Mapping[str, tuple[str, ...]]
    """Title -> lines."""
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def show(self, progress: Progress) -> None:
        """Print the report; tokens with loss are colored on a terminal, else enclosed in ⟦ ⟧."""
        progress.print_line("\n".join(self._lines()))
        progress.show_samples(self.samples, "sample")
        # The verdict comes last, where it is visible after a long report.
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
