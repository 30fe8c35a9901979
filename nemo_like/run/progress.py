"""Console output of a run: progress bars or plain lines, and samples.

Nothing here computes a metric or writes a file. All output of a run goes through one `Progress`,
because lines and bars would overwrite each other otherwise.
"""

from __future__ import annotations

import itertools
import math
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_like.config.errors import printable, shortened

_MAX_HEADING = 90
"""Characters of heading and details of a sample in one line; more are below the heading."""
_NO_BREAK = "\N{NO-BREAK SPACE}"
_MAX_CELL = 600
"""Characters of a prompt or completion in a table."""


@dataclass(frozen=True)
class Sample:
    """One row as text, in segments of equal token mask.

    Example: `Sample((("2+2=", False), ("4", True)), reward=1.0)`: the model is trained on "4".
    """

    segments: tuple[tuple[str, bool], ...]
    """(text, is_trained) of each segment."""
    reward: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    """Further values to show, such as the expected answer and each reward function's value."""

    @property
    def prompt(self) -> str:
        """The text before the first trained segment."""
        untrained = itertools.takewhile(lambda segment: not segment[1], self.segments)
        return "".join(text for text, _ in untrained)

    @property
    def completion(self) -> str:
        """The text from the first trained segment on."""
        rest = itertools.dropwhile(lambda segment: not segment[1], self.segments)
        return "".join(text for text, _ in rest)

    @property
    def details(self) -> str:
        """The notes in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.notes.items())


class Phase:
    """The progress of one phase.

    `done` counts items that an earlier process of the run completed. `advance` may be called from
    any thread.
    """

    def __init__(
        self, name: str, total: int | None, unit: str, done: int = 0, *, has_eta: bool = True
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = done
        self.note = ""
        """Shown behind the state on a terminal, e.g. the loss of the last step."""
        self._has_eta = has_eta
        self._done_before = done
        self._started_at = time.monotonic()
        self._advanced_at = self._started_at
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """Add `count` completed items."""
        # `+=` is not atomic between threads.
        with self._lock:
            self.done += count
            self._advanced_at = time.monotonic()

    def eta_s(self) -> float | None:
        """Return the estimated seconds left, which decrease while an item is unfinished.

        None before the first item, after the last one, and without an estimate.
        """
        # Only items of this process: items of an earlier one took time that is not measured here.
        done_here = self.done - self._done_before
        if self.total is None or done_here == 0 or self.done >= self.total or not self._has_eta:
            return None
        # The pace of complete items: the time of an unfinished one would count as time of these.
        pace_s = (self._advanced_at - self._started_at) / done_here
        left_s = pace_s * (self.total - self.done)
        return max(left_s - (time.monotonic() - self._advanced_at), 0.0)

    def status(self) -> str:
        """Return the state in words; only the time for a phase without items.

        Example: `128/512 rows, 0:07, 0:21 left`.
        """
        elapsed = _duration(time.monotonic() - self._started_at)
        if self.total is None and self.done == 0:
            return elapsed
        if self.total is None:
            return f"{self.done} {self.unit}, {elapsed}"
        text = f"{self.done}/{self.total} {self.unit}, {elapsed}"
        eta_s = self.eta_s()
        if eta_s is not None:
            text += f", {_duration(eta_s)} left"
        return text


class Progress:
    """Shows phases, steps and samples on `stream`.

    A terminal has a bar per phase, and with `verbose` a line per step. A log has a line per step,
    without `verbose` at most every `interval_s`, and the state of the phases after `interval_s`
    seconds without another line. Phases nest; one thread opens and closes them.
    """

    def __init__(
        self, stream: TextIO | None = None, *, interval_s: float = 10.0, verbose: bool = False
    ) -> None:
        # No highlighting and no wrapping: lines in a log must equal the printed ones.
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._interval_s = interval_s
        self._printed_at = -interval_s
        self._step_shown_at = -interval_s
        self._held_line: str | None = None
        """The last step line, if it was not printed."""
        self._phases: list[Phase] = []
        self._is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._step_interval_s = interval_s
        if self._is_terminal:
            self._step_interval_s = math.inf
        if verbose:
            self._step_interval_s = 0.0

    @contextmanager
    def phase(
        self,
        name: str,
        total: int | None = None,
        *,
        unit: str = "rows",
        done: int = 0,
        has_eta: bool = True,
    ) -> Iterator[Phase]:
        """Show a phase while the block runs; the block calls `advance` on the yielded phase.

        `total` is None if it is unknown; `done` counts the items of an earlier process of the run.
        Pass `has_eta` False for items that take unequal times.
        """
        phase = Phase(name, total, unit, done, has_eta=has_eta)
        self._phases.append(phase)
        try:
            # The outermost phase starts the display, which shows all nested phases.
            with self._shown() if len(self._phases) == 1 else nullcontext():
                yield phase
        finally:
            self._phases.remove(phase)
            if not self._phases:
                self._print_held_line()

    def print_line(self, text: str) -> None:
        """Print one message above the bars, with control characters escaped."""
        self._console.print(Text(self._printable(text)))
        self._printed_at = time.monotonic()

    def show_step(self, line: str, *, note: str = "", always: bool = False) -> None:
        """Show `note` behind the outermost bar, or print the line of a step with the time left.

        The last step of the phase and those with `always` are printed in any case.
        """
        if self._phases:
            self._phases[0].note = note
        eta_s = self._phases[0].eta_s() if self._phases and not self._is_terminal else None
        if eta_s is not None and eta_s >= 1:
            # After the metrics of the step; the metrics of a validation are on a second line.
            first, line_break, rest = line.partition("\n")
            line = f"{first}  {_duration(eta_s)} left{line_break}{rest}"
        self._held_line = line
        if always or time.monotonic() - self._step_shown_at >= self._step_interval_s:
            self._print_held_line()

    def _print_held_line(self) -> None:
        if self._held_line is not None:
            self.print_line(self._held_line)
            self._held_line = None
            self._step_shown_at = time.monotonic()

    def show_samples(self, samples: Sequence[Sample], title: str) -> None:
        """Print decoded samples; trained text is green on a terminal, else between ⟦ and ⟧."""
        for index, sample in enumerate(samples, start=1):
            self.show_sample(sample, f"{title} {index}/{len(samples)}")

    def show_sample(self, sample: Sample, heading: str) -> None:
        """Print one decoded sample as `show_samples` does."""
        if self._is_terminal:
            self._console.print(self._panel(sample, heading), soft_wrap=False)
        else:
            self.print_line(sample_text(sample, heading))

    def show_table(self, samples: Sequence[Sample], title: str) -> None:
        """Print decoded samples as a table with prompt, completion, reward and notes."""
        if not samples:
            return
        table = Table(title=Text(title), title_justify="left", show_lines=True)
        for name in ("prompt", "completion", "reward", "details"):
            table.add_column(name, overflow="fold")
        for sample in samples:
            reward = "" if sample.reward is None else f"{sample.reward:.3f}"
            texts = [sample.prompt, sample.completion, reward, sample.details]
            lines = [
                shortened(text.removesuffix("\n"), _MAX_CELL).replace("\n", " ↵ ") for text in texts
            ]
            # As `Text`, which does not read square brackets as markup.
            table.add_row(*[Text(self._printable(line)) for line in lines])
        self._console.print(table, soft_wrap=False)
        self._printed_at = time.monotonic()

    def _shown(self) -> AbstractContextManager[object]:
        if self._is_terminal:
            return Live(get_renderable=self._bars, console=self._console, transient=True)
        return self._ticking()

    @contextmanager
    def _ticking(self) -> Iterator[None]:
        """Print the state of all phases every `interval_s` from a thread, until the block ends."""
        stopped = threading.Event()

        def tick() -> None:
            while not stopped.wait(self._interval_s):
                if time.monotonic() - self._printed_at < self._interval_s:
                    continue
                # A copy of the list: the main thread opens and closes phases.
                states = [f"{phase.name}: {phase.status()}" for phase in list(self._phases)]
                self.print_line(" | ".join(states))

        ticker = threading.Thread(target=tick, name="progress", daemon=True)
        ticker.start()
        try:
            yield
        finally:
            stopped.set()
            ticker.join()

    def _bars(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for _ in range(3):
            table.add_column(no_wrap=True, overflow="ellipsis")
        states = []
        for phase in list(self._phases):
            state = ", ".join(filter(None, [phase.status(), phase.note]))
            states.append((phase, self._printable(state)))
        # The bars get what the longest texts leave: a line that wraps would scroll the terminal.
        widths = [len(phase.name) + len(state) for phase, state in states]
        width = min(max(self._console.width - max(widths, default=0) - 2, 5), 30)
        for phase, state in states:
            bar = ProgressBar(total=phase.total, completed=phase.done, width=width)
            table.add_row(Text(phase.name), bar, Text(state))
        return table

    def _panel(self, sample: Sample, heading: str) -> Panel:
        text = Text()
        for segment, is_trained in sample.segments:
            # Brightness as well as colour marks trained text.
            text.append(self._printable(segment), style="bold green" if is_trained else "dim")
        details = Text(self._printable(_details(sample)))
        return Panel(text, title=Text(heading), subtitle=details or None, title_align="left")

    def _printable(self, text: str) -> str:
        """Escape control characters and characters that the stream cannot encode.

        Completions of a model may have any character.
        """
        return printable(text, self._console.encoding)


def sample_text(sample: Sample, heading: str) -> str:
    """Return a sample as plain text, its trained text between ⟦ and ⟧."""
    parts = [f"⟦{text}⟧" if is_trained else text for text, is_trained in sample.segments]
    body = "".join(parts)
    details = _details(sample)
    if details and len(heading) + len(details) <= _MAX_HEADING:
        heading = f"{heading} | {details}"
    elif details:
        # Lines break between the values only.
        joined = details.replace(" ", _NO_BREAK).replace(f",{_NO_BREAK}", ", ")
        lines = textwrap.wrap(joined, break_on_hyphens=False)
        heading = "\n    ".join([heading, *lines]).replace(_NO_BREAK, " ")
    return f"--- {heading}\n{body}"


def _details(sample: Sample) -> str:
    """Return reward and notes of a sample."""
    parts = []
    if sample.reward is not None:
        parts.append(f"reward {sample.reward:.3f}")
    if sample.notes:
        parts.append(sample.details)
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Format seconds: 67 -> `1:07`, 3667 -> `1:01:07`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
