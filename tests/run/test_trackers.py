"""Metrics, samples and histograms in every tracker, read back from what the tracker stored.

The packages of the services are extras; a test of one that is not installed is skipped.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import LoggerConfig
from nemo_like.run.directory import RunDirectory, open_run_directory, start_run_directory
from nemo_like.run.progress import Sample
from nemo_like.run.sinks import Media
from nemo_like.run.tracking import Tracker, check_logger

CONFIG = {"run_name": "first", "policy": {"optimizer": {"lr": 1e-5}}}
HOSTILE = "<script>alert(1)</script>\x1b[2J"
SAMPLES = "samples/validation"
LENGTHS = "histograms/row_length"


def media(step: int) -> Media:
    sample = Sample(
        (("2+2=", False), (f"{step}{HOSTILE}", True)), reward=0.5, notes={"answer": "4"}
    )
    logged = Media(samples={SAMPLES: [sample, sample]})
    logged.add_histogram(LENGTHS, np.array([3, 5, 5, 11]) * step)
    logged.add_histogram("histograms/empty", np.array([np.nan]))
    return logged


def log_run(
    folder: Path, config: LoggerConfig, steps: Iterable[int], resumed: int | None = None
) -> RunDirectory:
    with open_run_directory(str(folder), "first", resume=resumed is not None) as run:
        start_run_directory(run, CONFIG, resumed)
        with Tracker(run, config, CONFIG, resumed_step=resumed) as tracker:
            for step in steps:
                tracker.log(step, {"policy/loss": step / 4}, media(step))
    return run


def log_and_resume(folder: Path, config: LoggerConfig) -> RunDirectory:
    log_run(folder, config, (1, 2, 3))
    return log_run(folder, config, (3, 4), 2)


def test_media_jsonl_has_every_sample_and_histogram_once(tmp_path: Path) -> None:
    run = log_and_resume(tmp_path, LoggerConfig(tensorboard=False))
    records = [json.loads(line) for line in run.media.read_text().splitlines()]
    histograms = [each for each in records if "histogram" in each]
    assert [(each["histogram"], each["step"]) for each in histograms] == [
        (LENGTHS, step) for step in (1, 2, 3, 4)
    ]
    assert [sum(each["counts"]) for each in histograms] == [4] * 4
    assert len(histograms[0]["edges"]) == len(histograms[0]["counts"]) + 1
    samples = [each for each in records if "sample" in each]
    assert len(samples) == 8
    assert samples[0] == {
        "step": 1,
        "sample": SAMPLES,
        "prompt": "2+2=",
        "completion": f"1{HOSTILE}",
        "reward": 0.5,
        "details": "answer 4",
    }


def test_tensorboard_shows_text_as_it_is_and_distributions(tmp_path: Path) -> None:
    run = log_and_resume(tmp_path, LoggerConfig())
    events = EventAccumulator(str(run.tensorboard), {"histograms": 0, "tensors": 0}).Reload()
    assert [event.step for event in events.Scalars("policy/loss")] == [1, 2, 3, 4]
    # A text is a tensor of the text plugin, and a histogram is migrated to one when it is read.
    [first, *_] = events.Tensors(SAMPLES)
    [data] = make_ndarray(first.tensor_proto).flat
    assert isinstance(data, bytes)
    text = data.decode()
    assert all(line[:4] in ("", "    ") for line in text.splitlines()), "indented text is literal"
    assert "<script>" in text and "\x1b" not in text and r"\x1b[2J" in text
    assert "reward 0.500, answer 4" in text
    assert [event.step for event in events.Histograms(LENGTHS)] == [1, 2, 3, 4]
    value = events.Histograms(LENGTHS)[0].histogram_value
    assert (value.min, value.max, value.num, value.sum) == (3, 11, 4, 24)
    assert sum(value.bucket) == 4


def test_wandb_gets_tables_and_histograms_and_a_resume_continues_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = LoggerConfig(tensorboard=False, wandb_project="mine")
    run = log_and_resume(tmp_path, config)
    identifier = (run.logs / "wandb_run_id").read_text().strip()
    files = list(run.logs.glob(f"wandb/offline-run-*/run-{identifier}.wandb"))
    assert len(files) == 2
    assert any(b'"histogram"' in file.read_bytes() for file in files)
    tables = list(run.logs.glob("wandb/offline-run-*/files/media/table/samples/*.json"))
    [table, *_] = [json.loads(path.read_text()) for path in tables]
    assert table["columns"] == ["prompt", "completion", "reward", "details"]
    assert len(table["data"]) == 2
    other = log_run(tmp_path / "other", config, [1])
    assert (other.logs / "wandb_run_id").read_text().strip() != identifier, (
        "another output_dir has a run of its own"
    )


def test_mlflow_gets_tables_and_percentiles_and_a_resume_continues_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is an extra")
    pytest.importorskip("sqlalchemy", reason="mlflow-skinny has no database")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    log_and_resume(tmp_path, LoggerConfig(tensorboard=False, mlflow_experiment="mine"))
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.info.run_name == "first"
    assert found.data.params["policy.optimizer.lr"] == "1e-05"
    run_id = found.info.run_id
    for name in ("policy/loss", f"{LENGTHS}_p50"):
        assert {each.step for each in client.get_metric_history(run_id, name)} == {1, 2, 3, 4}
    table = mlflow.load_table(f"{SAMPLES}/step_4.json", run_ids=[run_id])
    assert table["completion"].tolist() == [f"4{HOSTILE}"] * 2


USER_TRACKER = """
LOGGED = []


class Tracker:
    def __init__(self, run_name, config):
        LOGGED.append((run_name, config["policy"]["optimizer"]["lr"]))

    def log(self, step, metrics, media):
        if step > 1:
            raise ConnectionError("the service is down")
        LOGGED.append((step, dict(metrics), sorted(media.samples), sorted(media.histograms)))

    def close(self):
        LOGGED.append("closed")


class Incomplete:
    def log(self, step, metrics, media):
        pass
"""


@pytest.fixture
def user_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "my_trackers.py").write_text(USER_TRACKER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("my_trackers")
    del sys.modules["my_trackers"]


def test_a_class_of_the_user_gets_every_step_and_its_failure_is_one_warning(
    tmp_path: Path, user_trackers: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    config = LoggerConfig(tensorboard=False, tracker="my_trackers.Tracker")
    run = log_run(tmp_path, config, (1, 2, 3))
    assert user_trackers.LOGGED == [
        ("first", 1e-05),
        (1, {"policy/loss": 0.25}, [SAMPLES], [LENGTHS]),
        "closed",
    ]
    assert [message for message in caplog.messages if "the service is down" in message] == [
        caplog.messages[-1]
    ]
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("my_trackers.Incomplete", "'my_trackers.Incomplete', which has no close"),
        ("my_trackers.Nope", "'my_trackers' has no 'Nope'"),
        ("nope.Tracker", "importing 'nope' failed"),
    ],
)
def test_a_wrong_path_of_a_tracker_is_one_error(
    user_trackers: ModuleType, path: str, expected: str
) -> None:
    with pytest.raises(ConfigError, match=r"logger\.tracker is ") as caught:
        check_logger(LoggerConfig(tracker=path))
    assert expected in str(caught.value)
