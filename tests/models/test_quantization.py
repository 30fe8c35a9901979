"""Models that `policy.lora.quantization` refuses before any worker starts."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import AdapterConfig, PolicyConfig
from nemo_like.models.adapters import check_adapters
from nemo_like.models.spec import ModelSpec, load_spec
from tests.policy.tiny import MIXTURES

NF4 = AdapterConfig(enabled=True, quantization="nf4")
POLICY = PolicyConfig(model_name="m", lora=NF4)


def test_inputs_of_all_layers_are_complete_blocks():
    spec = dataclasses.replace(load_spec("7b"), intermediate_size=64 * 10)
    check_adapters(POLICY, spec, 1)
    check_adapters(POLICY, spec, 2)
    with pytest.raises(ConfigError) as found:
        check_adapters(POLICY, spec, 4)
    text = str(found.value)
    assert "feed-forward width 640 of policy.model_name=m / parallel.tensor 4 = 160" in text
    assert "set parallel.tensor to 2," in text
    odd = dataclasses.replace(spec, intermediate_size=100)
    check_adapters(dataclasses.replace(POLICY, lora=AdapterConfig()), odd, 1)
    with pytest.raises(ConfigError, match=r"feed-forward width 100 .*quantization to none"):
        check_adapters(POLICY, odd, 1)


def test_experts_are_no_linear_layers():
    _, config = MIXTURES["qwen3_moe"]
    with pytest.raises(ConfigError, match="has experts"):
        check_adapters(POLICY, ModelSpec.from_config(config), 1)


def test_a_missing_library_is_named(monkeypatch):
    spec = load_spec("7b")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"bitsandbytes is not installed: pip install .*qlora"):
        check_adapters(POLICY, spec, 1)
