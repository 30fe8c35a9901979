"""Experiment trackers: Weights & Biases and MLflow, optional packages, and a class of the user.

Each is imported when a run uses it. The id of its run is stored in `logs/`, so that a resume
continues it.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.config.import_path import import_class
from nemo_like.run.directory import RunDirectory, flatten
from nemo_like.run.files import reporting_write_errors, write_text
from nemo_like.run.sinks import SAMPLE_COLUMNS, Media, Sink, sample_rows

_PERCENTILES = (5, 50, 95)


class WandbSink(Sink):
    """A run of Weights & Biases."""

    is_service = True

    def __init__(
        self, project: str, directory: RunDirectory, run_config: Mapping[str, Any]
    ) -> None:
        self._wandb = importlib.import_module("wandb")
        options = _run_options("wandb", project, directory, run_config)
        self._run = self._wandb.init(dir=str(directory.logs), **options)
        self._run.define_metric("step")
        # wandb's own step counter would refuse the steps that a resume repeats.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        self._run.log({"step": step, **metrics, **_wandb_media(self._wandb, media)})

    def close(self) -> None:
        self._run.finish()


def _wandb_media(library: Any, media: Media) -> dict[str, Any]:
    """Return tables and histograms of wandb."""
    logged: dict[str, Any] = {}
    for name, samples in media.samples.items():
        logged[name] = library.Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(samples))
    for name, histogram in media.histograms.items():
        logged[name] = library.Histogram(np_histogram=(histogram.counts, histogram.edges))
    return logged


class MlflowSink(Sink):
    """A run of MLflow, which has tables and no histograms: percentiles take their place."""

    is_service = True

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

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        values = dict(metrics)
        for name, histogram in media.histograms.items():
            percentiles = np.percentile(histogram.values, _PERCENTILES).tolist()
            for percentile, value in zip(_PERCENTILES, percentiles, strict=True):
                values[f"{name}_p{percentile:02d}"] = value
        self._mlflow.log_metrics(values, step=step)
        for name, samples in media.samples.items():
            columns = map(list, zip(*sample_rows(samples), strict=True))
            table = dict(zip(SAMPLE_COLUMNS, columns, strict=True))
            self._mlflow.log_table(table, artifact_file=f"{name}/step_{step}.json")

    def close(self) -> None:
        self._mlflow.end_run()


class UserSink(Sink):
    """The tracker of a user's class, which is created with the run's name and its config."""

    is_service = True

    def __init__(self, path: str, directory: RunDirectory, run_config: Mapping[str, Any]) -> None:
        tracker = tracker_class(path)(directory.path.name, dict(run_config))
        self.log = tracker.log
        self.close = tracker.close


def tracker_class(path: str) -> type[Any]:
    """Import the class of `logger.tracker`. Raises ConfigError."""
    return import_class("logger.tracker", path, "my_trackers.Trackio", ("log", "close"))


def _run_options(
    service: str, project: str, directory: RunDirectory, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments that start a run of the service, or continue it after a resume."""
    identifier = _stored_id(directory.logs / f"{service}_run_id")
    name = directory.path.name
    options = {"project": project, "id": identifier, "name": name, "resume": "allow"}
    return options | {"config": dict(config)}


def _stored_id(path: Path) -> str:
    """Return the id that an earlier process stored in `path`, or store and return a new one."""
    # Stored before it is used: a kill in between must not leave a run of the service without id.
    with reporting_write_errors(path):
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        identifier = secrets.token_hex(8)
        write_text(path, identifier + "\n")
        return identifier
