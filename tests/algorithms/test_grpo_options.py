"""Complete runs with dynamic sampling, overlong completions, several epochs, a KL in the reward and
an updated reference, in this process.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.grpo.loop import epoch_order, run_grpo
from nemo_like.cli import main
from nemo_like.config.errors import ConfigError
from nemo_like.environments.reward import RewardSample
from tests.algorithms.test_runs import interrupt_at, read_metrics
from tests.recipe import Recipe

PLAIN = (
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "data.validation_path=null",
    "checkpointing.keep_latest=9",
    "loss_fn.reference_policy_kl_penalty=0",
)
_HERE = "tests.algorithms.test_grpo_options"


def rarely_unequal(sample: RewardSample) -> float:
    """1 for half of the completions to prompts of even length, 0 for all others."""
    is_even = len(sample.prompt) % 2 == 0
    return float(is_even and len(sample.completion) % 2)


def never_unequal(sample: RewardSample) -> float:
    return 1.0


def rollout_of(run: Path, step: int) -> list[dict]:
    path = run / "rollouts" / f"step_{step}.jsonl"
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def check_groups(run: Path, line: dict[str, float], max_refills: int) -> None:
    """The groups of a step have unequal rewards, and the metrics count them."""
    rows = [row for row in rollout_of(run, int(line["step"])) if row.get("kept", True)]
    sizes = Counter(row["group"] for row in rows)
    assert all(size == 4 for size in sizes.values())
    for group in sizes:
        assert len({row["reward"] for row in rows if row["group"] == group}) > 1
        assert len({row["prompt"] for row in rows if row["group"] == group}) == 1
    missing = 4 - len(sizes)
    assert line["dynamic_sampling/num_missing_groups"] == missing
    assert line["dynamic_sampling/num_refills"] <= max_refills
    if missing == 0:
        assert line["policy/num_rows"] == 16
    sampled = line["dynamic_sampling/num_sampled_groups"]
    assert line["dynamic_sampling/kept_share"] == pytest.approx(len(sizes) / sampled)


def test_dynamic_sampling_refills_and_resumes_without_losing_a_prompt(recipe: Recipe) -> None:
    options = (
        *PLAIN,
        "grpo.dynamic_sampling.enabled=true",
        "grpo.dynamic_sampling.max_refills=2",
        "grpo.num_prompts_per_step=4",
        "policy.generation.max_new_tokens=8",
        f"reward.functions.digits.path={_HERE}.rarely_unequal",
        "checkpointing.export_hf=false",
    )
    run = run_grpo(recipe.grpo(*options)).directory.path
    metrics = read_metrics(run)
    for line in metrics:
        check_groups(run, line, 2)
    assert sum(line["dynamic_sampling/num_refills"] for line in metrics) > 0
    # Not one prompt is sampled twice: the loader is behind all that were sampled.
    num_sampled = sum(line["dynamic_sampling/num_sampled_groups"] for line in metrics)
    state = json.loads((run / "checkpoints/step_4/training_state.json").read_text())
    assert state["loader"]["num_visited"] == num_sampled
    prompts = [rollout_of(run, step) for step in range(1, 5)]
    interrupt_at(run, 2)
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert read_metrics(run) == metrics
    assert [rollout_of(run, step) for step in range(1, 5)] == prompts


def test_a_step_without_unequal_rewards_trains_nothing(
    recipe: Recipe, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The console tells what the run is, and warns once of completions that teach nothing."""
    config = recipe.grpo(
        *PLAIN,
        "grpo.dynamic_sampling.enabled=true",
        "grpo.dynamic_sampling.max_refills=1",
        "grpo.max_num_steps=2",
        "grpo.num_prompts_per_step=4",
        "policy.generation.max_new_tokens=4",
        f"reward.functions.digits.path={_HERE}.never_unequal",
        "checkpointing.export_hf=false",
    )
    with pytest.raises(ConfigError, match="no step of this run has trained a token"):
        run_grpo(config)
    run = recipe.folder / "grpo"
    metrics = read_metrics(run)
    assert [line["dynamic_sampling/num_missing_groups"] for line in metrics] == [4, 4]
    assert [line["reward/mean"] for line in metrics] == [1, 1]
    assert all("policy/loss" not in line for line in metrics)
    dropped = rollout_of(run, 1)
    assert [row["group"] for row in dropped] == [group for group in range(8) for _ in range(4)]
    assert {(row["reward"], row["kept"]) for row in dropped} == {(1.0, False)}
    shown = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(recipe.demo / "model")
    assert shown.startswith(f"grpo run in {run}\n")
    assert f", {model.num_parameters():,} parameters, all trained\ndevice: CPU, 1 worker" in shown
    assert "2 steps; 4 prompts x 4 generations = 16 rows per step\n" in shown
    assert re.search(r"step 1/2  reward 1.000  equal rewards 100%  truncated \d+%  length", shown)
    assert min(line["generation/truncated_share"] for line in metrics) > 0.5
    assert main(["show", str(run), "--step", "1", "--rows", "0"]) == 0
    assert "kept by dynamic sampling False" in capsys.readouterr().out


