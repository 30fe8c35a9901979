"""Complete runs with an environment: resumed in this process, and asynchronously on Ray with a
worker of the environment that dies.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.environments.reward import RewardError
from tests.algorithms.test_runs import interrupt_at, read_metrics, read_rollout
from tests.recipe import Recipe

GAME = (
    "environment.path=nemo_like.environments.included.GuessingGame",
    "environment.options={guess_cost: 0.1}",
    "environment.max_turns=3",
    "policy.generation.max_new_tokens=12",
)


def _check_records(records: list[dict]) -> None:
    for record in records:
        roles = [message["role"] for message in record["messages"]]
        assert roles == (["user", "assistant"] * record["num_turns"])
        assert 1 <= record["num_turns"] <= 3
        assert record["ended_by"] in ("done", "turns", "tokens", "error")
        assert record["completion"] == record["messages"][-1]["content"]


def test_a_resumed_run_of_conversations_continues_a_straight_one(recipe: Recipe) -> None:
    options = (
        *GAME,
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "data.max_validation_rows=4",
        "checkpointing.save_period=1",
        "checkpointing.keep_latest=5",
    )
    run = run_grpo(recipe.grpo(*options)).directory.path
    expected = read_metrics(run)
    for line in expected[1:]:
        assert line["policy/grad_norm"] > 0
        assert 1 < line["conversation/turns_mean"] <= 3
        assert line["conversation/observation_tokens_mean"] > 0
        assert line["mismatch/logprob_diff_max"] < 1e-4
        assert "reward/environment_mean" in line and "reward/digits_mean" in line
    assert "validation/environment_mean" in expected[0]
    for step in (1, 2):
        records = read_rollout(run, step)
        _check_records(records)
        num_turns = sum(each["num_turns"] for each in records)
        assert num_turns / len(records) == expected[step]["conversation/turns_mean"]
    interrupt_at(run, 1)
    records = read_rollout(run, 2)
    run_grpo(recipe.grpo(*options, "resume=true"))
    # The batches in which turns are decoded depend on the time of steps, and log-probs in their
    # last bits on the batch; texts do not.
    resumed = read_rollout(run, 2)
    assert [each["messages"] for each in resumed] == [each["messages"] for each in records]
    found = read_metrics(run)[2]["policy/grad_norm"]
    assert found == pytest.approx(expected[2]["policy/grad_norm"], rel=1e-3)


def test_an_asynchronous_run_on_ray_survives_failures_of_the_environment(
    recipe: Recipe, joined_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    marker = recipe.folder / "died"
    options = [
        *GAME[2:],
        "environment.path=tests.environments.user_environments.DiesOnce",
        f"environment.options.marker={marker}",
        "environment.on_error=drop",
        "reward.max_error_share=0.9",
        "environment.num_workers=2",
        "cluster.backend=ray",
        "cluster.cpus_per_worker=0.5",
        "~reward.functions.digits",
        "grpo.max_num_steps=4",
        "grpo.max_staleness=1",
        "grpo.weight_update=in_flight",
        "grpo.val_period=0",
        "grpo.val_at_start=false",
        "data.validation_path=null",
    ]
    recipe.grpo(*options)
    code = main(["grpo", "--config", str(recipe.folder / "grpo.yaml"), *options])
    output, errors = capfd.readouterr()
    assert code == 0, output[-3000:] + errors[-3000:]
    assert "of the environment failed and is restarted" in output
    assert marker.exists()
    assert output.count("DiesOnce step raised KeyError: 'city'") == 1
    run = recipe.folder / "grpo"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    for line in steps:
        _check_records(read_rollout(run, line["step"]))
        _check_failures(run, line, is_dropped=True)
        assert line["staleness/max"] <= 1


FLAKY = (
    *GAME[2:],
    "environment.path=tests.environments.user_environments.Flaky",
    "~reward.functions.digits",
    "reward.max_error_share=0.9",
    "grpo.max_num_steps=1",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
)


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_a_run_goes_on_without_the_conversations_whose_environment_failed(
    recipe: Recipe, on_error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # `drop` is the default.
    options = [] if on_error == "drop" else ["environment.on_error=zero"]
    result = run_grpo(recipe.grpo(*FLAKY, *options))
    (line,) = read_metrics(result.directory.path)
    _check_failures(result.directory.path, line, is_dropped=on_error == "drop")
    output = capsys.readouterr().out
    assert output.count("warning: environment.path tests.environments.user_environments.Flaky") == 1
    assert "step raised KeyError: 'city'" in output
    with pytest.raises(RewardError, match=r"max_error_share 0\.1(.|\n)*Flaky step raised KeyError"):
        run_grpo(
            recipe.grpo(
                *FLAKY,
                f"environment.on_error={on_error}",
                "reward.max_error_share=0.1",
                "run_name=limited",
            )
        )


def _check_failures(run: Path, metrics: dict[str, float], *, is_dropped: bool) -> None:
    """Of `Flaky` in one step: by the texts of the records, and their rewards by definition."""
    records = read_rollout(run, int(metrics["step"]))
    rewards = []
    num_failed = 0
    for record in records:
        turns = [each["content"] for each in record["messages"] if each["role"] == "assistant"]
        # Every turn but the last was answered.
        assert all(zlib.crc32(turn.encode()) % 4 for turn in turns[:-1])
        has_failed = zlib.crc32(turns[-1].encode()) % 4 == 0
        assert has_failed == ("error" in record) == (record["ended_by"] == "error")
        if has_failed:
            num_failed += 1
            assert " step raised KeyError: 'city'" in record["error"]
            assert record["dropped"] == is_dropped and record["reward"] == 0
            assert not is_dropped or record["advantage"] == 0
        else:
            assert record["reward"] == 0.5 * len(turns)
        if not has_failed or not is_dropped:
            rewards.append(record["reward"])
    assert 0 < num_failed < len(records) == 32
    assert metrics["reward/num_errors"] == metrics["reward/num_errors_raised"] == num_failed
    assert metrics["reward/num_dropped"] == num_failed * is_dropped
    assert metrics["conversation/ended_by_error_share"] == num_failed / 32
    assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert metrics["policy/grad_norm"] > 0


def test_validate_steps_the_environment_with_the_first_row(recipe: Recipe) -> None:
    report = validate(recipe.grpo(*GAME))
    assert report.problems == ()
    (line,) = report.sections["environment"]
    assert line.startswith(GAME[0].partition("=")[2] + ": reward ")
    scripted = "environment.path=tests.environments.user_environments.Scripted"
    (problem,) = validate(recipe.grpo(scripted)).problems
    assert "Scripted step raised KeyError: 'num_turns'" in problem
    assert validate(recipe.grpo(scripted, "environment.on_error=zero")).problems == (problem,)
    assert "grpo_train.jsonl" in problem
