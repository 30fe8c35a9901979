"""Every element of every Hugging Face weight has one owner, wherever the ranks stand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.families import family_of
from nemo_like.policy.megatron.param_map import HFSlice, ModelSharding, ParamMap

SIZES: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "head_dim": 6,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=4),
    "qwen2, tied, 2 groups": Qwen2Config(**SIZES, num_key_value_heads=2, tie_word_embeddings=True),
    "mistral, 2 groups": MistralConfig(**SIZES, num_key_value_heads=2),
    "qwen3, 1 group": Qwen3Config(**SIZES, num_key_value_heads=1),
}


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def param_map(sharding: ModelSharding, stage: int, tp_rank: int) -> ParamMap:
    return family_of(sharding.spec, "tested").param_map(sharding, stage, tp_rank)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("pp", "tp", "vpp"), [(1, 1, 1), (1, 2, 1), (2, 1, 1), (2, 2, 2), (3, 4, 1)]
)
def test_the_owners_slices_cover_the_model_exactly_once(name, pp, tp, vpp):
    sharding = ModelSharding(ModelSpec.from_config(CONFIGS[name]), pp=pp, tp=tp, vpp=vpp)
    counts = {
        weight: np.zeros(shape, dtype=int) for weight, shape in shapes_of(CONFIGS[name]).items()
    }
    for stage, tp_rank in itertools.product(range(pp), range(tp)):
        for spec in param_map(sharding, stage, tp_rank).values():
            filled = np.zeros(spec.shape, dtype=int)
            for hf_slice in spec.slices:
                filled[hf_slice.local_index] += 1
                if spec.is_owner:
                    counts[hf_slice.name][hf_slice.hf_index] += 1
            assert filled.max(initial=0) <= 1
    for weight, count in counts.items():
        assert (count == 1).all(), weight


def test_a_fused_projection_alternates_group_by_group():
    sharding = ModelSharding(ModelSpec.from_config(CONFIGS["qwen2, tied, 2 groups"]), tp=2)
    slices = param_map(sharding, 0, 1)["decoder.layers.3.self_attention.linear_qkv.weight"].slices
    attention = "model.layers.3.self_attn"
    assert slices == (
        HFSlice(f"{attention}.q_proj.weight", (12, 0), (12, 8), (0, 0)),
        HFSlice(f"{attention}.k_proj.weight", (6, 0), (6, 8), (12, 0)),
        HFSlice(f"{attention}.v_proj.weight", (6, 0), (6, 8), (18, 0)),
    )


def test_layers_that_do_not_divide_go_to_the_first_stages():
    sharding = ModelSharding(ModelSpec.from_config(CONFIGS["llama"]), pp=3)
    assert [list(sharding.layers(stage)) for stage in range(3)] == [[0, 1], [2, 3], [4]]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in param_map(sharding, 2, 0)
    assert (
        param_map(sharding, 2, 0)["decoder.layers.0.mlp.linear_fc2.weight"].slices[0].name
        == "model.layers.4.mlp.down_proj.weight"
    )


def test_chunks_of_a_stage_have_layers_that_are_apart():
    sharding = ModelSharding(ModelSpec.from_config(CONFIGS["llama"]), pp=2, vpp=2)
    params = param_map(sharding, 0, 0)
    for name, layer in {"0.decoder.layers.1": 1, "1.decoder.layers.0": 3}.items():
        weight = params[f"{name}.mlp.linear_fc2.weight"].slices[0].name
        assert weight == f"model.layers.{layer}.mlp.down_proj.weight"
    assert "0.embedding.word_embeddings.weight" in params
    assert "1.decoder.final_layernorm.weight" in param_map(sharding, 1, 0)


def test_the_vocabulary_is_padded_on_the_last_ranks_and_padding_has_no_slice():
    sharding = ModelSharding(ModelSpec.from_config(CONFIGS["llama"]), tp=4)  # 13 rows, 4 to a rank
    assert [list(sharding.vocabulary_range(rank)) for rank in (2, 3)] == [[8, 9, 10, 11], [12]]
    spec = param_map(sharding, 0, 3)["embedding.word_embeddings.weight"]
    assert spec.shape == (4, 8)
    assert [hf_slice.shape for hf_slice in spec.slices] == [(1, 8)]
    # 2 rows to a rank: the last has none
    wide = ModelSharding(dataclasses.replace(sharding.spec, vocab_size=5), tp=4)
    assert param_map(wide, 0, 3)["embedding.word_embeddings.weight"].slices == ()


def test_rows_of_a_slice_move_in_both_tensors():
    hf_slice = HFSlice("weight", (10, 0), (4, 8), (2, 0))
    assert hf_slice.rows(3, 5) == HFSlice("weight", (11, 0), (2, 8), (3, 0))
    assert hf_slice.rows(6, 9).numel == 0
    assert hf_slice.rows(0, 2).numel == 0
