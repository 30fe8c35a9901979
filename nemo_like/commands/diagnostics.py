"""What `validate` finds, as it is written and as it is read: sections, samples, warnings,
problems.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from nemo_like.config.errors import ConfigError
from nemo_like.progress import Progress, Sample, sample_text

Value = TypeVar("Value")


@dataclass(frozen=True)
class Report:
    """What `validate` found. With `problems` a run would fail; `warnings` are worth a look."""

    sections: Mapping[str, tuple[str, ...]]
    """Title -> lines."""
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        """The whole report as text; what the model is trained on stands in ⟦ ⟧."""
        samples = [
            sample_text(sample, f"sample {index}") for index, sample in enumerate(self.samples, 1)
        ]
        return "\n".join([*self._lines(), *samples, *self._verdict()])

    def show(self, progress: Progress) -> None:
        """The same through `progress`, which colours what is trained on a terminal."""
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
        count = len(self.problems)
        yield (
            "ok: nothing stands in the way of a run"
            if count == 0
            else f"{count} problem{'s' * (count > 1)} to solve"
        )


@dataclass
class Findings:
    """A report being written."""

    sections: dict[str, list[str]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def say(self, title: str, *lines: str) -> None:
        self.sections.setdefault(title, []).extend(lines)

    def attempt(self, look: Callable[[], Value]) -> Value | None:
        """What `look` returns; None, and a problem noted, if it says that the user's input is
        wrong.
        """
        try:
            return look()
        except ConfigError as error:
            self.problems.append(str(error))
            return None

    def report(self) -> Report:
        sections = {title: tuple(lines) for title, lines in self.sections.items() if lines}
        return Report(sections, tuple(self.samples), tuple(self.problems), tuple(self.warnings))
