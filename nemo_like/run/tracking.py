"""Logs metrics, samples and distributions of a run to every configured destination, and its log.

It computes no metric and does not format console output: `Tracker` gets a function for that.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import LoggerConfig
from nemo_like.run.directory import RunDirectory
from nemo_like.run.files import AppendedFile, WriteError
from nemo_like.run.services import MlflowSink, UserSink, WandbSink, tracker_class
from nemo_like.run.sinks import NO_MEDIA, JsonlSink, Media, Sink, TensorBoardSink
from nemo_like.run.versions import installed_versions

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
    if config.tracker is not None:
        tracker_class(config.tracker)


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
        self._failed_services: set[str] = set()
        self._closing = ExitStack()
        self._sinks: list[Sink] = []
        # If a later sink cannot be opened, those that are open are closed.
        with ExitStack() as on_failure:
            for sink in _open_sinks(directory, config, run_config, resumed_step):
                on_failure.callback(self._call, sink, sink.close)
                self._sinks.append(sink)
            self._closing = on_failure.pop_all()

    def log(self, step: int, metrics: Mapping[str, float], media: Media = NO_MEDIA) -> None:
        """Log one step. Raises ValueError unless `step` is above the last one."""
        if step <= self._last_step:
            raise ValueError(
                f"step {step} is logged after step {self._last_step}; merge a step's metrics into"
                " one call"
            )
        values = {name: float(value) for name, value in metrics.items()}
        # The files first: they are the record of the run, and the console line is not.
        self._warn_not_finite(step, values)
        for sink in self._sinks:
            self._call(sink, partial(sink.log, step, values, media))
        self._last_step = step
        if self._show is not None:
            self._show(step, values)

    def _call(self, sink: Sink, method: Callable[[], None]) -> None:
        """Call a method of a sink. The failure of a service is a warning, once."""
        try:
            method()
        # The libraries of services raise any type.
        except Exception as error:
            if not sink.is_service:
                raise
            name = type(sink).__name__.removesuffix("Sink")
            if name not in self._failed_services:
                logger.warning("%s failed (reported once): %s", name, error)
            self._failed_services.add(name)

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
    yield JsonlSink(directory)
    if config.tensorboard:
        yield TensorBoardSink(directory.tensorboard, resumed_step)
    for project, service in (
        (config.wandb_project, WandbSink),
        (config.mlflow_experiment, MlflowSink),
        (config.tracker, UserSink),
    ):
        if project is not None:
            yield service(project, directory, run_config)


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

    def note_start(self) -> None:
        """Append process, host and versions of packages."""
        self.note(f"process {os.getpid()} on host {socket.gethostname()} starts")
        self.note(f"versions: {installed_versions()}")

    def note(self, text: str) -> None:
        """Append an INFO record, whatever the level of the loggers: the report reads it."""
        fields = {"name": __name__, "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        self.handle(logging.makeLogRecord(fields))

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
        log.note(f"ended by {type(error).__name__}: {error}")
        raise
    finally:
        logging.getLogger().removeHandler(log)
        log.close()
