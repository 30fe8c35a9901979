"""Advantages of turns in complete runs, against rewards that the texts of the records define."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.data.jagged import Jagged
from nemo_like.prediction.lengths import read_run
from nemo_like.reports.rollouts import read_rollouts
from nemo_like.reports.run_files import RunFiles
from nemo_like.rollout.records import RolloutRecord
from tests.algorithms.test_agent_runs import PROGRAM
from tests.algorithms.test_environment_runs import FLAKY
from tests.recipe import Recipe

TURNS = (
    "grpo.advantage.turns=return_to_go",
    "grpo.advantage.turn_discount=0.5",
    "grpo.advantage.baseline=leave_one_out",
    "grpo.advantage.normalize=none",
    "grpo.max_num_steps=1",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
    "~reward.functions.digits",
)


def run_of(recipe: Recipe, *options: str) -> tuple[list[dict[str, Any]], list[list[np.ndarray]]]:
    """The records of the step, and of each row the advantages of its spans of sampled tokens."""
    run: Path = run_grpo(recipe.grpo(*dict.fromkeys((*options, *TURNS)))).directory.path
    path = run / "rollouts" / "step_1"
    lines = path.with_suffix(".jsonl").read_bytes().splitlines()
    columns = RolloutRecord.load(path.with_suffix(".safetensors")).columns
    advantages, mask = columns["advantages"], columns["token_mask"]
    assert isinstance(advantages, Jagged) and isinstance(mask, Jagged)
    spans = []
    for values, is_trained in zip(advantages, mask, strict=True):
        ends = np.flatnonzero(np.diff(is_trained)) + 1
        parts = np.split(values, ends)
        is_span = [part[0] == 1 for part in np.split(is_trained, ends)]
        assert all((part == 0).all() for part, each in zip(parts, is_span, strict=True) if not each)
        spans.append([part for part, each in zip(parts, is_span, strict=True) if each])
    return [json.loads(line) for line in lines], spans


def expected_of(rewards: list[list[float]], groups: list[int]) -> list[list[float]]:
    """By definition, with a discount of 0.5."""

    def to_go(turns: list[float], start: int) -> float:
        return sum(0.5**power * each for power, each in enumerate(turns[start:]))

    expected = []
    for episode, turns in enumerate(rewards):
        others = [
            to_go(each, 0)
            for number, each in enumerate(rewards)
            if number != episode and groups[number] == groups[episode]
        ]
        if not others:
            expected.append([0.0] * len(turns))
            continue
        baseline = sum(others) / len(others)
        expected.append([to_go(turns, start) - baseline for start in range(len(turns))])
    return expected


def test_turns_of_programs_have_the_rewards_that_follow_them(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [each for each in PROGRAM if "save_period" not in each and "keep" not in each]
    path = "environment.path=tests.algorithms.agent_programs.rewards_turns"
    records, spans = run_of(recipe, *options, path)
    episodes = sorted({record["episode"] for record in records})
    rewards, groups, found = [], [], []
    for episode in episodes:
        rows = [index for index, each in enumerate(records) if each["episode"] == episode]
        (row,) = [index for index in rows if "messages" in records[index]]
        (other,) = [index for index in rows if index != row]
        first, last = [
            len(each["content"]) / 10
            for each in records[row]["messages"]
            if each["role"] == "assistant"
        ]
        rewards.append([first, len(records[other]["completion"]) / 10, last + 1.0])
        assert records[row]["turn_rewards"] == pytest.approx(rewards[-1])
        assert records[row]["reward"] == pytest.approx(sum(rewards[-1]))
        groups.append(records[row]["group"])
        # In the order of time: the other conversation is between the two turns.
        found.append([spans[row][0], spans[other][0], spans[row][1]])
    assert len(episodes) == 8
    for parts, each in zip(found, expected_of(rewards, groups), strict=True):
        for part, value in zip(parts, each, strict=True):
            assert len(part) > 0 and part == pytest.approx(value, abs=1e-6)
    assert "  episodes 8 done  " in capsys.readouterr().out
    _check_shown(recipe.folder / "grpo", records, capsys)
    # The steps of a past run are divided by episodes.
    past = read_run(recipe.folder / "grpo")
    assert past.episodes[1].tolist() == [each["episode"] for each in records]
    assert main(["plan", "--metrics", str(recipe.folder / "grpo"), "--json", "-"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["setting"]["batch_size"] == 4 * len(records) / 8
    assert planned["logged"]
    for each in planned["logged"].values():
        assert each["planned"] == pytest.approx(each["logged"])


def _check_shown(
    run: Path, records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Every row of the first episode, with its calls, rewards and the texts of its branch."""
    rows = [index for index, each in enumerate(records) if each["episode"] == 0]
    assert main(["show", str(run), "--rows", ",".join(map(str, rows))]) == 0
    shown = capsys.readouterr().out
    assert "step 1: 8 episodes: 8 done" in shown
    assert "episode 0, row 1/2" in shown and "episode 0, row 2/2" in shown
    (branch,) = [records[row] for row in rows if "segments" in records[row]]
    (main_row,) = [records[row] for row in rows if "messages" in records[row]]
    assert (branch["calls"], main_row["calls"]) == ([1], [0, 2])
    assert "7+1" in branch["segments"][0] and branch["completion"] in branch["segments"][1]
    rewards = " ".join(f"{each:.4g}" for each in main_row["turn_rewards"])
    notes = [row.notes for step in read_rollouts(RunFiles(run)).steps for row in step.rows]
    assert all(each["status"] == "done" for each in notes)
    assert {"0 2", "1"} >= {each["calls"] for each in notes}
    plain = " ".join(shown.replace("│", " ").split())
    for text in ("calls 0 2", "calls 1", "status done", f"rewards per turn {rewards}"):
        assert text in plain


def test_turns_of_conversations_have_the_rewards_of_their_steps(recipe: Recipe) -> None:
    records, spans = run_of(recipe, *FLAKY, "environment.on_error=drop")
    is_kept = [not each.get("dropped") for each in records]
    kept = [index for index, each in enumerate(is_kept) if each]
    rewards = [[0.5] * records[index]["num_turns"] for index in kept]
    groups = [records[index]["group"] for index in kept]
    expected = dict(zip(kept, expected_of(rewards, groups), strict=True))
    assert 0 < len(kept) < len(records)
    for index, parts in enumerate(spans):
        for part, value in zip(parts, expected.get(index, [0.0] * len(parts)), strict=True):
            assert part == pytest.approx(value, abs=1e-6)


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("grpo.advantage.baseline=group_mean", "grpo.advantage.baseline is group_mean"),
        ("grpo.advantage.normalize=group_std", "grpo.advantage.normalize is group_std"),
        ("grpo.advantage.components=separate", "grpo.advantage.components is separate"),
        ("grpo.advantage.whiten=rows", "grpo.advantage.whiten is rows"),
        ("loss_fn.surrogate=gspo", "loss_fn.surrogate gspo has one loss per row"),
        ("grpo.dynamic_sampling.enabled=true", "grpo.dynamic_sampling.enabled is true"),
        ("environment.path=null", "a completion is one turn"),
        ("grpo.advantage.turns=none", r"turn_discount is 0\.5, but grpo.advantage.turns is none"),
    ],
)
def test_keys_without_advantages_of_turns_are_refused(
    recipe: Recipe, option: str, key: str
) -> None:
    with pytest.raises(ConfigError, match=key):
        recipe.grpo(*FLAKY, *TURNS[:4], option)
