"""The comparison with vLLM, without vLLM: tokens whose experts depend on rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from nemo_like.data.jagged import Jagged
from nemo_like.distributed.batched_data_dict import BatchedDataDict
from tests.model_types.vllm import follows_tie


@torch.no_grad()
def test_only_tokens_after_a_tie_of_two_experts_are_left_out():
    """The router's scores of a token are +s and -s, and s is its number but for rounding."""
    config = MixtralConfig(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_local_experts=2,
        num_experts_per_tok=1,
    )
    model: Any = MixtralForCausalLM(config).eval()
    layer = model.model.layers[0]
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.gate.weight.copy_(torch.tensor([[0.0, 1, 0, 0], [0, -1, 0, 0]]))
    embeddings = torch.ones(10, 4)
    embeddings[:, 1] = torch.arange(10)
    embeddings[7, 1] = 1e-7
    model.model.embed_tokens.weight.copy_(embeddings)
    rows = [[1, 2, 7, 3, 4], [5, 6, 8], [0, 1], [2, 7]]
    batch = BatchedDataDict(input_ids=Jagged.from_rows([np.array(r) for r in rows], np.int32))
    expected = [0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 0, 0]
    assert follows_tie(model, batch).tolist() == [bool(each) for each in expected]
