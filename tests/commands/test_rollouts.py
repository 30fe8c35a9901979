"""`nemo-like replay` and `nemo-like show`: the record of a step gives its loss again."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.grpo.replay import replay_step
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.rollout.records import RolloutRecord
from nemo_like.run.directory import RunDirectory
from tests.recipe import Recipe

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "grpo.max_num_steps=3",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
    "checkpointing.save_period=1",
    "checkpointing.export_hf=false",
)


def test_a_replay_repeats_the_first_optimizer_step_of_every_step_with_weights(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    # Three steps of two optimizer steps each, with a KL to the reference; checkpoints 2 and 3.
    run = run_grpo(recipe.grpo(*OPTIONS, "logger.keep_rollout_tokens=1")).directory
    recorded = sorted(path.name for path in run.rollouts(0).parent.glob("*.safetensors"))
    assert recorded == [f"step_{step}.safetensors" for step in (1, 2, 3)]
    for step in (1, 3):
        report = replay_step(run.path, step)
        assert report.num_optimizer_steps == 2 and report.num_rows == 16
        for name in ("policy/loss", "policy/grad_norm", "policy/reference_kl_k3"):
            assert report.replayed[name] == pytest.approx(report.logged[name], rel=1e-6, abs=1e-12)

    overrides = [
        "loss_fn.reference_policy_kl_penalty=0.51",
        "policy.sequence_packing.enabled=false",
    ]
    changed = replay_step(run.path, 3, overrides)
    assert changed.overridden is not None
    kl = changed.replayed["policy/reference_kl_k3"]
    assert kl > 0
    difference = changed.overridden["policy/loss"] - changed.replayed["policy/loss"]
    assert difference == pytest.approx(0.5 * kl, rel=1e-4)
    assert changed.overridden["policy/grad_norm"] != changed.replayed["policy/grad_norm"]
    assert changed.overridden["packing/padding_share"] > changed.replayed["packing/padding_share"]

    with pytest.raises(ConfigError, match=r"the KL penalty of the reward from 0 to 0.01"):
        replay_step(run.path, 1, ["loss_fn.reference_policy_kl_in=reward"])

    # The run's layout is planned only: the replay stays in this process.
    ranks = replay_step(run.path, 3, ["cluster.backend=ray", "cluster.workers_per_node=4"])
    assert ranks.overridden is not None
    assert ranks.overridden["policy/loss"] == ranks.replayed["policy/loss"]
    assert ranks.overridden["packing/num_microbatches"] < ranks.replayed["packing/num_microbatches"]

    capsys.readouterr()
    for arguments, message in (
        (["--step", "2"], "no checkpoint of step 1"),
        (["--step", "7"], "no token ids of step 7; steps that can be replayed: 1, 3"),
        (["--step", "1", "policy.optimizer.lr=1"], "policy.optimizer.lr has no effect on a replay"),
    ):
        assert main(["replay", str(run.path), *arguments]) == 2
        assert message in capsys.readouterr().err
    (run.path / "checkpoints" / "step_2" / "manifest.json").unlink()
    assert main(["replay", str(run.path), "--step", "3"]) == 2
    assert "step_2 cannot be loaded" in capsys.readouterr().err


def test_a_replay_gives_the_logged_loss_of_a_step_with_one_optimizer_step(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_grpo(
        recipe.grpo(
            *OPTIONS,
            "grpo.max_num_steps=2",
            "policy.train_global_batch_size=32",
            "loss_fn.reference_policy_kl_penalty=0",
        )
    ).directory
    logged = [json.loads(line) for line in run.metrics.read_text().splitlines()][1]
    report = replay_step(run.path, 2, ["loss_fn.reference_policy_kl_penalty=0.1"])
    for name in ("policy/loss", "policy/grad_norm", "mismatch/gen_kl_k3"):
        assert report.replayed[name] == pytest.approx(logged[name], rel=1e-6, abs=1e-12)
    # The reference was neither loaded nor recorded in the run.
    assert report.overridden is not None
    kl = report.overridden["policy/reference_kl_k3"]
    difference = report.overridden["policy/loss"] - report.replayed["policy/loss"]
    assert kl > 0 and difference == pytest.approx(0.1 * kl, rel=1e-3)

    record = RolloutRecord.load(run.rollout_tokens(2))
    assert record.weights_version == 1 and "policy_logprobs" in record.columns
    # This run takes one optimizer step per rollout, as that of the demo.
    text = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    documented = re.findall(r"\nnemo-like replay runs/demo_grpo .*(loss_fn\S+)", text)
    assert len(documented) == 2
    for override in documented:
        changed = replay_step(run.path, 2, [override])
        assert changed.overridden is not None
        for name in ("policy/loss", "policy/grad_norm"):
            unchanged = pytest.approx(changed.replayed[name], rel=1e-4)
            assert changed.overridden[name] != unchanged, (override, name)

    capsys.readouterr()
    assert main(["replay", str(run.path), "--step", "2", "loss_fn.ratio_clip_max=0.3"]) == 0
    text = capsys.readouterr().out
    assert "with loss_fn.ratio_clip_max=0.3" in text and "packing/efficiency" in text
    check_show(run, capsys)


def test_a_replay_refuses_another_kl_in_the_reward(recipe: Recipe) -> None:
    reward = "loss_fn.reference_policy_kl_in=reward"
    options = (*OPTIONS, "grpo.max_num_steps=1", "policy.generation.max_new_tokens=4")
    run = run_grpo(recipe.grpo(*options, reward)).directory
    for override in (
        "loss_fn.reference_policy_kl_penalty=0.1",
        "loss_fn.reference_policy_kl_in=loss",
    ):
        with pytest.raises(ConfigError, match=r"the KL penalty of the reward from 0.01 to"):
            replay_step(run.path, 1, [override])
    assert replay_step(run.path, 1, ["loss_fn.ratio_clip_max=0.3"]).overridden is not None


def test_a_rollout_above_the_limit_has_some_of_its_groups_and_no_token_ids(recipe: Recipe) -> None:
    overrides = (*OPTIONS, "grpo.max_num_steps=1", "logger.max_rollout_rows=9")
    run = run_grpo(recipe.grpo(*overrides)).directory
    records = [json.loads(line) for line in run.rollouts(1).read_text().splitlines()]
    sizes = Counter(record["group"] for record in records)
    assert set(sizes.values()) == {4} and len(sizes) == 2
    for record in records:
        assert record["num_trained_tokens"] == record["completion_tokens"]
        assert record["logprob_difference_max"] < 1e-3
    assert not run.rollout_tokens(1).exists()
    with pytest.raises(ConfigError, match=r"of at most logger\.max_rollout_rows rows"):
        replay_step(run.path, 1)


def check_show(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    records = [json.loads(line) for line in run.rollouts(2).read_text().splitlines()]
    assert len(records) == 32
    for record in records:
        assert record["source"].rpartition(":")[0].endswith("grpo_train.jsonl")
        assert record["num_trained_tokens"] == record["completion_tokens"]
        assert 0 <= record["logprob_difference_mean"] <= record["logprob_difference_max"] < 1e-4
    for key, name in (
        ("reward", "reward"),
        ("length", "num_tokens"),
        ("difference", "logprob_difference_max"),
    ):
        assert main(["show", str(run.path), "--step", "2", "--rows", "0-3", "--sort", key]) == 0
        text = capsys.readouterr().out
        order = sorted(range(32), key=lambda row: -records[row][name])
        positions = [text.index(f"row {row},") for row in order[:4]]
        assert positions == sorted(positions) and text.count("--- step 2, prompt ") == 4
        assert f"[assistant] ⟦{records[order[0]]['completion']}⟧" in text
        # Prompts have four completions that follow one another in the batch.
        headings = re.findall(r"--- (step 2, prompt .*? completion \d/\d)", text)
        assert headings == [
            f"step 2, prompt {records[row]['group']}, completion {row % 4 + 1}/4"
            for row in order[:4]
        ]
    # Without a step the last one; a prompt is printed once for its completions.
    assert main(["show", str(run.path), "--rows", "0-7"]) == 0
    text = capsys.readouterr().out
    for group, first in ((0, 0), (1, 4)):
        assert text.count(f"[user] {records[first]['prompt']}\n[assistant] ⟦") == 1
        assert text.count(f"--- step 2, prompt {group}, completion ") == 4
    assert main(["show", str(run.path), "--step", "2", "--rows", "5", "--tokens"]) == 0
    text = capsys.readouterr().out
    assert "row 5," in text and "<assistant>⟦" in text, "with special tokens"
    for arguments, message in (
        (["--step", "9"], "recorded are steps 1, 2"),
        (["--step", "2", "--rows", "32"], "the step has rows 0 to 31"),
        (["--step", "2", "--rows", "a"], "is not a row or a range"),
    ):
        assert main(["show", str(run.path), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_a_directory_without_records_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path), "--step", "1"]) == 2
    assert "logger.keep_rollout_tokens" in capsys.readouterr().err
    assert main(["show", str(tmp_path), "--step", "1"]) == 2
    assert "with logger.save_rollouts" in capsys.readouterr().err
