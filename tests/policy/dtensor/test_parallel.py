"""The shard of each weight on a tensor-parallel rank, and the models that cannot be sharded.

One process, no weights.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GraniteSWAConfig,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from nemo_like.config.errors import ConfigError
from nemo_like.parallel_layout import LayoutError, ParallelLayout
from nemo_like.policy.dtensor.model import fsdp_parameter_groups
from nemo_like.policy.dtensor.parallel import Groups, ShardSpec, TensorParallel
from nemo_like.policy.dtensor.tensor_plan import parallelize

SIZES: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def specs_of(
    config: PreTrainedConfig, *, rank: int = 1, size: int = 2, sequence: bool = False
) -> dict[str, ShardSpec]:
    """The specs of a model on the meta device; its collectives, never called, have no group."""
    group: Any = None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    specs = parallelize(TensorParallel(group, rank, size, sequence), model, "a model")
    for name, weight in model.named_parameters(remove_duplicate=False):
        spec = specs[name]
        assert tuple(weight.shape) == tuple(spec.shard(torch.empty(spec.full_shape)).shape), name
    return specs


@pytest.mark.parametrize("sequence", [False, True])
def test_heads_channels_and_vocabulary_are_sharded_and_the_rest_is_replicated(sequence):
    specs = specs_of(
        Qwen3Config(**SIZES, attention_bias=True, tie_word_embeddings=True), sequence=sequence
    )
    layer = "model.layers.1"
    assert specs[f"{layer}.self_attn.q_proj.weight"] == ShardSpec((64, 32), 0, 32, 64)
    assert specs[f"{layer}.self_attn.k_proj.bias"] == ShardSpec((32,), 0, 16, 32)
    assert specs[f"{layer}.self_attn.o_proj.weight"] == ShardSpec((32, 64), 1, 32, 64)
    assert specs[f"{layer}.mlp.down_proj.weight"] == ShardSpec((32, 48), 1, 24, 48)
    assert (
        specs["model.embed_tokens.weight"]
        == specs["lm_head.weight"]
        == ShardSpec((67, 32), 0, 33, 67)
    )
    # Heads are never all here; tokens, and with them norms and biases behind a sum, only under
    # sequence parallelism.
    assert specs[f"{layer}.self_attn.q_norm.weight"] == ShardSpec((16,), has_partial_grad=True)
    assert specs[f"{layer}.input_layernorm.weight"] == ShardSpec((32,), has_partial_grad=sequence)
    assert specs[f"{layer}.self_attn.o_proj.bias"] == ShardSpec((32,), has_partial_grad=sequence)
    assert specs["model.norm.weight"] == ShardSpec((32,), has_partial_grad=sequence)


def test_the_ranks_shards_make_up_the_full_weight():
    parts = [specs_of(LlamaConfig(**SIZES, mlp_bias=True), rank=rank) for rank in (0, 1)]
    for name, spec in parts[0].items():
        full = torch.arange(torch.Size(spec.full_shape).numel()).view(spec.full_shape)
        together = [part[name].shard(full) for part in parts]
        if spec.dim is None:
            assert all(torch.equal(part, full) for part in together), name
        else:
            assert torch.equal(torch.cat(together, spec.dim), full), name


def test_experts_are_complete_and_what_is_computed_on_all_ranks_has_a_full_gradient():
    config = Qwen3MoeConfig(**SIZES, num_experts=5, moe_intermediate_size=16)
    specs = specs_of(config)
    experts = "model.layers.1.mlp.experts"
    assert specs[f"{experts}.gate_up_proj"] == ShardSpec((5, 32, 32), 0, 2, 5)
    assert specs[f"{experts}.down_proj"] == ShardSpec((5, 32, 16), 0, 2, 5)
    assert specs["model.layers.1.mlp.gate.weight"] == ShardSpec((5, 32))
    # The queries are gathered before their norm, and its gradient is complete on every rank.
    attention = "model.layers.1.self_attn"
    specs = specs_of(Olmo2Config(**SIZES), sequence=True)
    assert specs[f"{attention}.q_proj.weight"].dim == 0
    assert specs[f"{attention}.o_proj.weight"].dim == 1
    assert not specs[f"{attention}.q_norm.weight"].has_partial_grad
    sinks = specs_of(GraniteSWAConfig(**SIZES))[f"{attention}.sinks"]
    assert sinks == ShardSpec((4,), 0, 2, 4)


@pytest.mark.parametrize(
    ("plan", "sequence", "message"),
    [
        ({}, False, "no tensor-parallel plan"),
        ({"layers.*.mlp": "sequence_parallel"}, False, "mlp, a Qwen3MLP, to be sequence_parallel"),
        ({"layers.*.mlp.up_proj": "colwise"}, False, "shards Qwen3MLP only colwise"),
        (
            {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"},
            True,
            r"does not list layers\.0\.self_attn.*parallel\.sequence",
        ),
    ],
)
def test_a_plan_that_is_not_supported_is_refused_with_the_way_out(
    plan, sequence, message, monkeypatch
):
    monkeypatch.setattr(Qwen3Config, "base_model_tp_plan", plan)
    with pytest.raises(
        ConfigError, match=rf"policy\.model_name=a model .*{message}.*parallel\.tensor"
    ):
        specs_of(Qwen3Config(**SIZES), sequence=sequence)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "2 key-value heads, and 2 / parallel.tensor 4 = 0.5, .* set parallel.tensor to 2"),
        ({"num_attention_heads": 6}, "6 attention heads, and 6 / parallel.tensor 4 = 1.5"),
        (
            {"vocab_size": 3},
            "a vocabulary of 3, smaller than parallel.tensor 4: set it to 3 or less",
        ),
    ],
)
def test_sizes_that_do_not_divide_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=f"a model has {message}"):
        specs_of(Qwen3Config(**{**SIZES, **sizes}), rank=0, size=4)


def test_a_norm_within_a_block_that_the_plan_leaves_out_is_refused(monkeypatch):
    config = Qwen3Config(**SIZES)
    plan = {
        name: style
        for name, style in (config.base_model_tp_plan or {}).items()
        if "norm" not in name
    }
    monkeypatch.setattr(Qwen3Config, "base_model_tp_plan", plan)
    with pytest.raises(
        ConfigError, match=r"does not list the parameter q_norm\.weight of Qwen3Attention"
    ):
        specs_of(config)


def test_a_pipeline_is_refused():
    with pytest.raises(LayoutError, match=r"parallel\.pipeline is 2, but policy\.engine dtensor"):
        Groups.join(ParallelLayout(pp=2), 0, torch.device("cpu"), mixed_precision=False)


def test_the_groups_of_an_fsdp_unit_are_found_in_old_and_new_releases():
    groups = [object()]
    states = {
        "torch 2.13": SimpleNamespace(_fsdp_param_groups=groups),
        "before": SimpleNamespace(_fsdp_param_group=groups[0]),
        "before, no parameters": SimpleNamespace(_fsdp_param_group=None),
    }
    found = {}
    for release, state in states.items():
        module: Any = SimpleNamespace(_get_fsdp_state=lambda state=state: state)
        found[release] = fsdp_parameter_groups(module)
    assert found == {"torch 2.13": groups, "before": groups, "before, no parameters": []}
