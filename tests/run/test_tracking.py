"""A run's directory and where its numbers go, read back from the files."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import resource
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import LoggerConfig, OptimizerConfig
from nemo_like.run.directory import (
    RunDirectory,
    log_config_changes,
    open_run_directory,
    start_run_directory,
)
from nemo_like.run.files import WriteError
from nemo_like.run.tracking import Tracker

PLAIN = LoggerConfig(tensorboard=False)
CONFIG = {
    "run_name": "first",
    "resume": False,
    "policy": {"optimizer": asdict(OptimizerConfig()), "stop": ("a", "b")},
}


def new_run(
    tmp_path: Path, *, resume: bool = False, resumed_step: int | None = None, config: dict = CONFIG
) -> RunDirectory:
    """A run as a job opens it, with its lock given back at once."""
    with open_run_directory(str(tmp_path), "first", resume=resume) as run:
        if resume:
            log_config_changes(run, config)
        start_run_directory(run, config, resumed_step)
    return run


def lines_of(run: RunDirectory) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [
        json.loads(line, parse_constant=refuse) for line in run.metrics.read_bytes().splitlines()
    ]


def log_steps(
    run: RunDirectory,
    steps: range,
    *,
    resumed_step: int | None = None,
    config: LoggerConfig = PLAIN,
) -> None:
    start_run_directory(run, CONFIG, resumed_step)
    with Tracker(run, config, CONFIG, resumed_step=resumed_step) as tracker:
        for step in steps:
            tracker.log(step, {"policy/loss": step / 3})


def test_open_run_directory_makes_the_directory_and_the_resolved_config(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    assert run.path == tmp_path / "first"
    assert {path.name for path in run.path.iterdir()} == {
        "config.yaml",
        "logs",
        "plan",
        "rollouts",
    }, "no lock is left"
    written = yaml.safe_load(run.config.read_text())
    assert written["policy"]["optimizer"] == asdict(OptimizerConfig())
    assert written["policy"]["stop"] == ["a", "b"]
    assert run.rollouts(3) == run.path / "rollouts" / "step_3.jsonl"
    assert run.plan(3) == run.path / "plan" / "step_3.json"


def test_a_run_name_with_results_is_reused_only_with_resume(tmp_path: Path) -> None:
    log_steps(new_run(tmp_path), range(1, 3))
    with pytest.raises(ConfigError, match=r"run_name: .*first already has a run; .*resume=true"):
        new_run(tmp_path)
    assert len(lines_of(new_run(tmp_path, resume=True, resumed_step=2))) == 2


def test_a_run_with_only_a_checkpoint_is_not_overwritten_either(tmp_path: Path) -> None:
    (new_run(tmp_path).path / "checkpoints" / "step_1").mkdir(parents=True)
    with pytest.raises(ConfigError, match="already has a run"):
        new_run(tmp_path)


def test_a_run_that_failed_before_its_first_result_may_start_again(tmp_path: Path) -> None:
    with Tracker(new_run(tmp_path), LoggerConfig(), CONFIG):
        pass
    log_steps(new_run(tmp_path), range(1, 2))


def test_a_run_that_starts_again_keeps_the_metrics_it_had(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log_steps(run, range(1, 4))
    log_steps(new_run(tmp_path, resume=True), range(1, 3))
    assert [line["step"] for line in lines_of(run)] == [1, 2]
    kept = run.metrics.with_name("metrics.jsonl.before_resume").read_text().splitlines()
    assert len(kept) == 3


def test_resume_of_a_run_that_never_was_starts_it(tmp_path: Path) -> None:
    log_steps(new_run(tmp_path, resume=True), range(1, 3))
    assert [line["step"] for line in lines_of(new_run(tmp_path, resume=True, resumed_step=2))] == [
        1,
        2,
    ]


def test_somebody_elses_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        new_run(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/tmp/x", "a b", ".hidden"])
def test_a_run_name_must_be_one_directory(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ConfigError, match=r"run_name: .* cannot name a directory"),
        open_run_directory(str(tmp_path), name, resume=False),
    ):
        pass


def test_an_output_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    match = r"output_dir: cannot create .*file/first"
    with (
        pytest.raises(ConfigError, match=match),
        open_run_directory(str(tmp_path / "file"), "first", resume=True),
    ):
        pass


def test_resume_lists_what_changed_in_the_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_run(tmp_path)
    optimizer = {**asdict(OptimizerConfig(lr=3e-4)), "momentum": 0.5}
    changed = {**CONFIG, "resume": True, "policy": {**CONFIG["policy"], "optimizer": optimizer}}
    with caplog.at_level(logging.WARNING):
        run = new_run(tmp_path, resume=True, config=changed)
    assert [record.getMessage().partition("started: ")[2] for record in caplog.records] == [
        "policy.optimizer.lr: 1e-05 -> 0.0003",
        "policy.optimizer.momentum: (not there) -> 0.5",
    ]
    assert yaml.safe_load(run.config.read_text())["policy"]["optimizer"]["lr"] == 3e-4


def test_resume_over_a_damaged_config_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new_run(tmp_path).config.write_text("policy: [")
    run = new_run(tmp_path, resume=True)
    assert "changes of the configuration are not listed" in caplog.text
    assert yaml.safe_load(run.config.read_text())["run_name"] == "first"


def test_metrics_are_on_disk_after_each_step_and_exact(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    shown: list[tuple[int, dict]] = []
    with Tracker(
        run, PLAIN, CONFIG, show=lambda step, metrics: shown.append((step, dict(metrics)))
    ) as tracker:
        tracker.log(0, {"policy/loss": 0.1 + 0.2, "packing/num_microbatches": 4})
        line = lines_of(run)[0]  # before close
        assert line.pop("unix_time_s") > 1e9
        assert line == {"step": 0, "policy/loss": 0.1 + 0.2, "packing/num_microbatches": 4.0}
        tracker.log(1, {"policy/loss": np.float32(0.5), "policy/entropy": torch.tensor(0.25)})  # pyright: ignore[reportArgumentType]
    assert shown[1] == (1, {"policy/loss": 0.5, "policy/entropy": 0.25})


def test_a_number_that_is_not_finite_is_null_and_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(tmp_path)
    with Tracker(run, PLAIN, CONFIG) as tracker:
        tracker.log(1, {"policy/loss": math.nan, "policy/grad_norm": math.inf})
        tracker.log(2, {"policy/loss": math.nan})
    assert [line["policy/loss"] for line in lines_of(run)] == [None, None]
    assert lines_of(run)[0]["policy/grad_norm"] is None
    assert caplog.text.count("policy/loss is nan at step 1") == 1
    assert "policy/loss is nan at step 2" not in caplog.text


def test_a_step_is_logged_once_and_in_order(tmp_path: Path) -> None:
    with Tracker(new_run(tmp_path), PLAIN, CONFIG) as tracker:
        tracker.log(2, {})
        for step in (1, 2):
            with pytest.raises(ValueError, match=f"step {step} is logged after step 2"):
                tracker.log(step, {})


@settings(max_examples=30, deadline=None)
@given(num_steps=st.integers(0, 8), resumed_step=st.integers(0, 8), cut=st.integers(0, 40))
def test_after_a_resume_every_step_stands_once(
    tmp_path_factory: pytest.TempPathFactory, num_steps: int, resumed_step: int, cut: int
) -> None:
    """Killed after `num_steps` with the last line cut by `cut` bytes, resumed at `resumed_step`,
    run on to step 10.
    """
    tmp_path = tmp_path_factory.mktemp("resume")
    run = new_run(tmp_path)
    log_steps(run, range(1, num_steps + 1))
    content = run.metrics.read_bytes()
    last_line = len(content) - (content[:-1].rfind(b"\n") + 1)
    run.metrics.write_bytes(content[: len(content) - min(cut, last_line)])
    num_complete = num_steps - (
        num_steps > 0 and cut > 1
    )  # without its newline alone, a line is still complete
    resumed_step = min(resumed_step, num_complete)
    log_steps(run, range(resumed_step + 1, 11), resumed_step=resumed_step)
    lines = lines_of(run)
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["policy/loss"] for line in lines] == [step / 3 for step in range(1, 11)]


def test_resume_without_a_checkpoint_starts_the_metrics_again(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log_steps(run, range(4))
    log_steps(run, range(2), resumed_step=None)
    assert [line["step"] for line in lines_of(run)] == [0, 1]


def test_tensorboard_has_the_scalars_and_a_resume_purges_what_it_repeats(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    log_steps(run, range(1, 6), config=LoggerConfig())
    log_steps(run, range(4, 7), resumed_step=3, config=LoggerConfig())
    events = EventAccumulator(str(run.tensorboard), size_guidance={"scalars": 0})
    events.Reload()
    scalars = events.Scalars("policy/loss")
    assert [event.step for event in scalars] == [1, 2, 3, 4, 5, 6]
    assert scalars[2].value == pytest.approx(1.0)


def test_metrics_that_cannot_be_written_are_one_paragraph(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    start_run_directory(run, CONFIG, None)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (
        pytest.raises(
            WriteError,
            match=r"metrics of step 2 cannot be written to .*metrics\.jsonl: .*output_dir",
        ),
        Tracker(run, PLAIN, CONFIG) as tracker,
    ):
        tracker.log(1, {"policy/loss": 1.0})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (run.metrics.stat().st_size + 5, limits[1]))
            tracker.log(2, {"policy/loss": 1.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    log_steps(run, range(2, 4), resumed_step=1)
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("package", "config"),
    [
        ("wandb", LoggerConfig(wandb_project="mine")),
        ("mlflow", LoggerConfig(mlflow_experiment="mine")),
    ],
)
def test_a_missing_tracker_names_the_extra(
    tmp_path: Path, package: str, config: LoggerConfig
) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    run = new_run(tmp_path)
    with pytest.raises(
        ConfigError,
        match=rf"logger\.{package}_\w+: is 'mine', .* pip install 'nemo-like\[{package}\]'",
    ):
        Tracker(run, config, CONFIG)
    assert not run.metrics.exists()
