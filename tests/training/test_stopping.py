"""Runs that get a stop request: by a signal, by the time limit, and by Ctrl-C on a Ray cluster."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from nemo_like.cli import main
from nemo_like.config.load import to_yaml
from nemo_like.config.schema import RunConfig
from nemo_like.training import stopping
from tests.algorithms.test_runs import read_metrics
from tests.recipe import Recipe


def write(config: RunConfig, folder: Path) -> str:
    path = folder / "stopping.yaml"
    path.write_text(to_yaml(config))
    return str(path)


def short_grpo(recipe: Recipe, reward: str) -> str:
    """Two steps of GRPO in this process with a reward function of the tests; the config's path."""
    config = recipe.grpo(
        f"reward.functions.digits.path=tests.algorithms.rewards.{reward}",
        "grpo.val_at_start=false",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=2",
        "policy.train_global_batch_size=4",
        "policy.generation.max_new_tokens=4",
        "checkpointing.export_hf=false",
    )
    return write(config, recipe.folder)


@pytest.fixture(autouse=True)
def default_sighup() -> Iterator[None]:
    """The tests may run under `nohup`, where the signal is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "exit_code"), [("SIGTERM", 75), ("SIGHUP", 75), ("SIGINT", 130)])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(
    recipe: Recipe,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    exit_code: int,
) -> None:
    path = short_grpo(recipe, "signal_once")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("TEST_SIGNAL", name)
    assert main(["grpo", "--config", path]) == exit_code
    said = capfd.readouterr().err
    assert "ends after the current step" in said
    assert f"stopped by {name} after step 1: resume=true continues the run" in said
    run = recipe.folder / "grpo"
    assert (run / "latest").read_text() == "checkpoints/step_1\n"
    assert signal.getsignal(signal.SIGTERM) is before
    if name == "SIGTERM":
        assert main(["grpo", "--config", path, "resume=true"]) == 0
        assert [line["step"] for line in read_metrics(run)] == [1, 2]
        # Written at the end of a complete run only.
        page = (run / "report.html").read_text()
        assert 'class="badge finished"' in page and "torch " in page and "in 2 steps" in page


def test_a_terminal_that_is_closed_ends_the_run_after_the_step_with_a_checkpoint(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = short_grpo(recipe, "close_terminal_once")
    ours, theirs = os.openpty()
    monkeypatch.setenv("TEST_SIGNAL", "SIGHUP")
    monkeypatch.setenv("TEST_TERMINAL", str(ours))
    with open(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "stderr", terminal)
        code = main(["grpo", "--config", path])
    assert code == 75
    run = recipe.folder / "grpo"
    assert (run / "latest").read_text() == "checkpoints/step_1\n"
    log = (run / "logs" / "driver.log").read_text()
    assert "is closed from here on: Input/output error" in log
    assert "stopped by SIGHUP after step 1" in log


def test_a_run_of_nohup_continues_after_its_terminal_is_closed(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = short_grpo(recipe, "signal_once")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setenv("TEST_SIGNAL", "SIGHUP")
    try:
        assert main(["grpo", "--config", path]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert "TEST_SIGNAL" not in os.environ, "the signal was sent"
    assert (recipe.folder / "grpo" / "latest").read_text() == "checkpoints/step_2\n"


def test_the_time_limit_ends_the_run_after_the_step(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ages = itertools.chain([0.0, 0.0, 0.0], itertools.repeat(10.0))
    start = time.clock_gettime(time.CLOCK_BOOTTIME) - stopping.process_age_s()
    monkeypatch.setattr(time, "clock_gettime", lambda _: start + next(ages))
    config = recipe.sft("cluster.time_limit=0:00:05", "sft.val_at_start=false")
    assert main(["sft", "--config", write(config, recipe.folder)]) == 75
    assert "stopped by cluster.time_limit 0:00:05 after step 2" in capfd.readouterr().err
    assert (recipe.folder / "sft" / "latest").read_text() == "checkpoints/step_2\n"


def test_a_signal_before_the_first_step_ends_the_run_without_a_checkpoint(
    recipe: Recipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = recipe.sft()
    path = write(config, recipe.folder)
    monkeypatch.setattr(
        AutoTokenizer, "from_pretrained", lambda *_, **__: signal.raise_signal(signal.SIGINT)
    )
    assert main(["sft", "--config", path]) == 130
    assert "interrupted. The run has no checkpoint" in capfd.readouterr().err


def test_a_signal_whose_exception_native_code_replaces_ends_the_run_as_any_other(
    recipe: Recipe, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `ray.wait` does."""

    def wait(*_: object, **__: object) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

    path = write(recipe.sft(), recipe.folder)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", wait)
    assert main(["sft", "--config", path]) == 75
    assert capfd.readouterr().err == "stopped by SIGTERM outside a step\n"


def test_the_age_of_the_process_passes() -> None:
    first = stopping.process_age_s()
    assert 0 < first <= stopping.process_age_s() < 7 * 86400
