"""Checks of `policy.lora` before a run: target layers, number of trained parameters, a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.config.errors import ConfigError
from nemo_like.config.optimization import LoraConfig
from nemo_like.config.schema import PolicyConfig
from nemo_like.models.spec import ModelSpec
from nemo_like.prediction.placement import num_adapter_params
from nemo_like.training.model_files import check_lora, check_resumed_lora, linear_layers, lora_line
from tests.policy.tiny import save_tiny_model


@pytest.mark.parametrize("architecture", ["qwen3_tied", "qwen3_moe_mixed"])
def test_layers_of_the_files_are_those_of_the_model_and_give_the_number_of_parameters(
    architecture: str, tmp_path: Path
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
    assert set(linear_layers(directory, spec)) == set(expected)
    assert len(expected) == (14 if architecture == "qwen3_tied" else 8)
    lora = LoraConfig(enabled=True, rank=3, target_modules=("all-linear",))
    assert num_adapter_params(spec, lora) == 3 * sum(expected.values())
    num_trained = 3 * sum(expected.values())
    assert f"rank 3, scale 10.6667, {num_trained:,} of" in lora_line(lora, spec)
    policy = PolicyConfig(model_name=str(directory), lora=lora)
    check_lora(policy, spec)
    for target in ("lm_head", "q_projection", "gate", "embed_tokens"):
        wrong = LoraConfig(enabled=True, target_modules=("q_proj", target))
        with pytest.raises(
            ConfigError, match=rf"'{target}' is not a linear layer.*k_proj, o_proj, q_proj"
        ):
            check_lora(PolicyConfig(model_name=str(directory), lora=wrong), spec)


def test_a_resume_compares_the_settings_on_which_adapters_depend(tmp_path: Path):
    path = tmp_path / "config.yaml"
    lora = LoraConfig(enabled=True, rank=4, adapter_path="somewhere")
    # Without a file, and with a file from before there was LoRA.
    check_resumed_lora(path, lora)
    path.write_text("policy: {model_name: m}")
    check_resumed_lora(path, LoraConfig())
    with pytest.raises(ConfigError, match=r"policy\.lora\.enabled was False and is True"):
        check_resumed_lora(path, lora)
    targets = list(reversed(lora.target_modules))
    section = {"enabled": True, "rank": 4, "target_modules": targets}
    path.write_text(yaml.safe_dump({"policy": {"lora": section}}))
    check_resumed_lora(path, lora)
    with pytest.raises(ConfigError, match=r"policy\.lora\.use_rslora was False and is True"):
        check_resumed_lora(path, LoraConfig(enabled=True, rank=4, use_rslora=True))
