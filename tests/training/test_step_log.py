"""The record of a step merges what its parts report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.metrics import Max, Mean, Sum, Timers
from nemo_like.run.progress import Progress
from nemo_like.run.tracking import RunLog
from nemo_like.training.step_log import StepLog


class Recorded:
    """A tracker that keeps the records."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def log(self, step: int, values: dict[str, float], media: Any) -> None:
        self.records.append({"step": step, **values})


class Unselected:
    """A selection that keeps nothing."""

    def observe(self, step: int, values: dict[str, float]) -> None:
        pass


@pytest.fixture
def log(tmp_path: Path) -> StepLog:
    return StepLog(
        tracker=Recorded(),  # type: ignore[arg-type]
        log_file=RunLog(tmp_path / "driver.log"),
        selection=Unselected(),  # type: ignore[arg-type]
        progress=Progress(),
        timers=Timers(),
        opened_s=0.0,
        counters={},
    )


def test_metrics_that_a_step_adds_twice_are_merged_and_the_next_step_starts_anew(log: StepLog):
    """A reward model scores the rollout of a step and then its validation."""
    log.add({"reward_model/a_num_tokens": Sum(30.0), "share": Mean(1.0, 4), "error": Max(2.0)})
    log.add({"reward_model/a_num_tokens": Sum(12.0), "share": Mean(3.0, 4), "error": Max(1.0)})
    log.write(1)
    log.add({"reward_model/a_num_tokens": Sum(5.0)})
    log.write(2)
    tracker = log.tracker
    assert isinstance(tracker, Recorded)
    assert tracker.records == [
        {"step": 1, "reward_model/a_num_tokens": 42.0, "share": 0.5, "error": 2.0},
        {"step": 2, "reward_model/a_num_tokens": 5.0},
    ]


def test_one_name_with_two_kinds_of_metrics_is_refused(log: StepLog):
    log.add({"loss": Mean(1.0)})
    with pytest.raises(TypeError, match="'loss' is a Mean in one part and a Sum in another"):
        log.add({"loss": Sum(1.0)})
