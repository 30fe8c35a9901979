"""Where a run's files and numbers go: its directory, metrics.jsonl, TensorBoard, and wandb or mlflow on request.

It computes no metric and formats nothing for people: the console line is a callable given to `Tracker`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import yaml

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import LoggerConfig

logger = logging.getLogger(__name__)


class TrackingError(RuntimeError):
    """Metrics could not be written; the message names the file, the cause and what to do."""


@dataclass(frozen=True)
class RunDirectory:
    """`<output_dir>/<run_name>` and the names inside it; checkpoints and `latest` belong to `Checkpointer(path)`."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tb"

    @property
    def hf(self) -> Path:
        return self.path / "hf"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lengths(self) -> Path:
        """Row lengths of every step, for `nemo-like plan --metrics`."""
        return self.path / "plan" / "lengths.jsonl"

    def plan(self, step: int) -> Path:
        return self.path / "plan" / f"step_{step}.json"

    def rollouts(self, step: int) -> Path:
        return self.path / "rollouts" / f"step_{step}.jsonl"


def open_run(output_dir: str, run_name: str, config: Mapping[str, Any], *, resume: bool) -> RunDirectory:
    """Create the directory of a run and write its config.yaml, or with `resume` take it up again, logging what changed.

    `config` is the resolved configuration as plain values. Raises ConfigError if a run of this name has written
    results and `resume` is off, if the name cannot be a directory, or if the directory cannot be made.
    """
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", run_name) is None:
        raise ConfigError(f"run_name: {run_name!r} cannot name a directory; use letters, digits, '_', '-' and '.'")
    run = RunDirectory(Path(output_dir) / run_name)
    if not resume:
        _refuse_results(run)
    try:
        for folder in (run.logs, run.plan(0).parent, run.rollouts(0).parent):
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir: cannot make {run.path} ({error.strerror}); set output_dir to a place that can be written"
        ) from error
    if resume:
        _log_config_changes(run, config)
    aside = run.config.with_name(".config.yaml.new")
    aside.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
    aside.replace(run.config)
    return run


def check_logger(config: LoggerConfig) -> None:
    """Raise ConfigError, naming the extra to install, if a tracker is asked for whose package is missing."""
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

    def close(self) -> None: ...


