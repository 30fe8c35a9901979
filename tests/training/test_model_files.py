"""Checks of the model that need no workers: its type, frozen weights, router replay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

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


@pytest.fixture
def model_of_type(recipe: Recipe, tmp_path: Path) -> Callable[[str], Path]:
    """`model_of_type(model_type)` gives the demo's model with a configuration of that type."""

    def save(model_type: str) -> Path:
        directory = tmp_path / model_type
        shutil.copytree(recipe.demo / "model", directory)
        AutoConfig.for_model(model_type).save_pretrained(directory)
        return directory

    return save


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("smolvlm", "has vision_config beside its language model"),
        ("gemma3", "has vision_config beside its language model"),
        ("llama4", "has vision_config beside its language model"),
        ("qwen2_audio", "has audio_config beside its language model"),
        ("phi4_multimodal", "has vision_config and audio_config beside its language model"),
        ("emu3", "has other parts beside its language model"),
        ("t5", "transformers has no causal language model of this type"),
    ],
)
def test_a_type_that_the_engine_cannot_build_is_refused(
    model_type: str, reason: str, recipe: Recipe, model_of_type: Callable[[str], Path]
) -> None:
    model = model_of_type(model_type)
    start = f"policy.model_name is '{model}', a model of type {model_type}"
    with pytest.raises(ConfigError) as raised:
        open_config(recipe.sft(f"policy.model_name={model}"))
    message = str(raised.value)
    assert message.startswith(start) and reason in message and "; use a " in message
    assert len(message) < len(str(model)) + 300


def test_a_language_model_may_have_keys_of_the_model_that_it_was_part_of(
    recipe: Recipe, model_of_type: Callable[[str], Path]
) -> None:
    path = model_of_type("llama") / "config.json"
    vision = {"vision_config": {"hidden_size": 8}}
    path.write_text(json.dumps(json.loads(path.read_text()) | vision))
    open_config(recipe.sft(f"policy.model_name={path.parent}"))


def test_the_language_model_of_a_composite_is_no_reward_model(
    recipe: Recipe, model_of_type: Callable[[str], Path]
) -> None:
    model = model_of_type("qwen3_5")
    open_config(recipe.sft(f"policy.model_name={model}", "policy.shared_prefix=false"))
    with pytest.raises(ConfigError, match="has vision_config beside its language model"):
        open_config(recipe.rm(f"policy.model_name={model}"))
    model = model_of_type("granite")
    with pytest.raises(ConfigError, match="transformers has no sequence classification of this"):
        open_config(recipe.rm(f"policy.model_name={model}"))
