"""Recorded choices of routers, and routers that choose given experts, of several model types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    ZayaConfig,
)

from nemo_like.config.errors import ConfigError
from nemo_like.data.routed_experts import join_experts, pack_experts, signed_experts
from nemo_like.models.routers import RouteRecorder, RouterReplay, router_modules

_SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.2,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
# The number of groups that a token may use equals the number of experts that it uses.
_GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_ONE_GROUP: dict[str, Any] = _GROUPS | {"n_group": 1, "topk_group": 1}
CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_EXPERTS, norm_topk_prob=True, mlp_only_layers=[0]),
    "mixtral": MixtralConfig(**_SIZES, num_local_experts=8),
    "gpt_oss": GptOssConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=2),
    "deepseek_v3": DeepseekV3Config(
        **_SIZES | {"num_key_value_heads": 4, "head_dim": 8},
        **_LATENT,
        **_EXPERTS,
        **_GROUPS,
        first_k_dense_replace=1,
    ),
    "glm4_moe": Glm4MoeConfig(**_SIZES, **_EXPERTS, **_GROUPS, first_k_dense_replace=1),
    # One group: its experts are as many as all experts.
    "glm4_moe, one group": Glm4MoeConfig(
        **_SIZES, **_EXPERTS, **_ONE_GROUP, first_k_dense_replace=1
    ),
    "granitemoe": GraniteMoeConfig(**_SIZES, num_local_experts=8, num_experts_per_tok=2),
    "qwen3_next": Qwen3NextConfig(
        **_SIZES, **_EXPERTS, layer_types=["full_attention"] * 2, norm_topk_prob=True
    ),
    # Its router has the bias as a second argument.
    "minimax_m2": MiniMaxM2Config(**_SIZES, **_EXPERTS),
}
TOKENS = torch.arange(24).reshape(2, 12)


def random_model(config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def recorded(model: PreTrainedModel) -> tuple[Tensor, np.ndarray]:
    """Logits and recorded experts of `TOKENS`."""
    recorder = RouteRecorder(model)
    with recorder:
        logits = model(TOKENS).logits
    model(TOKENS)
    return logits, recorder.take()


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_model_repeats_recorded_choices_whatever_its_own_would_be(model_type):
    model = random_model(CONFIGS[model_type])
    logits, experts = recorded(model)
    num_layers = len(router_modules(model))
    assert experts.shape == (24, num_layers, 2)
    replay = RouterReplay(model)
    with torch.no_grad():
        replay.set(torch.from_numpy(signed_experts(experts)))
        torch.testing.assert_close(model(TOKENS).logits, logits, rtol=0, atol=0)
        for router in replay.routers:
            router.get_parameter("weight").add_(torch.randn(8, 32))
        _, repeated = recorded(model)
        assert np.array_equal(repeated, experts)
        # The first three tokens choose by themselves.
        partly = torch.from_numpy(signed_experts(experts))
        partly[:3] = -1
        replay.set(None)
        _, own = recorded(model)
        replay.set(partly)
        _, mixed = recorded(model)
    assert (own != experts).any(-1).mean() > 0.3
    assert np.array_equal(mixed[:3, 0], own[:3, 0])
    assert np.array_equal(mixed[3:], experts[3:])


def test_experts_of_other_tokens_are_an_error():
    model = random_model(CONFIGS["mixtral"])
    replay = RouterReplay(model)
    replay.set(torch.zeros(23, 2, 2, dtype=torch.int16))
    with pytest.raises(RuntimeError, match=r"set policy.router_replay to false"):
        model(TOKENS)


@torch.no_grad()
def test_a_router_with_other_classes_computes_as_before_and_cannot_replay():
    """That of zaya has the states of the router before it, and a class without an expert."""
    model = random_model(
        ZayaConfig(**_SIZES, num_experts=8, num_experts_per_tok=1, router_hidden_size=16)
    )
    expected = model(TOKENS).logits
    replay = RouterReplay(model)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=0)
    replay.set(torch.zeros(24, len(replay.routers), 1, dtype=torch.int16))
    with pytest.raises(ConfigError, match=r"ZayaRouter .* set policy.router_replay to false"):
        model(TOKENS)
    replay.set(None)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=0)


def test_a_model_without_given_experts_is_not_changed():
    model = random_model(CONFIGS["minimax_m2"])
    replay = RouterReplay(model)
    replay.set(None)
    assert not any("forward" in vars(router) for router in replay.routers)


def test_a_dense_model_has_no_routers():
    model = random_model(LlamaConfig(**_SIZES))
    assert router_modules(model) == []
    with pytest.raises(ConfigError, match=r"experts of 2 layers, and 0 routers"):
        RouterReplay(model).set(torch.zeros(24, 2, 2, dtype=torch.int16))


def test_the_last_number_of_the_type_stands_for_no_experts():
    few = pack_experts(np.array([[[254, 3]]]), 255)
    many = pack_experts(np.array([[[255, 300]]]), 512)
    assert (few.dtype, many.dtype) == (np.uint8, np.uint16)
    assert pack_experts(np.zeros(1), 256).dtype == np.uint16, "expert 255 is not 'none'"
    for part in (few, many):
        signed = signed_experts(join_experts([part], 2))
        assert signed.dtype == np.int16
        assert signed.tolist() == [part[0].tolist(), [[-1, -1]]]
