"""Which models of transformers keep the rows of a packed batch apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from nemo_like.policy.inputs import attention
from nemo_like.torch_data.packed_collate import check_packing_support


def make_model(implementation: str, **options: Any) -> LlamaForCausalLM:
    attention.register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **options,
    )
    config._attn_implementation = implementation
    return LlamaForCausalLM(config)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", attention.IMPLEMENTATION])
def test_causal_models_support_packing(implementation: str) -> None:
    model = make_model(implementation)
    model.train()
    check_packing_support(model)
    assert model.training


def test_attention_that_ignores_the_bounds_of_rows_is_found() -> None:
    def leaking(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    name = "support_test_flash_names"
    AttentionInterface.register(name, leaking)
    AttentionMaskInterface.register(name, lambda *args, **kwargs: None)
    model = make_model("sdpa")
    model.config._attn_implementation = name
    with pytest.raises(ValueError, match="does not separate packed rows"):
        check_packing_support(model)


def test_models_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="no configuration of transformers"):
        check_packing_support(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="no packed attention is known"):
        model = make_model("sdpa")
        model.config._attn_implementation = "flex_attention"
        check_packing_support(model)
    encoder = T5ForConditionalGeneration(
        T5Config(vocab_size=11, d_model=8, d_ff=8, num_layers=1, num_heads=2, d_kv=4)
    )
    with pytest.raises(ValueError, match="has an encoder"):
        check_packing_support(encoder)
    linear = make_model("sdpa")
    linear.config = Qwen3NextConfig(num_hidden_layers=4)  # type: ignore[assignment]
    linear.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="linear attention"):
        check_packing_support(linear)
