"""Every element of every Hugging Face weight has one owner, wherever the ranks stand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from nemo_like.models.spec import ModelSpec
from nemo_like.policy.megatron.param_map import Geometry, Piece, geometry_of

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
    "qwen3, 1 group": Qwen3Config(**SIZES, num_key_value_heads=1),
}


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("pp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2), (3, 4)])
def test_the_owners_pieces_are_the_whole_model_once(name, pp, tp):
    geometry = geometry_of(ModelSpec.from_config(CONFIGS[name]), pp=pp, tp=tp)
    counts = {
        weight: np.zeros(shape, dtype=int) for weight, shape in shapes_of(CONFIGS[name]).items()
    }
    for stage, tp_rank in itertools.product(range(pp), range(tp)):
        for entry in geometry.table(stage, tp_rank).values():
            filled = np.zeros(entry.shape, dtype=int)
            for piece in entry.pieces:
                filled[piece.local] += 1
                if entry.is_owner:
                    counts[piece.name][piece.whole] += 1
            assert filled.max(initial=0) <= 1
    for weight, count in counts.items():
        assert (count == 1).all(), weight


def test_a_fused_projection_alternates_group_by_group():
    geometry = geometry_of(ModelSpec.from_config(CONFIGS["qwen2, tied, 2 groups"]), tp=2)
    pieces = geometry.table(0, 1)["decoder.layers.3.self_attention.linear_qkv.weight"].pieces
    attention = "model.layers.3.self_attn"
    assert pieces == (
        Piece(f"{attention}.q_proj.weight", (12, 0), (12, 8), (0, 0)),
        Piece(f"{attention}.k_proj.weight", (6, 0), (6, 8), (12, 0)),
        Piece(f"{attention}.v_proj.weight", (6, 0), (6, 8), (18, 0)),
    )


def test_layers_that_do_not_divide_go_to_the_first_stages():
    geometry = geometry_of(ModelSpec.from_config(CONFIGS["llama"]), pp=3)
    assert [list(geometry.layers(stage)) for stage in range(3)] == [[0, 1], [2, 3], [4]]
    assert "decoder.layers.0.mlp.linear_fc2.weight" in geometry.table(2, 0)
    assert (
        geometry.table(2, 0)["decoder.layers.0.mlp.linear_fc2.weight"].pieces[0].name
        == "model.layers.4.mlp.down_proj.weight"
    )


def test_the_vocabulary_is_padded_on_the_last_ranks_and_padding_has_no_piece():
    geometry = geometry_of(ModelSpec.from_config(CONFIGS["llama"]), tp=4)  # 13 rows, 4 to a rank
    assert [list(geometry.vocabulary_range(rank)) for rank in (2, 3)] == [[8, 9, 10, 11], [12]]
    entry = geometry.table(0, 3)["embedding.word_embeddings.weight"]
    assert entry.shape == (4, 8)
    assert [piece.shape for piece in entry.pieces] == [(1, 8)]
    wide = Geometry(
        **{**vars(geometry), "vocabulary": 5, "tp": 4}
    )  # 2 to a rank: the last has none
    assert wide.table(0, 3)["embedding.word_embeddings.weight"].pieces == ()


def test_rows_of_a_piece_move_in_both_tensors():
    piece = Piece("weight", (10, 0), (4, 8), (2, 0))
    assert piece.rows(3, 5) == Piece("weight", (11, 0), (2, 8), (3, 0))
    assert piece.rows(6, 9).numel == 0
    assert piece.rows(0, 2).numel == 0
