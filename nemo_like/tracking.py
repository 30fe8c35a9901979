"""Where a run's numbers go: metrics.jsonl, TensorBoard, and wandb or mlflow on request.

It computes no metric and formats nothing for people: the console line is a callable given to
`Tracker`.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import LoggerConfig
from nemo_like.files import AppendedFile, reporting_write_errors, write_text
from nemo_like.run_directory import RunDirectory, flatten

logger = logging.getLogger(__name__)


def check_logger(config: LoggerConfig) -> None:
    """Raise ConfigError, naming the extra to install, if a tracker is asked for whose package is
    missing.
    """
    for key, value, package in (
        ("wandb_project", config.wandb_project, "wandb"),
        ("mlflow_experiment", config.mlflow_experiment, "mlflow"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger.{key}: is {value!r}, but the package {package} is not installed; "
                f"run pip install 'nemo-like[{package}]', or set logger.{key} to null"
            )


class Sink(Protocol):
    """One place metrics go to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Tracker:
    """Sends the metrics of each step to every place that is configured. Use it as a context
    manager.

    A step is logged once, in rising order. `start_run` has removed the records after
    `resumed_step`, which the run is about to write again. A number that is not finite is `null` in
    metrics.jsonl. Raises WriteError.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: LoggerConfig,
        run_config: Mapping[str, Any],
        *,
        resumed_step: int | None = None,
        show: Callable[[int, Mapping[str, float]], None] | None = None,
    ) -> None:
        check_logger(config)
        self._show = show
        self._last_step = -1 if resumed_step is None else resumed_step
        self._not_finite: set[str] = set()
        self._closing = ExitStack()
        self._sinks: list[Sink] = []
        with ExitStack() as on_failure:
            for sink in _open_sinks(run, config, run_config, resumed_step):
                on_failure.callback(sink.close)
                self._sinks.append(sink)
            self._closing = on_failure.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the numbers of one step; raises ValueError if `step` is not above the last one
        logged.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} is logged after step {self._last_step}; merge a step's metrics into"
                f" one call"
            )
        values = {name: float(value) for name, value in metrics.items()}
        self._warn_not_finite(step, values)
        for sink in self._sinks:
            sink.log(step, values)
        self._last_step = step
        if self._show is not None:
            self._show(step, values)

    def sync(self) -> None:
        """Wait until everything logged to files is on disk. Call it before a checkpoint of the same
        step is published.
        """
        for sink in self._sinks:
            sink.sync()

    def close(self) -> None:
        """Flush and close every place; further calls do nothing."""
        self._closing.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _warn_not_finite(self, step: int, values: Mapping[str, float]) -> None:
        for name in sorted(name for name, value in values.items() if not math.isfinite(value)):
            if name not in self._not_finite:
                logger.warning(
                    "%s is %s at step %d (null in metrics.jsonl; said once)",
                    name,
                    values[name],
                    step,
                )
                self._not_finite.add(name)


def _open_sinks(
    run: RunDirectory, config: LoggerConfig, run_config: Mapping[str, Any], resumed_step: int | None
) -> Iterator[Sink]:
    yield _JsonlSink(run.metrics)
    if config.tensorboard:
        yield _TensorBoardSink(run.tensorboard, resumed_step)
    if config.wandb_project is not None:
        yield _WandbSink(config.wandb_project, run, run_config)
    if config.mlflow_experiment is not None:
        yield _MlflowSink(config.mlflow_experiment, run, run_config)


class _JsonlSink:
    """metrics.jsonl: one strict JSON object per step, with the operating system before `log`
    returns to the caller.
    """

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        record = {"step": step, "unix_time_s": round(time.time(), 3), **finite}
        self._file.append_json(record, f"the metrics of step {step}")

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class _TensorBoardSink:
    """An event file. Written by the calling thread: the library's own thread would lose errors such
    as a full disk.
    """

    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        # Importing TensorBoard takes seconds of CPU time, and commands that only check a config use
        # this module too.
        from tensorboard.compat.proto.event_pb2 import (
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.compat.proto.summary_pb2 import (
            Summary,  # pyright: ignore[reportAttributeAccessIssue]
        )
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._record_writer = Event, Summary, RecordWriter
        with reporting_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names, so a later file needs
        # a later time.
        stamps = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*.*")]
        stamp = max([int(time.time()), *(int(each) + 1 for each in stamps if each.isdigit())])
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(3)}"
        self._file = AppendedFile(folder / name)
        first_step = 0 if resumed_step is None else resumed_step + 1
        self._write(Event(file_version="brain.Event:2", step=first_step))
        # TensorBoard drops what earlier files have from this step on.
        self._write(Event(session_log=SessionLog(status=SessionLog.START), step=first_step))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()
        ]
        self._write(self._event(summary=self._summary(value=values), step=step))

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        event.wall_time = time.time()
        record = io.BytesIO()
        self._record_writer(record).write(event.SerializeToString())
        self._file.append(record.getvalue(), "TensorBoard's events")


class _WandbSink:
    """A wandb run. Its id is random and kept in `logs/wandb_run_id`: a resume continues it, another
    run never does.
    """

    def __init__(self, project: str, run: RunDirectory, run_config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            id=_kept_id(run.logs / "wandb_run_id", lambda: secrets.token_hex(8)),
            name=run.path.name,
            resume="allow",
            dir=str(run.logs),
            config=dict(run_config),
        )
        self._run.define_metric("step")
        self._run.define_metric(
            "*", step_metric="step"
        )  # wandb's own counter would refuse the steps a resume repeats

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def sync(self) -> None:
        """Nothing: the service keeps its own files."""

    def close(self) -> None:
        self._run.finish()


class _MlflowSink:
    """An mlflow run; its id is kept in `logs/mlflow_run_id`, so that a resumed run goes on in the
    same one.
    """

    def __init__(self, experiment: str, run: RunDirectory, run_config: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        id_path = run.logs / "mlflow_run_id"
        if id_path.exists():
            self._mlflow.start_run(run_id=id_path.read_text(encoding="utf-8").strip())
        else:
            started = self._mlflow.start_run(run_name=run.path.name)
            write_text(id_path, started.info.run_id + "\n")
            self._mlflow.log_params(flatten(run_config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def sync(self) -> None:
        """Nothing: the service keeps its own files."""

    def close(self) -> None:
        self._mlflow.end_run()


def _kept_id(path: Path, create: Callable[[], str]) -> str:
    """The id that an earlier process of the run stored in `path`, or a new one, stored before it is
    used.
    """
    with reporting_write_errors(path):
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        identifier = create()
        write_text(path, identifier + "\n")
        return identifier
