"""Metrics, samples and histograms in every tracker, read back from what the tracker stored.

The packages of the services are extras; a test of one that is not installed is skipped.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import sys
import urllib.request
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_prometheus_reads_the_last_step_on_loopback(tmp_path: Path) -> None:
    port = free_port()
    config = LoggerConfig(tensorboard=False, prometheus_port=port)
    with open_run_directory(str(tmp_path), "first", resume=False) as run:
        start_run_directory(run, CONFIG, None)
        with Tracker(run, config, CONFIG) as tracker:
            tracker.log(7, {"policy/loss": 0.25, "reward/frac-x": float("inf")})
            url = f"http://127.0.0.1:{port}"
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "# TYPE nemo_like_policy_loss gauge" in lines
            assert 'nemo_like_step{run="first"} 7.0' in lines
            assert 'nemo_like_policy_loss{run="first"} 0.25' in lines
            assert 'nemo_like_reward_frac_x{run="first"} +Inf' in lines
            with pytest.raises(ConfigError, match=rf"prometheus_port: port {port} of 127\.0\.0\.1"):
                check_logger(config)
    check_logger(config)  # the port is free again


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


def test_trackio_gets_tables_and_histograms_and_a_resume_continues_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="trackio is an extra")
    run = log_and_resume(tmp_path, LoggerConfig(tensorboard=False, trackio_project="mine"))
    [found] = trackio.Api().runs("mine")
    assert found.name == f"first-{(run.logs / 'trackio_run_id').read_text()[:6]}"
    with sqlite3.connect(next((tmp_path / "trackio").glob("mine*.db"))) as database:
        rows = list(database.execute("select step, metrics from metrics order by step"))
    logged = {step: json.loads(metrics) for step, metrics in rows}
    assert logged.keys() == {1, 2, 3, 4} and logged[4]["policy/loss"] == 1.0
    assert logged[1][LENGTHS]["_type"] == "trackio.histogram"
    assert logged[1][SAMPLES]["_type"] == "trackio.table"


def test_swanlab_gets_texts_and_charts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    pytest.importorskip("swanlab", reason="swanlab is an extra")
    run = log_and_resume(tmp_path, LoggerConfig(tensorboard=False, swanlab_project="mine"))
    stored = [path for path in (run.logs / "swanlab").rglob("*") if path.is_file()]
    content = b"".join(path.read_bytes() for path in stored)
    assert b"policy/loss" in content and LENGTHS.encode() in content
    assert b"2+2=" in content


UNREACHABLE = """
class Run:
    def log(self, *args, **kwargs):
        raise ConnectionError("the service is down")

    finish = log


def init(**options):
    return Run()


def Table(**options):
    return options


Histogram = Table
"""


def test_a_service_that_fails_during_a_run_is_one_warning_and_the_files_are_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = module_from_spec(ModuleSpec("trackio", None))
    exec(UNREACHABLE, vars(library))
    monkeypatch.setitem(sys.modules, "trackio", library)
    run = log_run(tmp_path, LoggerConfig(tensorboard=False, trackio_project="mine"), (1, 2, 3))
    assert [message for message in caplog.messages if "the service is down" in message] == [
        caplog.messages[-1]
    ]
    steps = [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]
    assert steps == [1, 2, 3]
