"""Experiment trackers: Weights & Biases, trackio, MLflow and SwanLab; optional packages.

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

from nemo_like.config.errors import printable
from nemo_like.run.directory import RunDirectory, flatten
from nemo_like.run.files import reporting_write_errors, write_text
from nemo_like.run.progress import sample_text
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


class TrackioSink(Sink):
    """A run of trackio, in its local database or in the space that its environment names."""

    is_service = True

    def __init__(
        self, project: str, directory: RunDirectory, run_config: Mapping[str, Any]
    ) -> None:
        self._trackio = importlib.import_module("trackio")
        options = _run_options("trackio", project, directory, flatten(run_config))
        # Runs have no id besides their name.
        options["name"] += f"-{options.pop('id')[:6]}"
        self._run = self._trackio.init(**options)

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        self._run.log({**metrics, **_wandb_media(self._trackio, media)}, step=step)

    def close(self) -> None:
        self._run.finish()


def _wandb_media(library: Any, media: Media) -> dict[str, Any]:
    """Return tables and histograms of wandb, or of trackio, which has the same classes."""
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


class SwanlabSink(Sink):
    """A run of SwanLab; its environment variables choose cloud, local or offline mode."""

    is_service = True

    def __init__(
        self, project: str, directory: RunDirectory, run_config: Mapping[str, Any]
    ) -> None:
        self._swanlab = importlib.import_module("swanlab")
        options = _run_options("swanlab", project, directory, run_config)
        self._run = self._swanlab.init(log_dir=str(directory.logs / "swanlab"), **options)

    def log(self, step: int, metrics: Mapping[str, float], media: Media) -> None:
        logged: dict[str, Any] = dict(metrics)
        for name, samples in media.samples.items():
            texts = [printable(sample_text(sample, name)) for sample in samples]
            logged[name] = [self._swanlab.Text(text) for text in texts]
        for name, histogram in media.histograms.items():
            chart = self._swanlab.echarts.Bar()
            centers = (histogram.edges[:-1] + histogram.edges[1:]) / 2
            chart.add_xaxis([f"{center:.4g}" for center in centers])
            chart.add_yaxis("rows", histogram.counts.tolist())
            logged[name] = chart
        self._run.log(logged, step=step)

    def close(self) -> None:
        self._swanlab.finish()


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
