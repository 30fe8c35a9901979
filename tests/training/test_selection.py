"""The best checkpoint and early stopping: decisions, resume, and the files of a run."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import (
    CheckpointingConfig,
    DataConfig,
    EarlyStoppingConfig,
    PolicyConfig,
    RunConfig,
)
from nemo_like.training.saving import Selection
from tests.recipe import Recipe

BASE = RunConfig(
    run_name="run",
    policy=PolicyConfig(model_name="model"),
    data=DataConfig(train_path="train.jsonl"),
    checkpointing=CheckpointingConfig(keep_best="validation/loss", best_mode="min"),
    early_stopping=EarlyStoppingConfig(patience=3),
)
LOSSES = st.one_of(st.integers(0, 8).map(float), st.just(float("nan")))


def observed(selection: Selection, losses: list[float], first_step: int = 1) -> list[bool]:
    """Whether the run ends after each value; values after its end are not seen."""
    ends = []
    for step, loss in enumerate(losses, start=first_step):
        if selection.stops:
            break
        selection.observe(step, {"policy/loss": 0.0, "validation/loss": loss})
        ends.append(selection.stops)
    return ends


@given(losses=st.lists(LOSSES, max_size=12), patience=st.integers(1, 4), cut=st.integers(0, 12))
def test_a_resumed_selection_decides_as_one_without_interruption(
    losses: list[float], patience: int, cut: int
) -> None:
    stopping = dataclasses.replace(BASE.early_stopping, patience=patience)
    config = dataclasses.replace(BASE, early_stopping=stopping)
    complete = Selection(config.checkpointing, config.early_stopping)
    ends = observed(complete, losses)
    first = Selection(config.checkpointing, config.early_stopping)
    parts = observed(first, losses[:cut])
    resumed = Selection(config.checkpointing, config.early_stopping)
    resumed.load_state_dict(first.state_dict())
    parts += observed(resumed, losses[cut:], cut + 1)
    assert parts == ends
    assert resumed.state_dict() == complete.state_dict()
    seen = [loss for loss in losses[: len(ends)] if loss == loss]
    assert complete.best is not None
    if seen:
        # The first of equal values.
        assert complete.best.value == min(seen)
        assert complete.best_step == losses.index(min(seen)) + 1
    else:
        assert complete.best_step is None


def test_only_an_improvement_resets_the_patience() -> None:
    selection = Selection(BASE.checkpointing, BASE.early_stopping)
    assert observed(selection, [4.0, 4.0, 4.5, 3.4, 3.4]) == [False] * 5
    assert selection.stopping is not None
    assert (selection.stopping.value, selection.stopping.step) == (3.4, 4)
    assert observed(selection, [3.5, 3.4], 6) == [False, True], "no value since step 4 is better"


def test_a_metric_that_is_not_logged_is_an_error_before_the_first_step() -> None:
    selection = Selection(BASE.checkpointing, BASE.early_stopping)
    selection.observe(0, {"policy/loss": 1.0})
    with pytest.raises(ConfigError, match=r"keep_best.*validation/accuracy"):
        selection.observe(0, {"validation/accuracy": 1.0})
    selection.observe(1, {"validation/accuracy": 1.0})
    lines = "\n".join(selection.summary())
    assert "checkpointing.keep_best is 'validation/loss', but no step logged it" in lines


OPTIONS = (
    "sft.max_num_steps=6",
    "checkpointing.export_hf=false",
    "checkpointing.keep_latest=1",
    # The validation loss falls, so its largest value is the earliest.
    "checkpointing.keep_best=validation/loss",
    "checkpointing.best_mode=max",
)


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_the_best_checkpoint_stays_and_survives_a_resume(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*OPTIONS, "checkpointing.save_period=3", "sft.val_at_start=false")
    run = run_sft(recipe.sft(*options)).directory
    assert steps_of(run.path) == ["step_2", "step_6"]
    best = run.path / "best"
    assert best.read_text() == "checkpoints/step_2\n"
    assert "best checkpoint: step 2, validation/loss" in capsys.readouterr().out

    # As a kill between `latest` and `best` leaves it.
    best.unlink()
    resumed = run_sft(recipe.sft(*options, "resume=true", "sft.max_num_steps=8"))
    assert steps_of(run.path) == ["step_2", "step_8"] and resumed.step == 8
    assert best.read_text() == "checkpoints/step_2\n"

    out = recipe.folder / "exported"
    assert main(["export", str(run.path), "--out", str(out), "--step", "best"]) == 0
    assert "step_2" in capsys.readouterr().out
    assert main(["export", str(run.path), "--out", str(recipe.folder / "x"), "--step", "3"]) == 2
    assert "has no checkpoint '3'; it has steps 2, 8" in capsys.readouterr().err


def test_early_stopping_ends_the_run_normally_and_exactly_after_a_resume(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    options = (*OPTIONS, "early_stopping.patience=2")
    # Validated at 0, 2 and 4: the loss of the initial model is the largest.
    first = run_sft(recipe.sft(*options, "sft.max_num_steps=2"))
    assert first.step == 2
    result = run_sft(recipe.sft(*options, "resume=true"))
    assert result.step == 4
    assert (result.directory.path / "latest").read_text() == "checkpoints/step_4\n"
    text = "early stopping: validation/loss has not improved in 2 evaluations"
    assert text in capsys.readouterr().out
    again = run_sft(recipe.sft(*options, "resume=true"))
    assert again.step == 4, "the state of the end is in the checkpoint"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["checkpointing.enabled=false"], "checkpointing.enabled is false"),
        (["sft.val_period=0"], "sft.val_period is 0"),
        (["data.validation_path=null", "sft.val_period=0"], "data.validation_path is not set"),
    ],
)
def test_settings_without_effect_are_refused(
    recipe: Recipe, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.sft("checkpointing.keep_best=validation/loss", *overrides)
