"""The log of a step: its timings, metrics and samples, and the totals of the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from nemo_like.metrics import Metrics, Sum, Timers, merge_metrics, metric_values, start_timers
from nemo_like.run.progress import Progress
from nemo_like.run.sinks import Media
from nemo_like.run.tracking import RunLog, Tracker
from nemo_like.training.reporting import start_line
from nemo_like.training.saving import Selection


@dataclass(kw_only=True)
class StepLog:
    """Collects what a step reports, and writes it as the one record of the step."""

    tracker: Tracker
    log_file: RunLog
    selection: Selection
    progress: Progress
    timers: Timers
    opened_s: float
    """When the run was opened, on the clock of `time.monotonic`."""
    counters: dict[str, float]
    """Totals of the run, which checkpoints have."""
    pending: Metrics = field(default_factory=dict)
    """Metrics of the step that is written next."""
    media: Media = field(default_factory=Media)
    """Samples and distributions of the same step."""
    first: dict[str, float] = field(default_factory=dict)
    """The first value of every metric."""
    last: dict[str, float] = field(default_factory=dict)
    """The last value of every metric."""

    def add(self, metrics: Metrics) -> None:
        """Merge metrics into the record of the step that is written next.

        A step with refills or validation adds some metrics several times.
        """
        self.pending = merge_metrics([self.pending, metrics])

    def report_start(self) -> None:
        """Add and print the phases from the command to the end of the first step; once."""
        phases = start_timers.pop()
        if not phases:
            return
        phases["timing/start_first_step_s"] = Sum(time.monotonic() - self.opened_s)
        self.add(phases)
        self.progress.print_line(start_line(metric_values(phases)))

    def write(self, step: int) -> None:
        """Write the added metrics as the one record of `step`."""
        if not self.pending:
            return
        values = metric_values(self.pending)
        for name, total in self.counters.items():
            values[f"progress/{name}"] = total
        self.pending = {}
        # A log that cannot be written stops the run here, and not silently.
        self.log_file.check()
        self.tracker.log(step, values, self.media)
        self.media = Media()
        self.last |= values
        self.first = values | self.first
        self.selection.observe(step, values)
