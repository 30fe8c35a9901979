"""The comparison of two runs sees a difference in each thing that it compares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nemo_like.run.comparison import differences, prompt_differences

WEIGHTS = "checkpoints/step_2/policy/model.safetensors"


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of two steps that differ in clocks only."""
    paths = tmp_path / "expected", tmp_path / "found"
    for number, path in enumerate(paths):
        for folder in ("rollouts", "plan", "hf", "checkpoints/step_2/policy", "logs"):
            (path / folder).mkdir(parents=True)
        for name in ("hf/model.safetensors", "plan/lengths.jsonl", WEIGHTS):
            (path / name).write_bytes(b"weights")
        (path / "logs/driver.log").write_text(f"{number}")
        records = []
        for step in (1, 2):
            clocks = {"timing/step_s": number, "policy/rank_time_max_s": number}
            clocks["generation/num_restarts"] = number
            records.append({"step": step, "policy/loss": 1 / step, **clocks})
            bits = {"logprob_difference_max": 1e-7 * number}
            rows = [{"prompt": f"{step}{each}", **bits} for each in "aab"]
            (path / f"rollouts/step_{step}.jsonl").write_text(_lines(rows))
        (path / "metrics.jsonl").write_text(_lines(records))
    return paths


def _lines(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_clocks_and_logs_are_not_compared(runs: tuple[Path, Path]) -> None:
    assert list(differences(*runs)) == [] == list(prompt_differences(*runs))


@pytest.mark.parametrize("name", ["hf/model.safetensors", "plan/lengths.jsonl", WEIGHTS])
def test_a_changed_byte_and_a_missing_file_are_found(runs: tuple[Path, Path], name: str) -> None:
    (runs[1] / name).write_bytes(b"weighty")
    assert list(differences(*runs)) == [f"{name} differs"]
    (runs[1] / name).unlink()
    assert list(differences(*runs)) == [f"{name} exists in one of the runs only"]


def test_a_changed_metric_and_a_missing_step_are_found(runs: tuple[Path, Path]) -> None:
    metrics = runs[1] / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text(text.replace("0.5", "0.6"))
    assert list(differences(*runs)) == [
        "step 2: policy/loss is 0.6 instead of 0.5 (one of 1 metrics that differ)"
    ]
    metrics.write_text(text.splitlines(keepends=True)[0])
    assert list(differences(*runs)) == ["metrics.jsonl has 1 instead of 2 steps"]
    assert list(prompt_differences(*runs)) == ["metrics.jsonl has 1 instead of 2 steps"]


def test_prompts_may_be_trained_in_other_steps_but_not_more_or_less_often(
    runs: tuple[Path, Path],
) -> None:
    first, second = (runs[1] / f"rollouts/step_{step}.jsonl" for step in (1, 2))
    text = first.read_text()
    first.write_text(second.read_text())
    second.write_text(text)
    assert list(prompt_differences(*runs)) == []
    assert len(list(differences(*runs))) == 2
    second.write_text(first.read_text())
    assert list(prompt_differences(*runs)) == [
        "3 rows fewer of 2 prompts were trained",
        "3 rows more of 2 prompts were trained",
    ]
    shutil.rmtree(runs[0] / "rollouts")
    assert "has no rollouts (logger.save_rollouts)" in next(prompt_differences(*runs))
