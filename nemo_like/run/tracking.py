"""Logs a run's metrics to metrics.jsonl, TensorBoard, and optionally wandb and mlflow.

It computes no metric and does not format console output: `Tracker` gets a function for that.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import LoggerConfig
from nemo_like.run.directory import RunDirectory, flatten
from nemo_like.run.files import AppendedFile, WriteError, reporting_write_errors, write_text

logger = logging.getLogger(__name__)


def check_logger(config: LoggerConfig) -> None:
    """Raise ConfigError, with the extra to install, if the package of a tracker is missing."""
    for key, value, package in (
        ("wandb_project", config.wandb_project, "wandb"),
        ("mlflow_experiment", config.mlflow_experiment, "mlflow"),
    ):
        if value is not None and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logger.{key}: is {value!r}, but the package {package} is not installed;"
                f" run pip install 'nemo-like[{package}]', or set logger.{key} to null"
            )


class Sink:
    """One destination of metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        raise NotImplementedError

    def sync(self) -> None:
        """Wait until everything is on disk; services manage their own files."""

    def close(self) -> None:
        """Flush and close."""
        raise NotImplementedError


class Tracker:
    """Sends the metrics of each step to every configured destination. A context manager.

    A step is logged once, in increasing order. `start_run_directory` has removed the records after
    `resumed_step`, which the run writes again. A number that is not finite is `null` in
    metrics.jsonl. Raises WriteError.
    """

    def __init__(
        self,
        directory: RunDirectory,
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
        # If a later sink cannot be opened, those that are open are closed.
        with ExitStack() as on_failure:
            for sink in _open_sinks(directory, config, run_config, resumed_step):
                on_failure.callback(sink.close)
                self._sinks.append(sink)
            self._closing = on_failure.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step. Raises ValueError unless `step` is above the last one."""
        if step <= self._last_step:
            raise ValueError(
                f"step {step} is logged after step {self._last_step}; merge a step's metrics into"
                " one call"
            )
        values = {name: float(value) for name, value in metrics.items()}
        # The files first: they are the record of the run, and the console line is not.
        self._warn_not_finite(step, values)
        for sink in self._sinks:
            sink.log(step, values)
        self._last_step = step
        if self._show is not None:
            self._show(step, values)

    def sync(self) -> None:
        """Wait until everything logged to files is on disk; call it before a checkpoint."""
        for sink in self._sinks:
            sink.sync()

    def close(self) -> None:
        """Flush and close every sink; further calls do nothing."""
        self._closing.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _warn_not_finite(self, step: int, values: Mapping[str, float]) -> None:
        """Warn of a metric that is not finite, once per metric."""
        for name, value in sorted(values.items()):
            if math.isfinite(value) or name in self._not_finite:
                continue
            logger.warning(
                "%s is %s at step %d (null in metrics.jsonl; reported once)", name, value, step
            )
            self._not_finite.add(name)


def _open_sinks(
    directory: RunDirectory,
    config: LoggerConfig,
    run_config: Mapping[str, Any],
    resumed_step: int | None,
) -> Iterator[Sink]:
    yield _JsonlSink(directory.metrics)
    if config.tensorboard:
        yield _TensorBoardSink(directory.tensorboard, resumed_step)
    if config.wandb_project is not None:
        yield _WandbSink(config.wandb_project, directory, run_config)
    if config.mlflow_experiment is not None:
        yield _MlflowSink(config.mlflow_experiment, directory, run_config)


class _JsonlSink(Sink):
    """metrics.jsonl: one strict JSON object per step, written before `log` returns."""

    def __init__(self, path: Path) -> None:
        self._file = AppendedFile(path)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        record: dict[str, Any] = {"step": step, "unix_time_s": round(time.time(), 3)}
        for name, value in metrics.items():
            # Strict JSON has no NaN and no infinity.
            record[name] = value if math.isfinite(value) else None
        self._file.append_json(record, f"the metrics of step {step}")

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


class _TensorBoardSink(Sink):
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
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event = Event
        self._summary = Summary
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


class _WandbSink(Sink):
    """A wandb run. Its id is stored in `logs/wandb_run_id`, so that a resume continues it."""

    def __init__(
        self, project: str, directory: RunDirectory, run_config: Mapping[str, Any]
    ) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=project,
            id=_stored_id(directory.logs / "wandb_run_id", lambda: secrets.token_hex(8)),
            name=directory.path.name,
            resume="allow",
            dir=str(directory.logs),
            config=dict(run_config),
        )
        self._run.define_metric("step")
        # wandb's own step counter would refuse the steps that a resume repeats.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class _MlflowSink(Sink):
    """An mlflow run. Its id is stored in `logs/mlflow_run_id`, so that a resume continues it."""

    def __init__(
        self, experiment: str, directory: RunDirectory, run_config: Mapping[str, Any]
    ) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        id_path = directory.logs / "mlflow_run_id"
        if id_path.exists():
            self._mlflow.start_run(run_id=id_path.read_text(encoding="utf-8").strip())
        else:
            started = self._mlflow.start_run(run_name=directory.path.name)
            write_text(id_path, started.info.run_id + "\n")
            self._mlflow.log_params(flatten(run_config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _stored_id(path: Path, create: Callable[[], str]) -> str:
    """Return the id that an earlier process stored in `path`, or store and return a new one."""
    # Stored before it is used: a kill in between must not leave a run of the service without id.
    with reporting_write_errors(path):
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        identifier = create()
        write_text(path, identifier + "\n")
        return identifier


class RunLog(logging.Handler):
    """A log file. A failed write is raised by `check`, because logging must not raise."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = AppendedFile(path)
        self._failure: WriteError | None = None
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record; do nothing after a failed write."""
        if self._failure is not None:
            return
        try:
            text = self.format(record) + "\n"
            self._file.append(text.encode("utf-8", errors="backslashreplace"))
        except WriteError as error:
            self._failure = error
        except Exception:  # noqa: BLE001
            # A message whose arguments do not fit its format.
            self.handleError(record)

    def check(self) -> None:
        """Raise WriteError if a record could not be written, or if the file was removed."""
        if self._failure is not None:
            raise self._failure
        self._file.check()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


@contextmanager
def run_log(path: Path) -> Iterator[RunLog]:
    """Write all log records of the block, and the exception that ends it, to `path` as well.

    Raises WriteError.
    """
    log = RunLog(path)
    # Warnings of libraries belong to the log too.
    logging.captureWarnings(True)
    logging.getLogger().addHandler(log)
    try:
        yield log
    except BaseException as error:
        # The console, where its message is printed, may be closed.
        logger.info("ended by %s: %s", type(error).__name__, error)
        raise
    finally:
        logging.getLogger().removeHandler(log)
        log.close()
