"""What a person sees while a run goes on: bars with an ETA on a terminal, plain lines in a log,
samples, step lines.

Nothing here computes a metric or writes a file. All that a run prints goes through one `Progress`,
so that lines and bars do not run into each other.
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

from nemo_like.config.text import printable

STEP_LINE = (
    ("reward/mean", "reward", ".3f"),
    ("policy/loss", "loss", ".4f"),
    ("policy/grad_norm", "grad norm", ".3g"),
    ("policy/lr", "lr", ".3g"),
    ("policy/approx_kl_k3", "kl", ".2g"),
    ("generation/completion_length_mean", "length", ".0f"),
    ("packing/utilization", "packed", ".1%"),
    ("performance/tokens_per_s", "tokens/s", ",.0f"),
    ("timing/step_s", "step s", ".1f"),
)
"""Metrics of the one-line summary, in this order, where a step has them; all those of a validation
follow.
"""


@dataclass(frozen=True)
class Sample:
    """One row as text, cut where the token mask changes.

    Example: `Sample((("2+2=", False), ("4", True)), reward=1.0)`: the model is trained on "4".
    """

    segments: tuple[tuple[str, bool], ...]
    """(text, whether the model is trained on it)."""
    reward: float | None = None
    notes: Mapping[str, str] = field(default_factory=dict)
    """What else to show of it, such as the expected answer and each reward function's value."""


class Phase:
    """How far one phase is; `advance` may be called from any thread. `done` was done before, by the
    run it resumes.
    """

    def __init__(self, name: str, total: int | None, unit: str, done: int = 0) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = self._done_before = done
        self._started_at = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """Count `count` more as done."""
        with self._lock:
            self.done += count

    def eta_s(self) -> float | None:
        """Seconds left at the pace so far; None while nothing is done or the total is unknown."""
        done_here = self.done - self._done_before
        if self.total is None or done_here == 0:
            return None
        return (time.monotonic() - self._started_at) / done_here * max(self.total - self.done, 0)

    def status(self) -> str:
        """Example: `128/512 rows, 0:07, 0:21 left`; only the time where there is nothing to
        count.
        """
        elapsed, eta = _duration(time.monotonic() - self._started_at), self.eta_s()
        if self.total is None:
            return f"{self.done} {self.unit}, {elapsed}" if self.done else elapsed
        return f"{self.done}/{self.total} {self.unit}, {elapsed}" + (
            "" if eta is None else f", {_duration(eta)} left"
        )


class Progress:
    """Shows phases, step lines and samples on `stream`: with bars if it is a terminal, else as
    plain lines.

    Without a terminal a line appears every `interval_s` seconds for as long as a phase runs, even
    if nothing moves in it, so that a log always says what is being waited for. Phases nest; one
    thread opens and closes them.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        interval_s: float = 10.0,
        num_steps: int | None = None,
    ) -> None:
        self._console = Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._interval_s = interval_s
        self._num_steps = num_steps
        self._phases: list[Phase] = []
        self._is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, *, unit: str = "rows", done: int = 0
    ) -> Iterator[Phase]:
        """Show a phase while the block runs; the block calls `advance` on what it gets.

        `total` is None where it is not known; `done` counts what a resumed run had done before,
        which says nothing of the pace.
        """
        phase = Phase(name, total, unit, done)
        self._phases.append(phase)
        try:
            with self._shown() if len(self._phases) == 1 else nullcontext():
                yield phase
        finally:
            self._phases.remove(phase)

    def print_line(self, text: str) -> None:
        """Print one message above the bars, as it is except for control characters."""
        self._console.print(Text(self._printable(text)))

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the one-line summary of a step; what a `Tracker` calls for its console line."""
        self.print_line(step_line(step, metrics, self._num_steps))

    def show_samples(self, samples: Sequence[Sample], title: str) -> None:
        """Print decoded samples; trained text is green on a terminal and stands in ⟦ ⟧
        elsewhere.
        """
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
                self.print_line(
                    " | ".join(f"{phase.name}: {phase.status()}" for phase in list(self._phases))
                )

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
            text.append(self._printable(segment), style="bold green" if is_trained else "dim")
        facts = Text(self._printable(_facts(sample)))
        return Panel(
            text, title=Text(heading), subtitle=facts if facts else None, title_align="left"
        )

    def _printable(self, text: str) -> str:
        """`text` with control characters, and what the stream cannot encode, as escapes: models
        write anything.
        """
        return printable(text, self._console.encoding)


def step_line(step: int, metrics: Mapping[str, float], num_steps: int | None = None) -> str:
    """One line of what matters of a step. Example: `step 3/100  reward 0.531  loss 0.0124  tokens/s
    1,200`.
    """
    parts = [f"step {step}" if num_steps is None else f"step {step}/{num_steps}"]
    parts += [
        f"{label} {metrics[name]:{form}}" for name, label, form in STEP_LINE if name in metrics
    ]
    parts += [
        f"{name.replace('/', ' ')} {value:.4g}"
        for name, value in metrics.items()
        if name.startswith("validation/")
    ]
    return "  ".join(parts)


def sample_text(sample: Sample, heading: str) -> str:
    """A sample for a log or a report, its trained text between ⟦ and ⟧."""
    body = "".join(f"⟦{text}⟧" if is_trained else text for text, is_trained in sample.segments)
    facts = _facts(sample)
    return f"--- {heading}{' | ' + facts if facts else ''}\n{body}"


def _facts(sample: Sample) -> str:
    reward = [] if sample.reward is None else [f"reward {sample.reward:.3f}"]
    return ", ".join(reward + [f"{name} {value}" for name, value in sample.notes.items()])


def _duration(seconds: float) -> str:
    """Example: 67 -> `1:07`, 3667 -> `1:01:07`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
