"""Models that `policy.lora.quantization` refuses before any worker starts."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.optimization import LoraConfig
from nemo_like.config.schema import PolicyConfig
from nemo_like.models.adapters import quantization_problems
from nemo_like.models.spec import ModelSpec, load_spec
from nemo_like.training.model_files import check_quantization
from tests.policy.tiny import MIXTURES

NF4 = LoraConfig(enabled=True, quantization="nf4")
POLICY = PolicyConfig(model_name="m", lora=NF4)


def test_inputs_of_all_layers_are_complete_blocks():
    spec = dataclasses.replace(load_spec("7b"), intermediate_size=64 * 10)
    assert quantization_problems(POLICY, spec, 1) == []
    assert quantization_problems(POLICY, spec, 2) == []
    (text,) = quantization_problems(POLICY, spec, 4)
    assert "feed-forward width 640 of policy.model_name=m / parallel.tensor 4 = 160" in text
    assert "set parallel.tensor to 2," in text
    odd = dataclasses.replace(spec, intermediate_size=100)
    (text,) = quantization_problems(POLICY, odd, 1)
    assert "feed-forward width of 100, which is not a multiple" in text
    assert quantization_problems(dataclasses.replace(POLICY, lora=LoraConfig()), odd, 1) == []
    with pytest.raises(ConfigError, match="feed-forward width of 100"):
        check_quantization(POLICY, odd, 1)


def test_experts_are_no_linear_layers():
    _, config = MIXTURES["qwen3_moe"]
    (text,) = quantization_problems(POLICY, ModelSpec.from_config(config), 1)
    assert "has experts" in text


def test_a_missing_library_is_named(monkeypatch):
    spec = load_spec("7b")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes is not installed: pip install .*qlora"):
        check_quantization(POLICY, spec, 1)
