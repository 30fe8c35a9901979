"""What a step logs, and the destinations that are files of the run: JSON lines and TensorBoard."""

from __future__ import annotations

import io
import math
import socket
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.errors import printable
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import AppendedFile, reporting_write_errors
from nemo_like.run.progress import Sample, sample_text

SAMPLE_COLUMNS = ("prompt", "completion", "reward", "details")
_NUM_BINS = 30


@dataclass(frozen=True)
class Histogram:
    """A distribution: `counts` int [n] of the values between `edges` float [n + 1]."""

    values: np.ndarray
    """[B], finite and not empty."""
    counts: np.ndarray
    edges: np.ndarray


@dataclass(frozen=True)
class Media:
    """Samples and distributions of one step by name, in addition to its metrics."""

    samples: dict[str, Sequence[Sample]] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(default_factory=dict)

    def add_histogram(self, name: str, values: np.ndarray) -> None:
        """Add the distribution of `values` [B]; values that are not finite are left out."""
        values = values[np.isfinite(values)].astype(np.float64)
        if len(values):
            self.histograms[name] = Histogram(values, *np.histogram(values, bins=_NUM_BINS))


NO_MEDIA = Media()


def sample_rows(samples: Sequence[Sample]) -> list[list[str | float | None]]:
    """Return the rows of a table with `SAMPLE_COLUMNS`."""
    return [[each.prompt, each.completion, each.reward, each.details] for each in samples]


class Sink:
    """One destination of metrics, samples and distributions."""

    is_service = False
    """True where a failure of the destination must not end the run."""

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        """Log a step."""
        raise NotImplementedError

    def sync(self) -> None:
        """Wait until everything is on disk; services manage their own files."""

    def close(self) -> None:
        """Flush and close."""
        raise NotImplementedError


class JsonlSink(Sink):
    """metrics.jsonl: one strict JSON object per step, written before `log` returns.

    media.jsonl has one object per sample and per distribution.
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._file = AppendedFile(directory.metrics)
        self._media = AppendedFile(directory.media)

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        record: dict[str, Any] = {"step": step, "unix_time_s": round(time.time(), 3)}
        for name, value in metrics.items():
            # Strict JSON has no NaN and no infinity.
            record[name] = value if math.isfinite(value) else None
        self._file.append_json(record, f"the metrics of step {step}")
        for name, histogram in media.histograms.items():
            counts, edges = histogram.counts.tolist(), histogram.edges.tolist()
            record = {"step": step, "histogram": name, "counts": counts, "edges": edges}
            self._media.append_json(record, f"the samples of step {step}")
        for name, samples in media.samples.items():
            for row in sample_rows(samples):
                columns = zip(SAMPLE_COLUMNS, row, strict=True)
                record = {"step": step, "sample": name, **dict(columns)}
                self._media.append_json(record, f"the samples of step {step}")

    def sync(self) -> None:
        self._file.sync()
        self._media.sync()

    def close(self) -> None:
        self._file.close()
        self._media.close()


class TensorBoardSink(Sink):
    """An event file, written by the calling thread.

    The thread of TensorBoard's own writer prints errors such as a full disk and ends.
    """

    def __init__(self, directory: Path, resumed_step: int | None) -> None:
        # Imported here: it takes seconds of CPU time, and commands that only check a config import
        # this module as well.
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
        self._text_pb = text_pb
        self._record_writer = RecordWriter
        with reporting_write_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a directory in the order of their names.
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._file = AppendedFile(directory / name)
        first_step = 0 if resumed_step is None else resumed_step + 1
        self._write(Event(file_version="brain.Event:2", step=first_step))
        # TensorBoard ignores the events of earlier files from this step on.
        self._write(Event(session_log=SessionLog(status=SessionLog.START), step=first_step))

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        for name, histogram in media.histograms.items():
            values.append(self._summary.Value(tag=name, histo=_histogram_proto(histogram)))
        self._write(self._event(summary=self._summary(value=values), step=step))
        for name, samples in media.samples.items():
            texts = []
            for index, sample in enumerate(samples, start=1):
                text = printable(sample_text(sample, f"{index}/{len(samples)}"))
                # The page renders Markdown, where indented text is shown as it is.
                texts.append(textwrap.indent(text, "    ", lambda line: True))
            summary = self._text_pb(name, "\n\n".join(texts))
            self._write(self._event(summary=summary, step=step))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue(), "TensorBoard's events")


def _histogram_proto(histogram: Histogram) -> Any:
    from tensorboard.compat.proto.summary_pb2 import HistogramProto  # pyright: ignore[reportAttributeAccessIssue]

    values = histogram.values
    return HistogramProto(
        min=values.min(),
        max=values.max(),
        num=len(values),
        sum=values.sum(),
        sum_squares=(values**2).sum(),
        bucket_limit=histogram.edges[1:],
        bucket=histogram.counts,
    )
