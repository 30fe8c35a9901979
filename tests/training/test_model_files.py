"""Checks of the model that need no workers: frozen weights by their names."""

from __future__ import annotations

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.training.model_files import open_model_config
from tests.recipe import Recipe


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
        open_model_config(config)
        return
    with pytest.raises(ConfigError, match=message):
        open_model_config(config)
