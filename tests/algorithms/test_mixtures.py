"""Runs on several training sets, and on rows that are selected or left out during training."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.commands.plan import first_lengths
from nemo_like.commands.validate import validate
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

QUIET = (
    "data.validation_path=null",
    "logger.tensorboard=false",
    "logger.num_samples_shown=0",
    "checkpointing.export_hf=false",
    "checkpointing.keep_latest=9",
    "policy.scheduler.kind=constant",
)
SFT = (*QUIET, "sft.val_period=0", "sft.val_at_start=false")
SHARES = {"train": 0.5, "chats": 0.3, "table": 0.2}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mixture(folder: Path) -> tuple[str, ...]:
    """Three sets of 20, 10 and 6 rows in different formats."""
    sums = [(f"{n}+{n}", f"#### {2 * n}") for n in range(36)]
    train = [{"prompt": prompt, "completion": answer} for prompt, answer in sums[:20]]
    chats = []
    for prompt, answer in sums[20:30]:
        turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]
        chats.append({"conversations": turns})
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("instruction", "output"), *sums[30:]])
    return (
        f"data.train_path={write_lines(folder / 'train.jsonl', train)}",
        f"data.train_sets.chats={write_lines(folder / 'chats.jsonl', chats)}",
        f"data.train_sets.table={folder / 'table.csv'}",
        "data.train_weights={train: 0.5, chats: 0.3, table: 0.2}",
        "sft.max_num_steps=null",
        "sft.max_num_epochs=2",
    )


@pytest.mark.parametrize("kind", ["fixed", "online"])
def test_the_shares_hold_at_every_step_and_after_a_resume(recipe: Recipe, kind: str) -> None:
    options = (*SFT, *mixture(recipe.folder), f"data.batching.kind={kind}")
    result = run_sft(recipe.sft(*options))
    lines = read_metrics(result.directory.path)
    lengths = result.directory.lengths.read_bytes()
    num_rows = [line["policy/num_rows"] for line in lines]
    assert sum(num_rows) == 2 * 36
    for line in lines:
        losses = [line[name] for name in line if name.endswith("/loss") and "source" in name]
        # A short step may have rows of one source only.
        assert min(losses) - 1e-6 <= line["policy/loss"] <= max(losses) + 1e-6
    if kind == "fixed":
        assert num_rows == [16, 16, 4, 16, 16, 4]
        for name, share in SHARES.items():
            counts = np.cumsum([line[f"data/source_{name}/num_rows"] for line in lines])
            assert (np.abs(counts - share * np.cumsum(num_rows)) < 1).all(), name
    else:
        for name, share in SHARES.items():
            count = sum(line[f"data/source_{name}/num_rows"] for line in lines)
            assert abs(count - share * 72) < 1, name
    interrupt_at(result.directory.path, 2)
    resumed = run_sft(recipe.sft(*options, "resume=true")).directory
    assert read_metrics(resumed.path) == lines
    assert resumed.lengths.read_bytes() == lengths


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_the_reward_of_each_set_is_the_mean_over_its_completions(
    recipe: Recipe, is_dynamic: bool
) -> None:
    """The records name the file of each row; with refills they have the dropped groups as well."""
    sets = [option for option in mixture(recipe.folder) if option.startswith("data.")]
    result = run_grpo(
        recipe.grpo(
            *(*QUIET, *sets, "grpo.val_period=0", "checkpointing.enabled=false"),
            *("grpo.max_num_steps=2", f"grpo.dynamic_sampling.enabled={is_dynamic}"),
            "reward.functions.digits.path=tests.algorithms.rewards.digit_share_of_even_prompts",
        )
    )
    for number, line in enumerate(read_metrics(result.directory.path), start=1):
        rewards: dict[str, list[float]] = {}
        path = result.directory.path / "rollouts" / f"step_{number}.jsonl"
        for record in map(json.loads, path.read_bytes().splitlines()):
            name = Path(record["source"].rpartition(":")[0]).stem
            rewards.setdefault(name, []).append(record["reward"])
        if is_dynamic:
            assert line["dynamic_sampling/num_refills"] > 0
            assert sum(map(len, rewards.values())) > 8 * 4
        found = {name: line.get(f"data/source_{name}/reward_mean") for name in SHARES}
        expected = {name: float(np.mean(rewards[name])) for name in rewards}
        assert {name: value for name, value in found.items() if value is not None} == (
            pytest.approx(expected, rel=1e-9)
        )
        assert len(expected) > 1


def test_validate_lists_and_checks_every_set(recipe: Recipe) -> None:
    options = mixture(recipe.folder)
    report = validate(recipe.sft(*SFT, *options))
    assert report.problems == ()
    text = "\n".join(report.sections["data"])
    assert "train.jsonl: 20 rows of prompt + completion" in text
    assert "chats.jsonl: 10 rows of messages" in text
    assert "table.csv: 6 rows of prompt + completion" in text
    assert "mixture: train 0.5 (0.9 passes per epoch), chats 0.3 (1.08 passes" in text
    assert "6 steps; an epoch is 2 steps of 16 rows and 1 of 4" in text
    planned = first_lengths(recipe.sft(*SFT, *options), None, 3)
    assert planned.source == "the training sets train, chats, table"
    # The steps of the largest size: two of 16 rows.
    assert len(planned.values) == 32
    write_lines(recipe.folder / "chats.jsonl", [{"conversations": [{"from": "robot"}]}])
    (recipe.folder / "table.csv").write_text("instruction,output\n")
    problems = validate(recipe.sft(*SFT, *options)).problems
    assert len(problems) == 2
    assert "chats.jsonl:1: conversations[0].from" in problems[0]
    assert "data.train_sets.table: " in problems[1] and "has no rows" in problems[1]


def test_long_rows_are_left_out_with_and_without_encoding_processes(recipe: Recipe) -> None:
    rows = []
    for number in range(60):
        digits = "1" * (100 if number % 3 == 0 else 5)
        rows.append({"prompt": f"{number}+1", "completion": digits})
    options = (
        *SFT,
        f"data.train_path={write_lines(recipe.folder / 'rows.jsonl', rows)}",
        "policy.oversize_rows=drop",
        "sft.max_num_steps=50",
        "sft.max_num_epochs=2",
    )
    expected = read_metrics(run_sft(recipe.sft(*options)).directory.path)
    assert [line["policy/num_rows"] for line in expected] == [16, 16, 8, 16, 16, 8]
    later = run_sft(recipe.sft(*options, "run_name=later", "data.num_encoding_workers=0"))
    assert read_metrics(later.directory.path) == expected
    assert (later.directory.path / "checkpoints" / "step_6").is_dir()


def test_prompts_are_selected_by_pass_rate_and_length(recipe: Recipe) -> None:
    rows = []
    for number in range(40):
        prompt = "1" * (60 if number % 4 == 0 else 3) + f"+{number}"
        rows.append({"prompt": prompt, "answer": "2", "solved": number / 40})
    result = run_grpo(
        recipe.grpo(
            *QUIET,
            f"data.train_path={write_lines(recipe.folder / 'rows.jsonl', rows)}",
            "data.columns={pass_rate: solved}",
            "data.pass_rate_range=[0.25,0.74]",
            "data.max_prompt_tokens=20",
            "grpo.max_num_steps=2",
            "grpo.val_period=0",
            "checkpointing.enabled=false",
        )
    )
    kept = {row["prompt"] for number, row in enumerate(rows) if 10 <= number < 30 and number % 4}
    assert len(kept) == 15
    seen = set()
    for path in sorted((result.directory.path / "rollouts").glob("step_*.jsonl")):
        seen |= {json.loads(line)["prompt"] for line in path.read_bytes().splitlines()}
    assert seen == kept
    lines = read_metrics(result.directory.path)
    assert sum(line["data/num_dropped"] for line in lines) == 5
