"""The commands that a finished run prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.algorithms.registry import job_schema
from nemo_like.commands.choices import nested
from nemo_like.commands.train import next_commands
from nemo_like.config.load import load_values
from nemo_like.config.schema import RunConfig
from nemo_like.run.directory import RunDirectory
from nemo_like.training.run import RunResult

REWARD = {"reward.functions.answer.path": "nemo_like.environments.math.answer_reward"}
VALIDATION = {"data.validation_path": "held_out.jsonl"}
MODEL = "reward.models.quality.model_name=runs/mine/hf"
CHAT = "nemo-like chat --model runs/mine"


def config_of(kind: str, **values: Any) -> RunConfig:
    named = {"run_name": "mine", "policy.model_name": "model", "data.train_path": "rows.jsonl"}
    if kind == "grpo" and not any(key.startswith("environment") for key in values):
        named |= REWARD
    if kind == "distill":
        named["distill.teacher"] = "teacher"
    return load_values(job_schema(kind), nested(named | values), [])


def printed_commands(config: RunConfig, *, exports: bool = True) -> list[str]:
    run = Path("runs/mine")
    result = RunResult(RunDirectory(run), 1, {}, {}, run / "hf" if exports else None)
    return list(next_commands(config, result))


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("sft", {}, [CHAT]),
        ("sft", VALIDATION, [CHAT, "nemo-like eval --model runs/mine --perplexity"]),
        ("distill", VALIDATION, [CHAT, "nemo-like eval --model runs/mine --perplexity"]),
        # The rows are prompts.
        ("distill", VALIDATION | {"distill.on_policy_fraction": 1}, [CHAT]),
        # The rows are pairs.
        ("dpo", VALIDATION, [CHAT]),
        ("grpo", {}, [CHAT]),
        ("grpo", VALIDATION, [CHAT, "nemo-like eval --model runs/mine"]),
        ("rm", VALIDATION, [f"nemo-like grpo --model DIR --data FILE {MODEL}"]),
    ],
)
def test_commands_that_work_for_the_job(
    kind: str, values: dict[str, Any], expected: list[str]
) -> None:
    commands = printed_commands(config_of(kind, **values))
    assert commands == ["nemo-like report runs/mine", *expected]


def test_a_run_without_an_export() -> None:
    commands = printed_commands(config_of("sft"), exports=False)
    assert commands == ["nemo-like report runs/mine", "nemo-like export runs/mine --out DIR"]
