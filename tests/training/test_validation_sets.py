"""Several validation sets, and several answers per prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.preferences.loop import run_dpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from nemo_like.rollout.collector import RolloutJob
from nemo_like.rollout.rows import Rollout
from nemo_like.training.rollout_run import RolloutRun
from tests.recipe import Recipe

QUIET = ("checkpointing.enabled=false", "checkpointing.export_hf=false")


def write_rows(recipe: Recipe, name: str, indices: slice) -> Path:
    """Some of the prompts of the demo."""
    path = recipe.folder / f"{name}.jsonl"
    lines = (recipe.demo / "validation.jsonl").read_text().splitlines()[indices]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_answers_are_scored_by_set(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    every = write_rows(recipe, "every", slice(0, 6))
    easy = write_rows(recipe, "easy", slice(0, 2))
    hard = write_rows(recipe, "hard", slice(2, 6))
    options = (
        *QUIET,
        "grpo.max_num_steps=1",
        "grpo.val_at_start=true",
        "grpo.val_num_samples=4",
        "grpo.val_temperature=1.0",
        "grpo.val_pass_reward=0.9",
        f"data.validation_path={every}",
        f"data.validation_sets={{easy: {easy}, hard: {hard}}}",
        "loss_fn.reference_policy_kl_penalty=0",
    )
    config = recipe.grpo(*options)
    assert not validate(config).problems
    result = run_grpo(config)
    _check_eval(recipe, capsys, "grpo", result.first)
    for prefix in ("validation", "validation/easy", "validation/hard"):
        metrics = result.last
        assert 0 <= metrics[f"{prefix}/reward_mean"] <= 1
        shares = [metrics[f"{prefix}/pass_at_{k}"] for k in (1, 2, 4)]
        assert shares == sorted(shares)
        assert metrics[f"{prefix}/avg_at_4"] == pytest.approx(shares[0])
    assert result.last["validation/reward_mean"] > 0


@pytest.mark.parametrize(
    ("greedy", "options"),
    [
        ("validation", ["grpo.val_top_k=1"]),
        ("validation", ["grpo.val_top_p=0.000001"]),
        ("training", ["policy.generation.top_k=1", "grpo.val_top_k=0"]),
        ("training", ["policy.generation.top_p=0.000001", "grpo.val_top_p=1"]),
        ("both", ["policy.generation.top_k=1"]),
    ],
)
def test_validation_and_training_sample_with_their_own_filters_and_lengths(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, greedy: str, options: list[str]
) -> None:
    """A filter that leaves the most probable token only must give what Transformers decodes."""
    rollouts: list[Rollout] = []
    finish = RolloutRun.finish

    def kept(run: RolloutRun, job: RolloutJob) -> Rollout:
        rollouts.append(finish(run, job))
        return rollouts[-1]

    monkeypatch.setattr(RolloutRun, "finish", kept)
    common = (
        *("grpo.max_num_steps=1", "grpo.num_prompts_per_step=4", "data.max_validation_rows=3"),
        *("grpo.val_temperature=1", "grpo.val_num_samples=2", "grpo.val_max_new_tokens=3"),
        *("policy.generation.max_new_tokens=7", "loss_fn.reference_policy_kl_penalty=0"),
    )
    run_grpo(recipe.grpo(*QUIET, *common, *options))
    before, trained, after = rollouts
    assert [len(each.conversations) for each in rollouts] == [6, 16, 6]
    model = AutoModelForCausalLM.from_pretrained(recipe.demo / "model", dtype=torch.float32)
    assert _is_greedy(model, before, max_new_tokens=3) == (greedy != "training")
    assert _is_greedy(model, trained, max_new_tokens=7) == (greedy != "validation")
    assert max(before.completion_lengths) == max(after.completion_lengths) == 3
    assert max(trained.completion_lengths) == 7


def _is_greedy(model: torch.nn.Module, rollout: Rollout, max_new_tokens: int) -> bool:
    """True if every completion has the tokens that Transformers decodes greedily."""
    for row in rollout.conversations:
        prompt, completion = row.segments
        ids = torch.tensor(prompt, dtype=torch.int64)[None]
        found = model.generate(  # type: ignore[operator]
            ids, do_sample=False, max_new_tokens=max_new_tokens, attention_mask=torch.ones_like(ids)
        )
        if found[0, ids.shape[1] :].tolist() != completion.tolist():
            return False
    return True


def _check_eval(
    recipe: Recipe,
    capsys: pytest.CaptureFixture[str],
    run: str,
    metrics: Mapping[str, float],
    *options: str,
) -> None:
    """Compare `nemo-like eval` of the initial model with the validation before the first step."""
    # The resolved config has the overrides of the run.
    config = recipe.folder / run / "config.yaml"
    capsys.readouterr()
    assert main(["eval", "--config", str(config), "--json", *options]) == 0
    found: dict[str, float] = {}
    for name, results in json.loads(capsys.readouterr().out)["sets"].items():
        prefix = "validation/" if name == "data" else f"validation/{name}/"
        for metric, estimate in results["metrics"].items():
            found[prefix + metric] = estimate["value"]
    expected = {name: value for name, value in metrics.items() if name.startswith("validation/")}
    assert found == pytest.approx(expected, rel=1e-6)


def test_losses_are_those_of_each_set(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    other = recipe.folder / "other.jsonl"
    lines = (recipe.demo / "validation.jsonl").read_text().splitlines()
    other.write_text("\n".join(lines[40:50]) + "\n")
    same = recipe.demo / "validation.jsonl"
    options = (*QUIET, "sft.max_num_steps=1", "sft.val_period=1", "sft.val_at_start=true")
    result = run_sft(recipe.sft(*options, f"data.validation_sets={{same: {same}, other: {other}}}"))
    metrics = result.last
    assert metrics["validation/same/loss"] == metrics["validation/loss"]
    alone = run_sft(recipe.sft(*options, f"data.validation_path={other}", "run_name=alone")).last
    for name in ("loss", "perplexity", "token_accuracy"):
        assert metrics[f"validation/other/{name}"] == alone[f"validation/{name}"]
        assert metrics[f"validation/other/{name}"] != metrics[f"validation/{name}"]
    for prefix in ("validation", "policy"):
        assert metrics[f"{prefix}/perplexity"] == math.exp(metrics[f"{prefix}/loss"])
    assert 0 < metrics["policy/token_accuracy"] < 1
    _check_eval(recipe, capsys, "sft", result.first, "--perplexity")


def test_preferences_are_compared_in_each_set(recipe: Recipe) -> None:
    same = recipe.demo / "dpo_validation.jsonl"
    options = (*QUIET, "dpo.max_num_steps=1", "dpo.val_period=1", "dpo.val_at_start=false")
    metrics = run_dpo(recipe.dpo(*options, f"data.validation_sets={{same: {same}}}")).last
    for name in ("loss", "rewards_accuracies", "rewards_margins"):
        assert metrics[f"validation/same/{name}"] == metrics[f"validation/{name}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["grpo.val_num_samples=4"], "greedy answers to one prompt are all equal"),
        (["data.validation_sets={Big Set: x.jsonl}"], "has the name 'Big Set'"),
    ],
)
def test_settings_without_effect_are_refused(
    recipe: Recipe, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.grpo(*overrides)