def test_truncated_completions_have_no_loss_but_stay_in_the_baseline(recipe: Recipe) -> None:
    options = (*PLAIN, "grpo.max_num_steps=1", "checkpointing.enabled=false")
    last = run_grpo(
        recipe.grpo(*options, "grpo.overlong.filter=true", "grpo.overlong.penalty_buffer=8")
    ).last
    rows = rollout_of(recipe.folder / "grpo", 1)
    lengths = np.array([row["completion_tokens"] for row in rows])
    is_truncated = np.array([row["finish_reason"] == "length" for row in rows])
    assert 0 < is_truncated.sum() < len(rows)
    assert last["reward/num_overlong_filtered"] == is_truncated.sum()
    assert last["policy/num_rows"] == (~is_truncated).sum()
    assert last["policy/num_tokens"] == lengths[~is_truncated].sum()
    penalty = -np.clip((lengths - 16) / 8, 0, 1)
    assert last["reward/overlong_penalty_mean"] == pytest.approx(penalty.mean())
    shaped = np.array([row["reward"] for row in rows]) + penalty
    groups = shaped.reshape(8, 4)
    expected = (groups - groups.mean(1, keepdims=True)) / groups.std(1, ddof=1, keepdims=True)
    found = np.array([row["advantage"] for row in rows]).reshape(8, 4)
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_every_epoch_has_all_rows_in_another_order() -> None:
    orders = [epoch_order(7, 3, epoch, 32) for epoch in range(3)]
    assert orders[0].tolist() == list(range(32))
    for order in orders:
        assert sorted(order.tolist()) == list(range(32))
    assert len({tuple(order.tolist()) for order in orders}) == 3
    assert epoch_order(7, 3, 2, 32).tolist() == orders[2].tolist()


@pytest.mark.parametrize("batch_size", [16, pytest.param(32, marks=pytest.mark.exhaustive)])
def test_epochs_take_their_optimizer_steps_and_resume(recipe: Recipe, batch_size: int) -> None:
    options = (
        *PLAIN,
        "loss_fn.reference_policy_kl_penalty=0.05",
        "grpo.num_epochs_per_rollout=2",
        "policy.generation.max_new_tokens=8",
        f"policy.train_global_batch_size={batch_size}",
        "grpo.max_num_steps=3",
        "grpo.reference_update_period=2",
        "checkpointing.save_period=1",
    )
    config = recipe.grpo(*options)
    assert config.computes_prev_logprobs
    result = run_grpo(config)
    run = result.directory.path
    metrics = read_metrics(run)
    assert [line["policy/num_rows"] for line in metrics] == [64, 64, 64]
    state = json.loads((run / "checkpoints/step_3/policy/manifest.json").read_text())
    assert state["num_optimizer_steps"] == 3 * 2 * 32 // batch_size
    # The second pass is off-policy against the log-probs from before the first.
    assert all(line["policy/approx_kl_k3"] > 0 for line in metrics)
    assert (run / "checkpoints/step_2/policy/reference/manifest.json").is_file()
    assert not (run / "checkpoints/step_1/policy/reference").exists()
    weights = (run / "hf/model.safetensors").read_bytes()
    interrupt_at(run, 2)
    run_grpo(recipe.grpo(*options, "resume=true"))
    assert read_metrics(run) == metrics
    assert (run / "hf/model.safetensors").read_bytes() == weights


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.advantage.baseline=none", "grpo.advantage.normalize=none"],
        ["loss_fn.importance_correction.kind=bypass"],
    ],
)
def test_a_kl_in_the_reward_penalizes_tokens_and_not_the_loss(
    recipe: Recipe, overrides: list[str]
) -> None:
    options = (
        *PLAIN,
        "grpo.advantage.whiten=tokens",
        "policy.train_global_batch_size=32",
        "policy.generation.max_new_tokens=8",
        "grpo.max_num_steps=2",
        "checkpointing.enabled=false",
        *overrides,
    )
    penalized = run_grpo(
        recipe.grpo(
            *options,
            "loss_fn.reference_policy_kl_penalty=0.5",
            "loss_fn.reference_policy_kl_in=reward",
        )
    )
    first, second = read_metrics(penalized.directory.path)
    assert abs(first["policy/reference_kl_k1"]) < 1e-5, "policy and reference are equal"
    assert abs(second["policy/reference_kl_k1"]) > 1e-5
    assert "policy/reference_kl_k3" not in first
    # Without a difference to the reference the first step is the same as without a penalty.
    plain = run_grpo(recipe.grpo(*options, "run_name=plain"))
    other = read_metrics(plain.directory.path)[0]
    for name in ("policy/loss", "policy/grad_norm"):
        assert first[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
