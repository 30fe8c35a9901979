"""Checks of `policy.lora` before a run: target layers, number of trained parameters, a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig, PolicyConfig
from nemo_like.models.adapters import check_adapters, stored_layers
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import num_adapter_params
from nemo_like.training.model_files import adapter_line, check_frozen_models, frozen_models
from tests.policy.tiny import save_tiny_model
from tests.recipe import Recipe


@pytest.mark.parametrize("architecture", ["qwen3_tied", "qwen3_moe_mixed"])
def test_layers_of_the_files_are_those_of_the_model_and_give_the_number_of_parameters(
    architecture: str, recipe: Recipe, tmp_path: Path
):
    directory = save_tiny_model(tmp_path, architecture)
    spec = ModelSpec.from_config(AutoConfig.from_pretrained(directory), str(directory))
    model = AutoModelForCausalLM.from_pretrained(directory)
    expected = {}
    for name, module in model.named_modules():
        is_attention = ".self_attn." in name
        is_adaptable = is_attention or architecture == "qwen3_tied"
        if isinstance(module, nn.Linear) and name != "lm_head" and is_adaptable:
            expected[name] = sum(module.weight.shape)
    assert set(stored_layers(directory, spec)) == set(expected)
    assert len(expected) == (14 if architecture == "qwen3_tied" else 8)
    lora = AdapterConfig(enabled=True, rank=3, target_modules=("all-linear",))
    assert num_adapter_params(spec, lora) == 3 * sum(expected.values())
    num_trained = 3 * sum(expected.values())
    policy = PolicyConfig(model_name=str(directory), lora=lora)
    line = adapter_line(policy, recipe.dpo().needs, spec) or ""
    assert f"rank 3, scale 10.6667, {num_trained:,} of" in line
    assert line.endswith("; reference: the model without it")
    check_adapters(policy, spec, 1)
    for target in ("lm_head", "q_projection", "gate", "embed_tokens"):
        wrong = AdapterConfig(enabled=True, target_modules=("q_proj", target))
        with pytest.raises(
            ConfigError, match=rf"'{target}' is not a linear layer.*k_proj, o_proj, q_proj"
        ):
            check_adapters(PolicyConfig(model_name=str(directory), lora=wrong), spec, 1)


def test_a_resume_compares_the_settings_on_which_adapters_depend(recipe: Recipe, tmp_path: Path):
    def identities(*keys: str) -> dict[str, str]:
        config = recipe.sft(*(f"policy.lora.{key}" for key in keys))
        return frozen_models(config.policy, config.needs)

    config = recipe.sft("policy.lora.enabled=true")
    saved = identities("enabled=true", "rank=4", "target_modules=[q_proj, k_proj]")
    check_frozen_models({}, saved, config.policy, config.needs, tmp_path)
    same = identities(
        "enabled=true", "rank=4", "target_modules=[k_proj, q_proj]", "adapter_path=somewhere"
    )
    check_frozen_models(saved, same, config.policy, config.needs, tmp_path)
    for key, message in (
        ("rank=5", r"policy\.lora\.rank was 4 and is 5"),
        ("use_rslora=true", r"policy\.lora\.use_rslora was False and is True"),
    ):
        changed = identities("enabled=true", "rank=4", "target_modules=[q_proj, k_proj]", key)
        with pytest.raises(ConfigError, match=message):
            check_frozen_models(saved, changed, config.policy, config.needs, tmp_path)
    with pytest.raises(ConfigError, match=r"policy\.lora\.enabled was False and is True"):
        check_frozen_models(
            identities("enabled=false"), saved, config.policy, config.needs, tmp_path
        )
