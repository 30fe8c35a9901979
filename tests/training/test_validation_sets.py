"""Several validation sets, several answers per prompt, and metrics by source."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest

from nemo_like.algorithms.dpo.loop import run_dpo
from nemo_like.algorithms.grpo.loop import run_grpo
from nemo_like.algorithms.sft.loop import run_sft
from nemo_like.cli import main
from nemo_like.commands.validate import validate
from nemo_like.config.errors import ConfigError
from tests.recipe import Recipe

QUIET = ("checkpointing.enabled=false", "checkpointing.export_hf=false")


def write_sources(recipe: Recipe) -> Path:
    """Six prompts of the demo: two of `easy`, four of `hard ones`."""
    path = recipe.folder / "mixed.jsonl"
    lines = (recipe.demo / "validation.jsonl").read_text().splitlines()[:6]
    with path.open("w") as file:
        for index, line in enumerate(lines):
            row = json.loads(line) | {"origin": "easy" if index < 2 else "hard ones"}
            file.write(json.dumps(row) + "\n")
    return path


def test_answers_are_scored_by_set_and_by_source(
    recipe: Recipe, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = write_sources(recipe)
    options = (
        *QUIET,
        "grpo.max_num_steps=1",
        "grpo.val_at_start=true",
        "grpo.val_num_samples=4",
        "grpo.val_temperature=1.0",
        "grpo.val_pass_reward=0.9",
        f"data.validation_path={mixed}",
        f"data.validation_sets={{same: {mixed}}}",
        "data.source_column=origin",
        "loss_fn.reference_policy_kl_penalty=0",
    )
    config = recipe.grpo(*options)
    assert not validate(config).problems
    result = run_grpo(config)
    _check_eval(recipe, capsys, "grpo", result.first)
    metrics = result.last
    for prefix in ("validation", "validation/same"):
        assert 0 < metrics[f"{prefix}/reward_mean"] <= 1
        for name in ("reward_mean", "avg_at_4", "pass_at_2", "digits_mean"):
            easy = metrics[f"{prefix}/source_easy/{name}"]
            hard = metrics[f"{prefix}/source_hard_ones/{name}"]
            assert metrics[f"{prefix}/{name}"] == pytest.approx((2 * easy + 4 * hard) / 6)
        shares = [metrics[f"{prefix}/pass_at_{k}"] for k in (1, 2, 4)]
        assert shares == sorted(shares)
        assert metrics[f"{prefix}/avg_at_4"] == pytest.approx(shares[0])

    config = recipe.grpo(*options, "data.source_column=prompt_kind")
    message = "data.source_column is 'prompt_kind', but a row of data.validation_path has no value"
    assert any(message in problem for problem in validate(config).problems)
    with pytest.raises(ConfigError, match=message):
        run_grpo(config)


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
        for source, values in {"": results["metrics"], **results["sources"]}.items():
            area = f"{prefix}source_{source}/" if source else prefix
            for metric, estimate in values.items():
                found[area + metric] = estimate["value"]
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
        (["data.validation_sets={source_a: x.jsonl}"], "do not begin with 'source_'"),
        (
            ["data.source_column=origin", "data.validation_path=null", "grpo.val_period=0"],
            "there is no validation file",
        ),
    ],
)
def test_settings_without_effect_are_refused(
    recipe: Recipe, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe.grpo(*overrides)


def test_a_source_without_generated_answers_is_refused(recipe: Recipe) -> None:
    with pytest.raises(ConfigError, match="generates no validation answers"):
        recipe.sft("data.source_column=origin")
