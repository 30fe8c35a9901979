"""Checks of the model that need no workers: frozen weights, the budget of router replay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import RunConfig
from nemo_like.models.spec import load_spec
from nemo_like.training.model_files import open_model_config
from tests.policy.tiny import save_tiny_model
from tests.recipe import Recipe


def open_config(config: RunConfig) -> None:
    open_model_config(config.policy, config.parallel, config.cluster, config.needs)


@pytest.mark.parametrize(
    ("patterns", "engine", "message"),
    [
        ("[model.layers.0.*, embed_tokens]", "dtensor", "'embed_tokens' matches no weight"),
        ("['*']", "dtensor", "so nothing would be trained"),
        ("['*.k_proj.*']", "megatron", "in one parameter with"),
        ("['*.k_proj.*']", "dtensor", None),
        ("['*.[qkv]_proj.*']", "megatron", None),
    ],
)
def test_patterns_of_frozen_weights_are_checked_on_the_driver(
    patterns: str, engine: str, message: str | None, recipe: Recipe
) -> None:
    config = recipe.sft(f"policy.freeze={patterns}", f"policy.engine={engine}")
    if message is None:
        open_config(config)
        return
    with pytest.raises(ConfigError, match=message):
        open_config(config)


def test_experts_of_a_rollout_above_their_budget_stop_the_run(recipe: Recipe, tmp_path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    moe = load_spec(str(model)).moe
    assert moe is not None
    config = recipe.grpo(f"policy.model_name={model}")
    tokens = config.needs.batch.num_rows * config.policy.max_total_sequence_length
    gib = tokens * len(moe.layers) * moe.num_active_experts / 2**30
    policy = replace(config.policy, router_replay_gib=gib)
    open_config(replace(config, policy=policy))
    policy = replace(policy, router_replay_gib=0.99 * gib)
    with pytest.raises(ConfigError, match=r"GiB of the driver's memory: .* raise it, or set"):
        open_config(replace(config, policy=policy))
    open_config(replace(config, policy=replace(policy, router_replay=False)))