class Tracker:
    """Sends the metrics of each step to every place that is configured. Use it as a context manager.

    A step is logged once, in rising order. On resume, metrics.jsonl first loses the lines after `resumed_step`, which
    the run is about to write again, so no step stands in it twice. A number that is not finite is `null` there.
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
        """Record the numbers of one step; raises ValueError if `step` is not above the last one logged."""
        if step <= self._last_step:
            raise ValueError(
                f"step {step} is logged after step {self._last_step}; merge a step's metrics into one call"
            )
        values = {name: float(value) for name, value in metrics.items()}
        self._warn_not_finite(step, values)
        for sink in self._sinks:
            sink.log(step, values)
        self._last_step = step
        if self._show is not None:
            self._show(step, values)

    def close(self) -> None:
        """Flush and close every place; further calls do nothing."""
        self._closing.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _warn_not_finite(self, step: int, values: Mapping[str, float]) -> None:
        for name in sorted(name for name, value in values.items() if not math.isfinite(value)):
            if name not in self._not_finite:
                logger.warning("%s is %s at step %d (null in metrics.jsonl; said once)", name, values[name], step)
                self._not_finite.add(name)


def _open_sinks(
    run: RunDirectory, config: LoggerConfig, run_config: Mapping[str, Any], resumed_step: int | None
) -> Iterator[Sink]:
    yield _JsonlSink(run.metrics, resumed_step)
    if config.tensorboard:
        yield _TensorBoardSink(run.tensorboard, resumed_step)
    if config.wandb_project is not None:
        yield _WandbSink(config.wandb_project, run, run_config)
    if config.mlflow_experiment is not None:
        yield _MlflowSink(config.mlflow_experiment, run, run_config)


class _JsonlSink:
    """metrics.jsonl: one strict JSON object per step, on disk before `log` returns to the caller."""

    def __init__(self, path: Path, resumed_step: int | None) -> None:
        if resumed_step is not None:
            _drop_lines_after(path, resumed_step)
        elif path.exists() and path.stat().st_size > 0:
            aside = path.with_name(f"{path.name}.before_resume")
            logger.warning("the run starts again at step 0; the metrics it had are in %s now", aside)
            path.replace(aside)
        self._path = path
        self._file = path.open("ab", buffering=0)  # a buffer would fail a second time, when it is closed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        line = json.dumps({"step": step, "unix_time_s": round(time.time(), 3), **finite}, allow_nan=False)
        left = (line + "\n").encode()
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise TrackingError(
                f"the metrics of step {step} cannot be written to {self._path}: {error.strerror}. Free some space or "
                f"set output_dir to another disk; resume=true continues from the latest checkpoint."
            ) from error

    def close(self) -> None:
        self._file.close()


class _TensorBoardSink:
    def __init__(self, folder: Path, resumed_step: int | None) -> None:
        # Importing TensorBoard takes seconds of CPU time, and commands that only check a config use this module too.
        from torch.utils.tensorboard import SummaryWriter

        purge_step = 0 if resumed_step is None else resumed_step + 1
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WandbSink:
    """A wandb run whose id is the run name, so that a resumed run goes on in the same one."""

    def __init__(self, project: str, run: RunDirectory, run_config: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        name = run.path.name
        self._run = wandb.init(
            project=project, id=name, name=name, resume="allow", dir=str(run.logs), config=dict(run_config)
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")  # wandb's own counter would refuse the steps a resume repeats

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._run.finish()


class _MlflowSink:
    """An mlflow run; its id is kept in `logs/mlflow_run_id`, so that a resumed run goes on in the same one."""

    def __init__(self, experiment: str, run: RunDirectory, run_config: Mapping[str, Any]) -> None:
        self._mlflow = importlib.import_module("mlflow")
        self._mlflow.set_experiment(experiment)
        id_path = run.logs / "mlflow_run_id"
        if id_path.exists():
            self._mlflow.start_run(run_id=id_path.read_text(encoding="utf-8").strip())
        else:
            started = self._mlflow.start_run(run_name=run.path.name)
            id_path.write_text(started.info.run_id + "\n", encoding="utf-8")
            self._mlflow.log_params(_flatten(run_config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _refuse_results(run: RunDirectory) -> None:
    """Raise ConfigError if the directory holds results or something else; a run that got nowhere may restart."""
    if not run.path.exists():
        return
    if not run.path.is_dir() or (any(run.path.iterdir()) and not run.config.exists()):
        raise ConfigError(f"run_name: {run.path} exists and is not the directory of a run; choose another run_name")
    has_metrics = run.metrics.exists() and run.metrics.stat().st_size > 0
    checkpoints = run.path / "checkpoints"
    if has_metrics or (checkpoints.exists() and any(checkpoints.iterdir())):
        raise ConfigError(
            f"run_name: {run.path} already holds a run; choose another run_name, "
            f"or set resume=true to continue it from its latest checkpoint"
        )


def _log_config_changes(run: RunDirectory, config: Mapping[str, Any]) -> None:
    """Log every key whose value differs from the config.yaml that is there, old -> new."""
    if not run.config.exists():
        return
    try:
        before = _flatten(yaml.safe_load(run.config.read_text(encoding="utf-8")))
    except (yaml.YAMLError, AttributeError) as error:
        logger.warning("%s cannot be read, so changes of the configuration are not listed: %s", run.config, error)
        return
    after = _flatten(yaml.safe_load(yaml.safe_dump(dict(config))))  # the same plain types as what was read
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key, "(not there)"), after.get(key, "(not there)")
        if old != new and key != "resume":
            logger.warning("changed since this run was started: %s: %s -> %s", key, old, new)


def _flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _drop_lines_after(path: Path, last_step: int) -> None:
    """Keep the lines of metrics.jsonl up to `last_step`; a line cut by a kill goes too. The file changes at once."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    kept = [line for line in lines if (step := _step_of(line)) is not None and step <= last_step]
    if len(kept) == len(lines) and (not lines or text.endswith("\n")):
        return
    logger.info("removed %d lines after step %d from %s", len(lines) - len(kept), max(last_step, 0), path)
    aside = path.with_name(f".{path.name}.new")
    with aside.open("w", encoding="utf-8") as file:
        file.writelines(line + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def _step_of(line: str) -> int | None:
    """The step of a line of metrics.jsonl; None if the line is not whole."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
