"""The custom reward package is found by its import path and used by a config as in its README."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.algorithms.registry import load_config
from nemo_like.environments.reward import RewardSample
from nemo_like.environments.reward_calls import load_reward_functions
from tests.recipe import Recipe
from tests.test_docs import documented_names, matches

EXAMPLES = Path(__file__).parents[2] / "examples"
OVERRIDES = ["reward.functions.brief.path=brief_reward.brief", "reward.functions.brief.weight=0.1"]


def test_the_documented_overrides_add_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "rewards"))
    config = load_config("grpo", EXAMPLES / "configs" / "demo_grpo.yaml", OVERRIDES)
    assert config.reward.functions.keys() == {"answer", "brief"}
    assert config.reward.functions["brief"].weight == 0.1
    functions = load_reward_functions(config.reward.functions)
    assert functions["brief"](RewardSample(prompt="2+2=?", completion="4", answer="4")) == 1.0


@pytest.mark.parametrize(
    ("num_characters", "reward"), [(0, 0.0), (60, 1.0), (150, 0.5), (240, 0.0), (1000, 0.0)]
)
def test_brief_is_a_line_between_two_lengths(
    num_characters: int, reward: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "rewards"))
    from brief_reward import brief  # type: ignore[import-not-found]

    completion = "x" * num_characters
    assert brief(RewardSample(prompt="2+2=?", completion=completion)) == pytest.approx(reward)


def test_a_run_uses_the_function_and_logs_documented_names_only(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_like.algorithms.grpo.loop import run_grpo

    monkeypatch.syspath_prepend(str(EXAMPLES / "rewards"))
    config = recipe.grpo(
        *OVERRIDES,
        "grpo.max_num_steps=1",
        "grpo.val_at_start=false",
        "checkpointing.enabled=false",
        "checkpointing.export_hf=false",
    )
    logged = run_grpo(config).last
    assert 0.0 < logged["reward/brief_mean"] <= 1.0
    documented = documented_names()
    assert [name for name in logged if not any(matches(name, other) for other in documented)] == []
