"""Console output of a run: progress bars or plain lines, and samples.

Nothing here computes a metric or writes a file. All output of a run goes through one `Progress`,
because lines and bars would overwrite each other otherwise.
"""

from __future__ import annotations

import sys
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

from nemo_like.config.errors import printable


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
        self._has_eta = has_eta
        self._done_before = done
        self._started_at = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """Add `count` completed items."""
        # `+=` is not atomic between threads.
        with self._lock:
            self.done += count

    def eta_s(self) -> float | None:
        """Return the estimated seconds left; None before the first item or without an estimate."""
        # Only items of this process: items of an earlier one took time that is not measured here.
        done_here = self.done - self._done_before
        if self.total is None or done_here == 0 or not self._has_eta:
            return None
        elapsed_s = time.monotonic() - self._started_at
        num_left = max(self.total - self.done, 0)
        return elapsed_s / done_here * num_left

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
    """Shows phases, step lines and samples on `stream`; with bars if it is a terminal.

    Without a terminal, the state of the phases is printed after `interval_s` seconds without
    another line, so that a log always shows the current phase. Phases nest; one thread opens and
    closes them.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval_s: float = 10.0,
        step_interval_s: float = 2.0,
    ) -> None:
        """`step_interval_s` is the min time between two lines of `show_step`."""
        # No highlighting and no wrapping: lines in a log must be those that were printed.
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._interval_s = interval_s
        self._step_interval_s = step_interval_s
        self._printed_at = -interval_s
        self._step_shown_at = -step_interval_s
        self._held_line: str | None = None
        """The last step line, if it was not printed."""
        self._phases: list[Phase] = []
        self._is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal

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

    def show_step(self, line: str, *, always: bool = False) -> None:
        """Print the line of a step, with the time left in a log.

        Steps that follow a printed one within `step_interval_s` are left out, except the last step
        of the phase and those with `always`.
        """
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
            heading = f"{title} {index}/{len(samples)}"
            if self._is_terminal:
                self._console.print(self._panel(sample, heading), soft_wrap=False)
            else:
                self.print_line(sample_text(sample, heading))

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
        for phase in list(self._phases):
            bar = ProgressBar(total=phase.total, completed=phase.done, width=30)
            table.add_row(Text(phase.name), bar, Text(phase.status()))
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
    if details:
        heading = f"{heading} | {details}"
    return f"--- {heading}\n{body}"


def _details(sample: Sample) -> str:
    """Return reward and notes of a sample."""
    parts = []
    if sample.reward is not None:
        parts.append(f"reward {sample.reward:.3f}")
    for name, value in sample.notes.items():
        parts.append(f"{name} {value}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    """Format seconds: 67 -> `1:07`, 3667 -> `1:01:07`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
